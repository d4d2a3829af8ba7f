"""Fields that all answers of OpenAI's API share: id, time, model, fingerprint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.server.generation.events import FinalEvent
from quire.server.generation.generation_request import GenerationRequest
from quire.server.options import ServerOptions

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ResponseEnvelope:
    """Fields that every chunk of a response has, and the response."""

    id: str
    object: str
    model: str
    fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def build_body(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """An object with these choices; more keys may be added."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def split_at(self, choice: dict[str, Any], mark: str) -> tuple[bytes, bytes]:
        """The event of a chunk with one choice, encoded once, cut at the text `mark`.

        A stream's chunks differ by their text alone: each is head + encode(text) + tail.
        """
        head, found, tail = encode(self.build_body([choice])).partition(encode(mark))
        assert found, choice
        return b"data: " + head, tail + b"\n\n"


def usage_in_stream(request: GenerationRequest, options: ServerOptions) -> tuple[bool, bool]:
    """Whether a stream ends with the usage, and whether every chunk has the usage so far."""
    if options.enable_force_include_usage and not request.stream_options:
        return True, True
    at_end = request.include_usage or options.enable_force_include_usage
    return at_end, at_end and request.continuous_usage


def build_final_chunk(
    head: ResponseEnvelope, closing: FinalEvent, *, usage: bool, details: bool
) -> dict[str, Any] | None:
    """The chunk without choices that ends a stream; None if there is nothing to put into it."""
    chunk = head.build_body([])
    before = len(chunk)
    if usage:
        chunk["usage"] = closing.usage.as_dict(details=details)
    add_final_fields(chunk, closing)
    if len(chunk) == before:
        return None
    chunk["system_fingerprint"] = head.fingerprint
    return chunk


def add_final_fields(body: dict[str, Any], closing: FinalEvent) -> None:
    """Add the timing and metrics that the request has switched on."""
    if closing.timing is not None:
        body["x_timing"] = closing.timing
    if closing.metrics is not None:
        body["metrics"] = closing.metrics
