"""Block keys: digests that name the content of full blocks. Each covers all tokens up to its end.

The key of a block is the SHA-256 of the key before it (of the first block: what the request's cache
depends on besides tokens), its token ids, and what else it holds, such as digests of images.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from hashlib import sha256
from operator import itemgetter
from struct import pack

from quire.core.kv.block_pool import BlockKey
from quire.core.kv.cross_blocks import source_digest
from quire.core.types import Request, Sequence

SPAN = 32
"""Number of blocks whose keys are remembered together."""

MAX_SPANS = 1024
"""Maximum of spans remembered: about 5 MB with blocks of 16 tokens."""


class BlockKeys:
    """Extends the keys of sequences. Prompts that begin alike are hashed once: spans of blocks are
    remembered by their tokens and the key before them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._spans: OrderedDict[bytes, list[BlockKey]] = OrderedDict()  # least recently used first

    def first(self, seq: Sequence, n: int) -> list[BlockKey]:
        """Return the keys of the first n blocks of a sequence, which must be full."""
        keys, size = seq.keys, self._block_size
        if (begin := len(keys)) < n:
            ids = array("i", seq.tokens[begin * size : n * size]).tobytes()
            width = len(ids) // (n - begin)
            parent = keys[-1] if keys else source_digest(seq.request)
            if seq.request.extra_content:
                for i in range(begin, n):
                    at = (i - begin) * width
                    content = ids[at : at + width] + _extra_content(seq.request, i, size)
                    keys.append(parent := sha256(parent + content).digest())
            else:
                self._extend(keys, parent, ids, width)
        return keys[:n]

    def _extend(self, keys: list[BlockKey], parent: BlockKey, ids: bytes, width: int) -> None:
        """Append the keys of the blocks with these ids, of which each has `width` bytes."""
        at = 0
        while at < len(ids):
            # spans begin at multiples of their length, so those of equal prefixes are equal
            end = min(at + (SPAN - len(keys) % SPAN) * width, len(ids))
            content = parent + ids[at:end]
            whole = end - at == SPAN * width
            span = self._spans.get(content) if whole else None
            if span is None:
                span = []
                for block in range(at, end, width):
                    span.append(parent := sha256(parent + ids[block : block + width]).digest())
                if whole:
                    self._spans[content] = span
                    if len(self._spans) > MAX_SPANS:
                        self._spans.popitem(last=False)
            else:
                self._spans.move_to_end(content)
            keys += span
            parent, at = keys[-1], end


def _extra_content(request: Request, block: int, size: int) -> bytes:
    """Content of a block other than token ids: digests, each with its offset in the block."""
    content = request.extra_content
    start, end = block * size, (block + 1) * size
    first, last = (bisect_left(content, at, key=itemgetter(0)) for at in (start, end))
    return b"".join(
        pack("<II", at - start, len(digest)) + digest for at, digest in content[first:last]
    )
