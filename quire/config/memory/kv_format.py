"""KV formats: how a key or a value is stored in the cache. Arithmetic only.

    plain        numbers of a floating-point dtype
    of 8 bits    codes; a number is its code times a scale of the layer, or of a head
    per token    codes, and a float32 scale for each token and head, measured when it is written

The scales of a format per token follow the codes of a head in its block, so that a block is one
run of bytes with all it needs: copies, swaps and tiers move it without knowledge of its format.

    head of a block    token 0 codes | ... | token B-1 codes | B float32 scales | padding
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SCALE_BYTES = 4
HEAD_ALIGNMENT = 16
"""Bytes of the widest access of a GPU. Each head with scales begins at a multiple of it."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a number of the cache is stored."""

    dtype: str  # of what is stored, a name of torch
    itemsize: int
    per_token: bool = False  # each token of each head has a scale

    def scale_offset(self, head_dim: int, block_size: int) -> int:
        """Bytes from a head's first code in a block to its first scale."""
        return _round_up(block_size * head_dim * self.itemsize, SCALE_BYTES)

    def head_bytes(self, head_dim: int, block_size: int) -> int:
        """Bytes of the keys, or the values, of one head in a block."""
        if not self.per_token:
            return block_size * head_dim * self.itemsize
        end = self.scale_offset(head_dim, block_size) + block_size * SCALE_BYTES
        return _round_up(end, HEAD_ALIGNMENT)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


KV_FORMATS: Mapping[str, KVFormat] = {
    "float32": KVFormat("float32", 4),
    "bfloat16": KVFormat("bfloat16", 2),
    "float16": KVFormat("float16", 2),
    "float8_e4m3fn": KVFormat("float8_e4m3fn", 1),
    "float8_e5m2": KVFormat("float8_e5m2", 1),
    "int8": KVFormat("int8", 1),
    "int8_per_token_head": KVFormat("int8", 1, per_token=True),
    "fp8_per_token_head": KVFormat("float8_e4m3fn", 1, per_token=True),
}
"""Name in the config -> format."""
