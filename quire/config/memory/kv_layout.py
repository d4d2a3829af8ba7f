"""KV layout: groups layers so that they share one pool of equal KV blocks. Arithmetic only.

Layers of one kind (same window) see the same tokens, so they share a block table. Kinds are cut
into groups of equal size; a block of any group then has the same bytes, and one pool serves all.

        place   0        1        2        3
    group 0     layer 5  layer 11 layer 17 layer 23     full attention
    group 1     layer 0  layer 1  layer 2  layer 3      window
    group 2     layer 4  layer 6  layer 7  layer 8      window ...

A place is one KV tensor; the layers in its column use it with different blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from quire.config.memory.kv_format import KVFormat

MAX_PADDING_RATIO = 1.25
"""The larger kind's size is the group size if that pads the smaller kind by less than this."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What one attention layer stores of each token: keys and values, or one latent for both.

    latent: with multi-head latent attention, the values are the first `latent` of a token's
    head_dim numbers, which all heads share (kv_heads is 1). 0: keys and values apart.
    """

    kv_heads: int
    head_dim: int
    window: int | None = (
        None  # a token attends to this many last tokens, itself included. None: all
    )
    latent: int = 0
    cross: bool = False  # of the encoder's output instead of each token: written once per source

    @property
    def planes(self) -> int:
        """Return 2 if values are stored separately, 1 if they are part of the keys."""
        return 1 if self.latent else 2

    def block_bytes(self, block_size: int, form: KVFormat) -> int:
        """Bytes of a block of this layer."""
        return self.planes * self.kv_heads * form.head_bytes(self.head_dim, block_size)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share a block table; layers[i] is at place i."""

    window: int | None  # None: every block is kept
    layers: tuple[int, ...]
    cross: bool = False  # its blocks hold a source, whatever the length of the sequence


def stage_ranges(stage_layers: Sequence[int]) -> list[range]:
    """Return the numbers of each pipeline stage's layers. stage_layers: how many each has."""
    ends = [0, *accumulate(stage_layers)]
    return [range(start, stop) for start, stop in pairwise(ends)]


def groups_of_stage(groups: Sequence[KVCacheGroup], stage: range) -> tuple[KVCacheGroup, ...]:
    """Return the groups as the ranks of one pipeline stage have them: with its layers alone,
    numbered from 0. A group may have none."""
    return tuple(
        replace(group, layers=tuple(i - stage.start for i in group.layers if i in stage))
        for group in groups
    )


def group_layers(
    layers: Sequence[LayerFacts], *, hybrid: bool = True, dealt: bool = False
) -> tuple[KVCacheGroup, ...]:
    """Divide layers into groups of equal size, full attention first.

    One group when all layers are alike. If head shapes differ between kinds, or hybrid is False,
    also one group, which keeps every block: correct for windows too, only larger. The layers of
    cross attention are a group of their own, the last; the others are in groups of its size. No
    layers, no groups.

    dealt: the layers of a kind are dealt to its groups in turn, so that any run of layers, such as
    those of a pipeline stage, has equally many in each.
    """
    if not layers:
        return ()
    cross = tuple(i for i, layer in enumerate(layers) if layer.cross)
    if cross:
        own = tuple(i for i, layer in enumerate(layers) if not layer.cross)
        size = max(len(cross), 1 if hybrid else len(own))
        cut = [KVCacheGroup(None, own[at : at + size]) for at in range(0, len(own), size)]
        return *cut, KVCacheGroup(None, cross, cross=True)
    kinds: dict[int | None, list[int]] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(layer.window, []).append(i)
    if len(kinds) == 1:
        return (KVCacheGroup(layers[0].window, tuple(range(len(layers)))),)
    shapes = {(layer.planes, layer.kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) > 1 or not hybrid:
        return (KVCacheGroup(None, tuple(range(len(layers)))),)
    counts = [len(members) for members in kinds.values()]
    size = max(counts) if max(counts) < MAX_PADDING_RATIO * min(counts) else min(counts)
    found = []
    for window, members in sorted(kinds.items(), key=lambda kind: kind[0] or 0):
        runs = [members[at : at + size] for at in range(0, len(members), size)]
        if dealt:
            runs = [members[i :: len(runs)] for i in range(len(runs))]
        found += [KVCacheGroup(window, tuple(run)) for run in runs]
    return tuple(found)


def place_layers(layers: Sequence[LayerFacts], groups: Sequence[KVCacheGroup]) -> list[LayerFacts]:
    """Return the layers of the longest group: one for each place."""
    return [layers[i] for i in max((group.layers for group in groups), key=len, default=())]


def block_bytes(
    layers: Sequence[LayerFacts], groups: Sequence[KVCacheGroup], block_size: int, form: KVFormat
) -> int:
    """Bytes of one block over all places (keys and values). 0 without groups."""
    return sum(one.block_bytes(block_size, form) for one in place_layers(layers, groups))


def max_blocks_held(
    groups: Sequence[KVCacheGroup], tokens: int, block_size: int, chunk: int, source: int = 0
) -> int:
    """Most blocks a sequence of `tokens` holds at once, all groups, if a step adds up to `chunk`.

    A window group holds the window before the chunk and the chunk, at any offset in a block.
    source: tokens of the encoder's output.
    """
    total = 0
    for group in groups:
        if group.cross:
            total += -(-source // block_size)
            continue
        held = -(-tokens // block_size)
        if group.window is not None:
            seen = min(tokens, group.window - 1 + chunk)
            held = min(held, -(-seen // block_size) + 1)
        total += held
    return total
