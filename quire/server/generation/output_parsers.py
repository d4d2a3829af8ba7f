"""The splitters of a request: the readers of its answers, as the seam in
quire.server.generation.events wants.

Not here: how text is read (quire.text.output.answer_parser), which calls may be made
(quire.server.generation.tool_choice).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.server.generation import tool_choice
from quire.server.generation.events import DeltaToolCall, OutputParser, ParsedDelta
from quire.server.generation.generation_request import GenerationRequest
from quire.server.options import ServerOptions
from quire.text.input_processor import PreparedRequest
from quire.text.output.answer_parser import AnswerParser, ParserOptions
from quire.text.output.parsed_text import ParsedPiece

if TYPE_CHECKING:
    from quire.server.app_state import AppState


def build_parser_options(options: ServerOptions) -> ParserOptions:
    """What the options say. A tool parser is used where tool calls may be read out of the text."""
    return ParserOptions(
        options.reasoning_parser,
        options.tool_call_parser if options.enable_auto_tool_choice else None,
        options.reasoning_parser_plugin,
        options.tool_parser_plugin,
    )


def needs_output_parsers(to: AppState, asked: GenerationRequest) -> bool:
    """Whether the answers hold more than content, for this request."""
    if to.answer_parsers is not None and to.answer_parsers.reasoning is not None:
        return bool(asked.conversations)
    return any(
        one.tools and tool_choice.build_tool_call_plan(to, asked, one).parses_calls
        for one in asked.conversations
    )


def build_output_parsers(
    to: AppState, asked: GenerationRequest, prepared: Sequence[PreparedRequest]
) -> list[OutputParser]:
    """One for each choice."""
    readers = tool_choice.get_answer_parsers(to)
    special = asked.sampling.get("skip_special_tokens") is False
    made: list[OutputParser] = []
    for one, prompt in zip(asked.conversations, prepared):
        began = tool_choice.build_prompt_tail(to, one, prompt.prompt_text or "")
        plan = tool_choice.build_tool_call_plan(to, asked, one)
        made += [
            _AnswerParserAdapter(
                readers.create(
                    began,
                    plan.parser(),
                    parallel=asked.parallel_tool_calls,
                    reasoning=asked.include_reasoning,
                    special=special,
                )
            )
            for _ in range(asked.n)
        ]
    return made


class _AnswerParserAdapter:
    """A reader of answers as a Splitter."""

    def __init__(self, reader: AnswerParser) -> None:
        self._parser = reader
        self.finish = reader.finish

    @property
    def reasoning_tokens(self) -> int | None:
        return self._parser.reasoning_tokens

    @property
    def notes(self) -> Sequence[str]:
        return self._parser.notes

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> Sequence[ParsedDelta]:
        pieces = self._parser.push(text, token_ids, last=last)
        return [_to_parsed_delta(piece) for piece in pieces if not _is_call_end(piece)]


def _is_call_end(piece: ParsedPiece) -> bool:
    """It says only that a call is over."""
    call = piece.call
    return call is not None and call.id is None and not call.arguments


def _to_parsed_delta(piece: ParsedPiece) -> ParsedDelta:
    call = piece.call
    if call is None:
        return ParsedDelta(piece.text, piece.reasoning)
    return ParsedDelta(tool_call=DeltaToolCall(call.index, call.id, call.name, call.arguments))
