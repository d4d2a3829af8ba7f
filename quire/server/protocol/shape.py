"""The parts that all answers of OpenAI's dialect share: id, time, model, fingerprint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.server.events import Closing

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in every chunk of a response, or in the response."""

    id: str
    object: str
    model: str
    fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """An object with these choices; more keys may be added."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def cut(self, choice: dict[str, Any], mark: str) -> tuple[bytes, bytes]:
        """The event of a chunk with one choice, encoded once, cut where the text `mark` stands.

        A stream's chunks differ by their text alone: each is head + encode(text) + tail.
        """
        head, found, tail = encode(self.body([choice])).partition(encode(mark))
        assert found, choice
        return b"data: " + head, tail + b"\n\n"


def closing_chunk(
    head: Head, closing: Closing, *, usage: bool, details: bool
) -> dict[str, Any] | None:
    """The chunk without choices that ends a stream; None if there is nothing to put into it."""
    chunk = head.body([])
    before = len(chunk)
    if usage:
        chunk["usage"] = closing.usage.shown(details=details)
    add_closing(chunk, closing)
    if len(chunk) == before:
        return None
    chunk["system_fingerprint"] = head.fingerprint
    return chunk


def add_closing(body: dict[str, Any], closing: Closing) -> None:
    """What is known at the end and was asked for."""
    if closing.timing is not None:
        body["x_timing"] = closing.timing
    if closing.metrics is not None:
        body["metrics"] = closing.metrics
