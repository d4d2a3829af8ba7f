"""The parts that all answers of one response share: id, time, model, usage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.outputs import RequestOutput


@dataclass(slots=True)
class Usage:
    """Tokens of one response so far. A prompt counts once, whatever n."""

    details: bool
    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def shown(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if self.details:
            body["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return body


@dataclass(frozen=True, slots=True)
class Shape:
    """What is the same in every chunk of a response, or in the response."""

    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage_of(results: Sequence[RequestOutput], *, details: bool) -> Usage:
    """The usage of finished requests."""
    return Usage(
        details,
        prompt=sum(len(r.prompt_token_ids or ()) for r in results),
        completion=sum(len(one.token_ids) for r in results for one in r.outputs),
        cached=sum(r.num_cached_tokens or 0 for r in results),
    )
