"""Watches one request until its answer is no longer wanted: a disconnect, deadline or cancel.

The code that serves the request registers what to do at its end (`on_end`), and does not poll. One
task per request waits for the disconnect; nothing is done per token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from starlette.types import Receive

from quire.errors import QuireError


class ClientDisconnected(QuireError):
    """The client has disconnected."""


class DeadlinePassed(QuireError):
    """The time that the client gave is over."""


class RequestCancelled(QuireError):
    """The request was cancelled by its id before the engine had it, so it has no answer."""


class ActiveRequests:
    """Requests that this process serves, by the id that clients see. Several may share one."""

    def __init__(self) -> None:
        self._watches: dict[str, list[ClientWatch]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._watches.values()))

    def add(self, name: str, one: ClientWatch) -> None:
        """Register a request."""
        self._watches.setdefault(name, []).append(one)

    def remove(self, name: str, one: ClientWatch) -> None:
        """Remove a request that has ended."""
        here = self._watches[name]
        here.remove(one)
        if not here:
            del self._watches[name]

    def cancel(self, names: Iterable[str], tenant: bytes | None) -> int:
        """End requests of a tenant (None: of all) with these ids that the engine cannot end.

        Returns: how many there were.
        """
        here = [one for name in names for one in self._watches.get(name, ())]
        return sum([one.cancel() for one in here if tenant is None or one.tenant == tenant])


class ClientWatch:
    """Watches one client. The body must have been read: nothing else may call receive() later.

    receive: None for work that continues without a connection. seconds: till its deadline, after
    `since` (now); tenant: its owner.
    """

    def __init__(
        self,
        receive: Receive | None,
        seconds: float | None,
        *,
        since: float | None = None,
        tenant: bytes = b"",
    ) -> None:
        loop = asyncio.get_running_loop()
        self.tenant = tenant
        self.end_error: QuireError | None = None
        """Why no answer is wanted any more."""
        self.is_in_engine = False
        """The engine has all of its work, by its id, and can end it with an answer."""
        self._on_end: Callable[[], object] | None = None
        self._deregister: Callable[[], None] | None = None
        self._disconnect_task = (
            None if receive is None else loop.create_task(self._wait_for_disconnect(receive))
        )
        self._seconds = seconds
        self._timer = None
        if seconds is not None:
            late = 0.0 if since is None else time.monotonic() - since
            self._timer = loop.call_later(max(seconds - late, 0.0), self._expire)

    def register(self, under_way: ActiveRequests, name: str) -> None:
        """Be found by this name, until stop()."""
        under_way.add(name, self)
        self._deregister = lambda: under_way.remove(name, self)

    @contextmanager
    def raise_when_ended(self) -> Iterator[None]:
        """Around awaits before there is anything to close: raises what ended them."""
        task = asyncio.current_task()
        assert task is not None, "requests are answered by tasks"
        self.on_end(task.cancel)
        try:
            yield
        except asyncio.CancelledError:
            if self.end_error is None:
                raise
            raise self._fresh_error() from None
        finally:
            self._on_end = None

    def raise_if_ended(self) -> None:
        """Raise why no answer is wanted any more, if that is so."""
        if self.end_error is not None:
            raise self._fresh_error()

    def on_end(self, what: Callable[[], object]) -> None:
        """Call this when the client goes or the deadline passes; at once if that has happened."""
        self._on_end = what
        if self.end_error is not None:
            what()

    def stop(self) -> None:
        """The answer is complete, or given up: watch no more."""
        self._on_end = None
        if self._deregister is not None:
            self._deregister()
            self._deregister = None
        if self._disconnect_task is not None:
            self._disconnect_task.cancel()
            self._disconnect_task = (
                None  # its error has us in its frames: a cycle, for the collector
            )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end_as_disconnected(self) -> None:
        """The client is there and takes nothing: as good as gone."""
        self._end(ClientDisconnected("the client reads no more"))

    def cancel(self) -> bool:
        """End it, unless the engine is to do that. Whether this did."""
        if self.is_in_engine or self.end_error is not None:
            return False
        self._end(RequestCancelled("the request was cancelled"))
        return True

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end(ClientDisconnected("the client went away"))

    def _fresh_error(self) -> QuireError:
        """A new one: an error that was raised and is kept has its frames, and they have us."""
        assert self.end_error is not None, "it is not over"
        return type(self.end_error)(*self.end_error.args)

    def _expire(self) -> None:
        self._end(DeadlinePassed(f"X-Request-Timeout: {self._seconds:g} s have passed"))

    def _end(self, why: QuireError) -> None:
        if self.end_error is None:
            self.end_error = why
            if self._on_end is not None:
                self._on_end()


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
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
