"""Inputs that have broken a step or an engine: for a while they are not tried again.

Known by fingerprint, so that nothing of the input is kept. Bounded: the oldest is forgotten, and
each is after some minutes: what is broken may be mended, or never was the input's fault.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_ENTRIES = 1024
BLOCK_S = 600.0


class RequestBlocklist:
    """fingerprint -> until when."""

    def __init__(
        self,
        most: int = MAX_ENTRIES,
        for_s: float = BLOCK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_entries = most
        self._block_s = for_s
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()  # first to end first

    def __len__(self) -> int:
        return len(self._until)

    def add(self, fingerprint: bytes, left_s: float | None = None) -> None:
        """Again: from now on for as long as the first time.

        left_s: for how long yet, as somebody else's kept() says; they come in its order.
        """
        self._until.pop(fingerprint, None)
        for_s = self._block_s if left_s is None else min(left_s, self._block_s)
        self._until[fingerprint] = self._clock() + for_s
        if len(self._until) > self._max_entries:
            self._until.popitem(last=False)

    def entries(self) -> list[tuple[bytes, float]]:
        """All that is here, and for how long yet; first to end first."""
        self._drop_expired()
        now = self._clock()
        return [(fingerprint, until - now) for fingerprint, until in self._until.items()]

    def seconds_left(self, fingerprint: bytes) -> float | None:
        """For how long yet; None: it is not here."""
        self._drop_expired()
        until = self._until.get(fingerprint, 0.0)
        seconds_left = until - self._clock()
        return seconds_left if seconds_left > 0 else None

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._until:
            first = next(iter(self._until))
            if self._until[first] > now:
                return
            del self._until[first]
