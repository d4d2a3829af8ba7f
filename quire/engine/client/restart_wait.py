"""State of a client whose engine is being restarted: why, until when, and the requests that wait.

Written by the event loop of the client.
"""

from __future__ import annotations

import asyncio
import time

from quire.errors import EngineAway, EngineError

MAX_WAITING_REQUESTS = 1024
"""Requests that may wait while the engine is being restarted."""


class RestartWait:
    """The wait for another engine. There is an engine while `reason` is None."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why the engine is being restarted, or why it is gone."""
        self.waiting_requests = 0
        self._restored: asyncio.Future[None] | None = None  # while another engine is started
        self._expected_at = 0.0

    @property
    def expected_at(self) -> float:
        """When another engine should be ready, by time.monotonic(); 0: there is one."""
        return 0.0 if self.reason is None else self._expected_at

    @property
    def is_pending(self) -> bool:
        """Whether another engine is being started."""
        return self._restored is not None

    def begin(self, reason: str, expected_s: float) -> bool:
        """The engine is gone; another should be ready in so long. False: it was known already."""
        self.reason = reason
        self._expected_at = time.monotonic() + expected_s
        if self._restored is not None:
            return False
        self._restored = asyncio.get_running_loop().create_future()
        return True

    def end(self) -> None:
        """Wake all waiting requests: another engine is ready, or there will be none."""
        if self._restored is not None:
            self._restored.set_result(None)
            self._restored = None

    def fail(self, error: EngineError) -> None:
        """Raise an error in all waiting requests. Others may wait afterwards."""
        if self._restored is not None and self.waiting_requests:
            self._restored.set_exception(error)
            self._restored = asyncio.get_running_loop().create_future()

    async def wait(self, requests: int, limit_s: float) -> None:
        """Wait until end(). Raises EngineAway if that takes long, or many requests wait already."""
        if self.waiting_requests + requests > MAX_WAITING_REQUESTS:
            raise self.error(
                f"and {self.waiting_requests} requests wait for it already (limit: "
                f"{MAX_WAITING_REQUESTS})"
            )
        self.waiting_requests += requests
        try:
            async with asyncio.timeout(limit_s):
                while self._restored is not None:
                    await asyncio.shield(self._restored)
        except TimeoutError:
            raise self.error(f"which takes longer than {limit_s:g} s") from None
        finally:
            self.waiting_requests -= requests

    def error(self, more: str) -> EngineAway:
        """Return the error of what needs an engine. more: what follows in the message."""
        left = max(self._expected_at - time.monotonic(), 1.0)
        return EngineAway(f"the engine is being restarted, {more}: try again", retry_after_s=left)
