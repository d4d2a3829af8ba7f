"""Processor cache: tensors of media that were processed before, by the digest of their content.

The digest contains the tenant, so that no tenant can find or name what another one sent. A `uuid`
is the caller's own name of an item: a second index, inside one tenant.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256

from quire.media.processor import ProcessedMedia

MAX_NAMES = 1 << 16
"""Names (uuid) that are kept."""
ENTRY_BYTES = 1024
"""What an entry takes beside its tensors, about."""


def framed_digest(*fields: bytes) -> bytes:
    """Return the SHA-256 of fields, each with its length: no two lists have the same input."""
    digest = sha256()
    for one in fields:
        digest.update(len(one).to_bytes(8, "little"))
        digest.update(one)
    return digest.digest()


class ProcessorCache:
    """Least recently used items go first. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of tensors; 0: nothing is kept. on_find is called with each result."""
        self._max_bytes = max_bytes
        self._items: OrderedDict[bytes, ProcessedMedia] = OrderedDict()
        self._names: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.on_find: Callable[[bool], None] = lambda found: None

    def find(self, digest: bytes) -> ProcessedMedia | None:
        """Return the item of this digest."""
        with self._lock:
            found = self._items.get(digest)
            if found is not None:
                self._items.move_to_end(digest)
        self.on_find(found is not None)
        return found

    def named(self, name: bytes) -> bytes | None:
        """Return the digest of the item that was last put under a name and is still here."""
        with self._lock:
            digest = self._names.get(name)
            return digest if digest in self._items else None

    def put(self, digest: bytes, item: ProcessedMedia, name: bytes | None = None) -> None:
        """Keep an item, unless it is larger than the cache. name: of it, with the tenant."""
        size = _size_of(item)
        with self._lock:
            if size > self._max_bytes:
                return
            if digest not in self._items:
                self._items[digest] = item
                self._bytes += size
            if name is not None:
                self._names[name] = digest
                self._names.move_to_end(name)
                if len(self._names) > MAX_NAMES:
                    self._names.popitem(last=False)
            while self._bytes > self._max_bytes:
                _, removed = self._items.popitem(last=False)
                self._bytes -= _size_of(removed)

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self._items.clear()
            self._names.clear()
            self._bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of what it has."""
        return self._bytes


def _size_of(item: ProcessedMedia) -> int:
    return ENTRY_BYTES + sum(len(one.data) for one in item.tensors)
