"""The splitters of a request: the readers of its answers, as the seam in quire.server.events wants.

Not here: how text is read (quire.text.readers), which calls may be made (quire.server.forcing).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.server import forcing
from quire.server.asked import Asked
from quire.server.events import Said, Splitter, ToolCall
from quire.server.options import ServerOptions
from quire.text.inputs import Prepared
from quire.text.readers import AnswerReader, Parsers
from quire.text.speech import Piece

if TYPE_CHECKING:
    from quire.server.services import Services


def parsers(options: ServerOptions) -> Parsers:
    """What the options say. A tool parser is used where tool calls may be read out of the text."""
    return Parsers(
        options.reasoning_parser,
        options.tool_call_parser if options.enable_auto_tool_choice else None,
        options.reasoning_parser_plugin,
        options.tool_parser_plugin,
    )


def splits(to: Services, asked: Asked) -> bool:
    """Whether the answers hold more than content, for this request."""
    if to.readers is not None and to.readers.reasoning is not None:
        return bool(asked.conversations)
    return any(one.tools and forcing.plan_of(to, asked, one).reads for one in asked.conversations)


def splitters(to: Services, asked: Asked, prepared: Sequence[Prepared]) -> list[Splitter]:
    """One for each choice."""
    readers = forcing.reader_of(to)
    special = asked.sampling.get("skip_special_tokens") is False
    made: list[Splitter] = []
    for one, prompt in zip(asked.conversations, prepared):
        began = forcing.began_of(to, one, prompt.prompt_text or "")
        plan = forcing.plan_of(to, asked, one)
        made += [
            _Reading(
                readers.answer(
                    began,
                    plan.reader(),
                    parallel=asked.parallel_tool_calls,
                    reasoning=asked.include_reasoning,
                    special=special,
                )
            )
            for _ in range(asked.n)
        ]
    return made


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
