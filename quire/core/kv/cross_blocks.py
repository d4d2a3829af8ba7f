"""Cross blocks: hold the keys and values of encoder outputs, which cross attention reads.

A source is the encoder prompt of a request. Its blocks are written once, by the step that starts
the first sequence that needs them, and found by the digest of cache root and source from then on:
by the request's other sequences, its beams, and later requests. A hit needs all blocks of the
source. It is a private helper of the KV cache and writes `cross_table` and `encoder_step` of
sequences.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from quire.core.kv.block_pool import BlockKey, BlockPool
from quire.core.kv.tiers.host import HostTier
from quire.core.types import NO_BLOCK, Request, Sequence


def source_digest(request: Request) -> bytes:
    """Return the digest of what all KV of a request depends on besides its own tokens."""
    digest = sha256(request.cache_root).digest()
    if not request.encoder_prompt:
        return digest
    source = array("i", request.encoder_prompt).tobytes()
    media = b"" if request.encoder_media is None else request.encoder_media.digest
    return sha256(digest + b"encoder" + source + media).digest()


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
        """Number of blocks of the request's source."""
        return -(-len(request.encoder_prompt) // self._block_size)

    def keys(self, seq: Sequence) -> list[BlockKey]:
        """Return the keys of its source's blocks."""
        request = seq.request
        root = source_digest(request) + (b"" if self._shared else request.id.encode())
        return [root + b"/%d" % i for i in range(self.num_blocks(request))]

    def match(self, seq: Sequence) -> None:
        """Use the blocks of its source if the pool and the host tier have all of them.

        Those that only the host tier has are NO_BLOCK until they are loaded.
        """
        keys, host = self.keys(seq), self._host
        if all(key in self._pool or (host is not None and key in host) for key in keys):
            found = [self._pool.acquire_cached(key) for key in keys]
            seq.cross_table = [NO_BLOCK if block is None else block for block in found]

    def blocks_needed(self, seq: Sequence) -> int:
        """Number of blocks of its source that are not on the device."""
        missing = self.num_blocks(seq.request) - len(seq.cross_table)
        return missing + seq.cross_table.count(NO_BLOCK)

    def allocate(self, seq: Sequence, step: int) -> None:
        """Take blocks for a source that match() has not found; `step` writes them.

        That step is being planned, and the pool must have the blocks.
        """
        if seq.cross_table:
            return
        keys = self.keys(seq)
        blocks = self._pool.allocate(len(keys), seq.request.tenant)
        assert blocks is not None, f"{seq.request.id} was admitted without blocks of its source"
        for key, block in zip(keys, blocks, strict=True):
            self._pool.cache_block(block, key)
        seq.cross_table, seq.encoder_step = blocks, step
        self._unwritten.setdefault(step, []).extend(blocks)

    def step_finished(self, step: int) -> None:
        """The blocks that this step writes have their content."""
        self._unwritten.pop(step, None)

    def take_unwritten(self) -> list[int]:
        """Return the blocks that steps in flight write, and expect none of them any longer."""
        blocks = [block for written in self._unwritten.values() for block in written]
        self._unwritten.clear()
        return blocks
