"""Resource waits: keep requests out of the queue until the resources they need are ready.

A resource is a compiled grammar, an adapter in memory, a tier's KV: any hashable name. Providers
fetch resources elsewhere and report `ready(name)` or `failed(name, error)`. A request is queued
when its last resource is ready, and ends with the first that failed. Order, cancellation and
release are the same for all providers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.types import Request
from quire.errors import EngineError, RequestError


class WaitResult(NamedTuple):
    """A request whose wait is over."""

    request_id: str
    error: RequestError | EngineError | None = None
    """Error of a request that can never run."""


class ResourceProvider:
    """Fetches resources of one kind. Names are distinct from those of other providers."""

    def check_request(self, request: Request) -> None:
        """Raise RequestError or Overloaded if the request cannot wait for what it needs."""

    def request(self, request: Request) -> Iterable[Hashable]:
        """Start to fetch what the request needs, and hold it until release(). Returns the names."""
        return ()

    def release(self, request: Request) -> None:
        """Release the resources of a request that has ended. Called once for each request()."""

    @property
    def has_outcomes(self) -> bool:
        """Whether report() would report anything."""
        return False

    def report(self, waits: ResourceWaits) -> None:
        """Call waits.ready(name) or waits.failed(name, error) for each name fetched since."""

    def set_outcome_callback(self, callback: Callable[[], None]) -> None:
        """Set callback(), which any thread calls when has_outcomes may have become true."""

    def stats(self) -> object | None:
        """Return one of the types in quire.core.snapshot for a snapshot of the engine, or None."""
        return None


class ResourceWaits:
    """Tracks the wait of every request, for any resource."""

    def __init__(self, providers: Seq[ResourceProvider]) -> None:
        self._providers = tuple(providers)
        self._waiting: dict[Hashable, dict[str, Request]] = {}  # name -> requests, in order
        self._missing: dict[str, set[Hashable]] = {}  # request -> names
        self._results: list[WaitResult] = []

    def check_request(self, request: Request) -> None:
        """Raise RequestError or Overloaded if a provider refuses the request."""
        for provider in self._providers:
            provider.check_request(request)

    def add_request(self, request: Request) -> bool:
        """Start to fetch what an accepted request needs. Returns whether it must wait."""
        held: list[ResourceProvider] = []
        names: set[Hashable] = set()
        try:
            for provider in self._providers:
                names.update(provider.request(request))
                held.append(provider)
        except Exception:
            for provider in held:
                provider.release(request)
            raise
        for name in names:
            self._waiting.setdefault(name, {})[request.id] = request
        if names:
            self._missing[request.id] = names
        return bool(names)

    def remove_request(self, request: Request) -> None:
        """Stop the wait of an added request that has ended, in any state."""
        self._stop_waiting(request.id)
        for provider in self._providers:
            provider.release(request)

    @property
    def has_results(self) -> bool:
        """Whether results() may return a request."""
        return any([provider.has_outcomes for provider in self._providers])  # noqa: C419 faster

    def results(self) -> list[WaitResult]:
        """Return requests whose wait is over, each once, in the order of completion."""
        for provider in self._providers:
            if provider.has_outcomes:
                provider.report(self)
        results, self._results = self._results, []
        return results

    def set_ready_callback(self, callback: Callable[[], None]) -> None:
        for provider in self._providers:
            provider.set_outcome_callback(callback)

    def stats(self) -> list[object]:
        return [one for provider in self._providers if (one := provider.stats()) is not None]

    # -- for providers ------------------------------------------------------------------------

    def ready(
        self, name: Hashable, unfit: Callable[[Request], RequestError | None] | None = None
    ) -> None:
        """Report that a resource is ready. unfit: returns why a request cannot use it, or None."""
        for request in self._waiting.pop(name, {}).values():
            error = None if unfit is None else unfit(request)
            missing = self._missing[request.id]
            missing.discard(name)
            if error is not None or not missing:
                self._finish(request.id, error)

    def failed(self, name: Hashable, error: RequestError | EngineError) -> None:
        """Report that a resource will never be available."""
        for request_id in list(self._waiting.get(name, ())):
            self._finish(request_id, error)

    def _finish(self, request_id: str, error: RequestError | EngineError | None) -> None:
        self._stop_waiting(request_id)
        self._results.append(WaitResult(request_id, error))

    def _stop_waiting(self, request_id: str) -> None:
        for name in self._missing.pop(request_id, ()):
            requests = self._waiting.get(name, {})
            requests.pop(request_id, None)
            if not requests:
                self._waiting.pop(name, None)
