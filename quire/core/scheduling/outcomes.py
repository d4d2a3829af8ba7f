"""Outcomes of calls of the scheduler that change several requests."""

from __future__ import annotations

from typing import NamedTuple

from quire.core.types import Update


class FailedStep(NamedTuple):
    """Outcome of a step that raised: requests back in the queue, and the culprit if known."""

    requeued: list[str]
    culprit: str | None


class EnqueueResult(NamedTuple):
    """Requests whose wait for resources is over: queued ones, and updates of failed ones."""

    queued: list[str]
    failed: list[Update]
