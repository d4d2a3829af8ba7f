"""Bounds the memory of requests whose images, videos and recordings wait for workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.errors import Overloaded

RETRY_S = 2.0

Grow = Callable[[int], None]
"""Counts bytes more. Raises Overloaded."""


class HeldBytes:
    """Bytes of all tenants. One may hold as many as it leaves to the others: half of the bound if
    it is alone, a third beside another that does the same. So there is space for one more tenant.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, tenant: bytes, param: str) -> Iterator[Grow]:
        """Yield what counts bytes until the end. param: of errors."""
        held = 0

        def grow(size: int) -> None:
            nonlocal held
            with self._lock:
                own, total = self._held[tenant], sum(self._held.values())
                if size and own + size > self._most - total:
                    raise Overloaded(
                        f"{param}: {total >> 20} MiB of images, videos and recordings wait, "
                        f"{own >> 20} of them of this key, which leaves no space for "
                        f"{-(-size >> 20)} more: try again later",
                        retry_after_s=RETRY_S,
                    )
                self._held[tenant] += size
                held += size

        try:
            yield grow
        finally:
            with self._lock:
                self._held[tenant] -= held
                if not self._held[tenant]:
                    del self._held[tenant]
