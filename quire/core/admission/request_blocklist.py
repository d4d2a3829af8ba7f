"""Request blocklist: blocks for some minutes inputs that made a step fail or an engine crash.

It keeps fingerprints, never inputs. Its size is bounded: the oldest entry is dropped. Entries
expire, because the cause may be repaired, or may never have been the input.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_ENTRIES = 1024
BLOCK_S = 600.0


class RequestBlocklist:
    """fingerprint -> time when the block ends."""

    def __init__(
        self,
        most: int = MAX_ENTRIES,
        for_s: float = BLOCK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_entries = most
        self._block_s = for_s
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()  # earliest end first

    def __len__(self) -> int:
        return len(self._until)

    def add(self, fingerprint: bytes, left_s: float | None = None) -> None:
        """Block a fingerprint for the full time, or extend its block to that.

        left_s: time left as entries() of another blocklist returns it; added in that order.
        """
        self._until.pop(fingerprint, None)
        for_s = self._block_s if left_s is None else min(left_s, self._block_s)
        self._until[fingerprint] = self._clock() + for_s
        if len(self._until) > self._max_entries:
            self._until.popitem(last=False)

    def entries(self) -> list[tuple[bytes, float]]:
        """Return all fingerprints with the seconds left, earliest end first."""
        self._drop_expired()
        now = self._clock()
        return [(fingerprint, until - now) for fingerprint, until in self._until.items()]

    def seconds_left(self, fingerprint: bytes) -> float | None:
        """Return the seconds left of a block; None if the fingerprint is not blocked."""
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
