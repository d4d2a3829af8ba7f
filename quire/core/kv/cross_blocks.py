"""Cross blocks: hold the keys and values of encoder outputs, which cross attention reads.

A source is the encoder prompt of a request, or neighbouring images of its prompt. Its blocks are
written once, by the step that starts the first sequence that needs them, and found by the digest of
cache root and source from then on: by the request's other sequences, its beams, and later requests.
A hit needs all blocks of the source. It is a private helper of the KV cache and writes
`cross_tables`, `encoder_step` and `new_sources` of sequences.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from quire.core.kv.block_pool import BlockKey, BlockPool
from quire.core.kv.tiers.host import HostTier
from quire.core.media.sources import Source, sources_of
from quire.core.types import NO_BLOCK, Request, Sequence


def source_digest(request: Request) -> bytes:
    """Return the digest of what all KV of a request depends on besides its own tokens."""
    digest = sha256(request.cache_root).digest()
    if not request.encoder_prompt:
        return digest
    source = array("i", request.encoder_prompt).tobytes()
    media = b"" if request.encoder_media is None else request.encoder_media.digest
    return sha256(digest + b"encoder" + source + media).digest()


def _source_key(request: Request, source: Source) -> bytes:
    """Return the digest of what the keys and values of a source depend on."""
    if request.encoder_prompt:
        return source_digest(request)
    content = b"".join([one.digest for one in source.items])
    return sha256(request.cache_root + b"images" + content).digest()


class CrossBlocks:
    """shared: requests find the blocks of others; else only their own."""

    def __init__(
        self, pool: BlockPool, block_size: int, host: HostTier | None, *, shared: bool
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._host = host
        self._shared = shared
        self._unwritten: dict[int, list[int]] = {}  # step in flight -> blocks that it writes

    def num_blocks(self, request: Request) -> int:
        """Number of blocks of the request's sources."""
        return sum([-(-one.length // self._block_size) for one in sources_of(request)])

    def keys(self, seq: Sequence) -> list[list[BlockKey]]:
        """Return the keys of the blocks of each of its sources."""
        request, size = seq.request, self._block_size
        own, found = b"" if self._shared else request.id.encode(), []
        for source in sources_of(request):
            root = _source_key(request, source) + own
            found.append([root + b"/%d" % i for i in range(-(-source.length // size))])
        return found

    def match(self, seq: Sequence) -> None:
        """Use the blocks of each source of which the pool and the host tier have all.

        Those that only the host tier has are NO_BLOCK until they are loaded.
        """
        seq.cross_tables = [self._find(keys, self._host) for keys in self.keys(seq)]

    def _find(self, keys: list[BlockKey], host: HostTier | None) -> list[int]:
        """Hold the blocks of a source and return them; [] unless all are there."""
        if not all(key in self._pool or (host is not None and key in host) for key in keys):
            return []
        found = [self._pool.acquire_cached(key) for key in keys]
        return [NO_BLOCK if block is None else block for block in found]

    def blocks_needed(self, seq: Sequence) -> int:
        """Number of blocks of its sources that are not on the device."""
        found = [block for table in seq.cross_tables for block in table if block != NO_BLOCK]
        return self.num_blocks(seq.request) - len(found)

    def allocate(self, seq: Sequence, step: int) -> None:
        """Take blocks for sources that match() has not found; `step` writes them.

        That step is being planned, and the pool must have the blocks.
        """
        new = []
        for i, keys in enumerate(self.keys(seq)):
            if seq.cross_tables[i]:
                continue
            seq.cross_tables[i] = self._find(keys, None)  # an equal source before it has taken some
            if seq.cross_tables[i]:
                continue
            blocks = self._pool.allocate(len(keys), seq.request.tenant)
            assert blocks is not None, f"{seq.request.id} was admitted without blocks of its source"
            for key, block in zip(keys, blocks, strict=True):
                self._pool.cache_block(block, key)
            seq.cross_tables[i], seq.encoder_step = blocks, step
            self._unwritten.setdefault(step, []).extend(blocks)
            new.append(i)
        seq.new_sources = tuple(new)

    def step_finished(self, step: int) -> None:
        """The blocks that this step writes have their content."""
        self._unwritten.pop(step, None)

    def take_unwritten(self) -> list[int]:
        """Return the blocks that steps in flight write, and expect none of them any longer."""
        blocks = [block for written in self._unwritten.values() for block in written]
        self._unwritten.clear()
        return blocks
