"""Output parsers of a request: one for each choice, where its answers hold more than content."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.generation.events import DeltaToolCall, OutputParser, ParsedDelta
from quire.text.output.answer_parser import AnswerParser, PromptTail
from quire.text.output.parsed_text import ParsedPiece
from quire.tool_grammar.answer_plan import AnswerPlan


def build_output_parsers(
    plan: AnswerPlan, tails: Sequence[PromptTail], n: int
) -> list[OutputParser] | None:
    """A parser for each of the `n` answers to each prompt; None: all text is content."""
    if not plan.parses_output:
        return None
    return [_AnswerParserAdapter(plan.create_parser(tail)) for tail in tails for _ in range(n)]


class _AnswerParserAdapter:
    """An AnswerParser as an OutputParser."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.finish = parser.finish

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
    """Whether the piece only marks the end of a call."""
    call = piece.call
    return call is not None and call.id is None and not call.arguments


def _to_parsed_delta(piece: ParsedPiece) -> ParsedDelta:
    call = piece.call
    if call is None:
        return ParsedDelta(piece.text, piece.reasoning)
    return ParsedDelta(tool_call=DeltaToolCall(call.index, call.id, call.name, call.arguments))
