"""Contract of what observes a client of engines."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from quire.core.types import Request, Update


class ClientObserver(Protocol):
    """Observes the messages of a client, synchronously."""

    def on_requests_accepted(self, requests: Sequence[Request]) -> None:
        """The engine has accepted these requests; none of their updates was delivered yet."""
        ...

    def on_updates(self, updates: Sequence[Update]) -> None:
        """All updates for this process, those of closed streams included."""
        ...

    def on_sequence_ended(self, request_id: str, index: int) -> None:
        """A stop string ended a sequence here: no update follows."""
        ...

    def retain_requests(self, request_ids: Container[str]) -> None:
        """Only these requests will have updates: the engine of all others has died."""
        ...
