"""Is the client still there? Watches one request for its end: a disconnect, or its deadline.

The one idea: whoever works for the client says what is to be done when it is over (`on_end`), and
asks nothing in between. One task a request waits for the disconnect; nothing is done per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Receive

from quire.errors import QuireError


class ClientGone(QuireError):
    """Nobody reads the answer any more."""


class DeadlinePassed(QuireError):
    """The time that the client gave is over."""


class Presence:
    """Of one client. The body must have been read: nothing else may call receive() after this.

    receive: None for work that goes on without a connection.
    """

    def __init__(self, receive: Receive | None, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        self.over: QuireError | None = None
        """Why no answer is wanted any more."""
        self._on_end: Callable[[], object] | None = None
        self._watcher = None if receive is None else loop.create_task(self._watch(receive))
        self._seconds = seconds
        self._timer = None if seconds is None else loop.call_later(seconds, self._expire)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around awaits before there is anything to close: raises what ended them."""
        task = asyncio.current_task()
        assert task is not None, "requests are answered by tasks"
        self.on_end(task.cancel)
        try:
            yield
        except asyncio.CancelledError:
            if self.over is None:
                raise
            raise self.over from None
        finally:
            self._on_end = None

    def on_end(self, what: Callable[[], object]) -> None:
        """Call this when the client goes or the deadline passes; at once if that has happened."""
        self._on_end = what
        if self.over is not None:
            what()

    def leave(self) -> None:
        """The answer is complete, or given up: watch no more."""
        self._on_end = None
        if self._watcher is not None:
            self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def give_up(self) -> None:
        """The client is there and takes nothing: as good as gone."""
        self._end(ClientGone("the client reads no more"))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end(ClientGone("the client went away"))

    def _expire(self) -> None:
        self._end(DeadlinePassed(f"X-Request-Timeout: {self._seconds:g} s have passed"))

    def _end(self, why: QuireError) -> None:
        if self.over is None:
            self.over = why
            if self._on_end is not None:
                self._on_end()


@contextmanager
def at_most(seconds: float, what: str) -> Iterator[None]:
    """Raise DeadlinePassed if the awaits within take longer. Cheaper than a scope of anyio."""
    task, late = asyncio.current_task(), []
    assert task is not None, "requests are answered by tasks"

    def expire() -> None:
        late.append(True)
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        yield
    except asyncio.CancelledError:
        if not late:
            raise
        raise DeadlinePassed(f"{what} did not come within {seconds:g} s") from None
    finally:
        timer.cancel()
