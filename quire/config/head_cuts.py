"""How ranks share attention heads. Pure arithmetic.

KV heads >= ranks   each rank has as many KV heads as the others, and their queries
KV heads <  ranks   some ranks share a KV head: each of them keeps it, and has some of its
                    queries; where these do not divide evenly, some ranks have one more

14 query heads, 2 KV heads, 4 ranks: 0-2 and 3-6 of the first KV head, 7-9 and 10-13 of the
second
"""

from __future__ import annotations

from collections.abc import Collection

from quire.config.memory.kv_layout import LayerFacts
from quire.errors import ConfigError


def can_cut(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether ranks can share these heads."""
    if ranks <= kv_heads:
        return kv_heads % ranks == 0 and heads % ranks == 0
    return ranks % kv_heads == 0 and heads // kv_heads >= ranks // kv_heads


def rank_heads(heads: int, kv_heads: int, ranks: int, rank: int) -> range:
    """Return the query heads of one rank. Raises ConfigError."""
    require_cut(heads, {kv_heads}, ranks)
    if ranks <= kv_heads:
        count = heads // ranks
        return range(rank * count, (rank + 1) * count)
    sharing, each = ranks // kv_heads, heads // kv_heads
    group, part = divmod(rank, sharing)
    start = group * each
    return range(start + part * each // sharing, start + (part + 1) * each // sharing)


def require_cut(heads: int, kv_heads: Collection[int], ranks: int) -> None:
    """Raise ConfigError, with the sizes that work, if ranks cannot share a model's heads.

    kv_heads: of its layers.
    """
    if all(can_cut(heads, count, ranks) for count in kv_heads):
        return
    sizes = [n for n in range(1, heads + 1) if all(can_cut(heads, count, n) for count in kv_heads)]
    of_kv = " and ".join(map(str, sorted(kv_heads)))
    raise ConfigError(
        f"tensor_parallel_size={ranks} cannot cut this model: num_attention_heads is {heads} and "
        f"num_key_value_heads is {of_kv}; sizes that work: {', '.join(map(str, sizes))}"
    )


def require_layer_cuts(heads: int, layers: Collection[LayerFacts], ranks: int) -> None:
    """As require_cut, for the layers of a model; latents have no heads of their own."""
    if ranks > 1 and layers:
        require_cut(heads, {heads if one.latent else one.kv_heads for one in layers}, ranks)
