"""Contract of a transport: carries messages between a client and one engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.engine.messages import MessageFromEngine, MessageToEngine
from quire.engine.supervise.process_pipe import EngineUnavailable
from quire.errors import EngineDead


class Transport(Protocol):
    """Carries messages to an engine and back."""

    def start(
        self,
        deliver: Callable[[MessageFromEngine], None],
        die: Callable[[EngineDead], None],
        away: Callable[[EngineUnavailable], None],
        back: Callable[[], None],
    ) -> None:
        """Start, on the event loop that will use it: all four callbacks are called there.

        away: the engine's process has ended. back: another engine is ready. die: there will be
        none.
        """
        ...

    def send(self, message: MessageToEngine) -> None: ...

    def restart(self, reason: str) -> None:
        """Kill the engine, whatever it does, and start another."""
        ...

    async def stop(self) -> None:
        """Stop the transport, and the engine if the transport owns it."""
        ...

    def close(self) -> None:
        """Disconnect without waiting."""
        ...
