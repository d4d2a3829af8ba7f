"""Provides prefixes in a slow tier as resources: a request waits until its prefix is on the device.

A load is started once, also for several requests, and never fails a request: what is not loaded is
computed. Its blocks are held until it has ended, even if all its requests have.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from quire.core.kv.kv_cache import KVCache
from quire.core.kv.tiers.base import SlowTier
from quire.core.scheduling.waiting import ResourceProvider, ResourceWaits
from quire.core.types import Request


class KVLoadWait(ResourceProvider):
    """Provides contents of one tier."""

    def __init__(self, kv: KVCache, tier: SlowTier) -> None:
        self._kv = kv
        self._tier = tier

    def request(self, request: Request) -> Iterable[Hashable]:
        return self._kv.start_loads(request, self._tier)

    @property
    def has_outcomes(self) -> bool:
        return self._tier.has_ended

    def report(self, waits: ResourceWaits) -> None:
        for name, loaded in self._tier.ended():
            self._kv.finish_load(name, loaded=loaded)
            waits.ready(name)

    def set_outcome_callback(self, callback: Callable[[], None]) -> None:
        self._tier.set_ended_callback(callback)
