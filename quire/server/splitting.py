"""The splitters of a request: the readers of its answers, as the seam in quire.server.events wants.

Not here: how text is read (quire.text.readers), what a request may ask for (quire.server.admit).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.server.asked import Asked, Conversation
from quire.server.events import Said, Splitter, ToolCall
from quire.server.options import ServerOptions
from quire.text.inputs import Prepared
from quire.text.readers import AnswerReader, Began, Parsers, Readers, text_of
from quire.text.speech import Piece


def parsers(options: ServerOptions) -> Parsers:
    """What the options say. A tool parser is used where tool calls may be read out of the text."""
    return Parsers(
        options.reasoning_parser,
        options.tool_call_parser if options.enable_auto_tool_choice else None,
        options.reasoning_parser_plugin,
        options.tool_parser_plugin,
    )


def splits(readers: Readers | None, asked: Asked) -> bool:
    """Whether the answers hold more than content, for this request."""
    if readers is None:
        return False
    return any(
        readers.reasoning is not None or _tools(readers, asked, one) is not None
        for one in asked.conversations
    )


def splitters(
    readers: Readers, asked: Asked, prepared: Sequence[Prepared], defaults: Mapping[str, object]
) -> list[Splitter]:
    """One for each choice. defaults: variables of the template, under those of the request."""
    special = asked.sampling.get("skip_special_tokens") is False
    made: list[Splitter] = []
    for one, prompt in zip(asked.conversations, prepared):
        begun = text_of(one.messages[-1]) if one.continue_final_message else ""
        began = Began(prompt.prompt_text or "", begun, {**defaults, **one.variables})
        tools = _tools(readers, asked, one)
        made += [
            _Reading(
                readers.answer(
                    began,
                    tools,
                    parallel=asked.parallel_tool_calls,
                    reasoning=asked.include_reasoning,
                    special=special,
                )
            )
            for _ in range(asked.n)
        ]
    return made


def _tools(
    readers: Readers, asked: Asked, one: Conversation
) -> Sequence[Mapping[str, object]] | None:
    """The tools whose calls are to be read out of the text of an answer."""
    if readers.tools is None or asked.tool_choice not in (None, "auto"):
        return None
    return one.tools or None


class _Reading:
    """A reader of answers as a Splitter."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self.finish = reader.finish

    @property
    def reasoning_tokens(self) -> int | None:
        return self._reader.reasoning_tokens

    @property
    def notes(self) -> Sequence[str]:
        return self._reader.notes

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> Sequence[Said]:
        pieces = self._reader.push(text, token_ids, last=last)
        return [_said(piece) for piece in pieces if not _is_end(piece)]


def _is_end(piece: Piece) -> bool:
    """It says only that a call is over."""
    call = piece.call
    return call is not None and call.id is None and not call.arguments


def _said(piece: Piece) -> Said:
    call = piece.call
    if call is None:
        return Said(piece.text, piece.reasoning)
    return Said(tool_call=ToolCall(call.place, call.id, call.name, call.arguments))
