"""Mesh: the sizes of the parallel axes, and the rank of this process in each. Immutable.

    rank = ((dp_rank * pp) + pp_rank) * tp + tp_rank        neighbours share tensors

Experts (ep) are spread over the same processes as tp and dp, so ep adds no axis of its own: it is
1, where each rank has a slice of every expert, or tp * dp, where each has some experts whole. The
tokens of a sequence are spread over dcp neighbours of a tp group, which have the same KV heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.config.engine_config import ParallelSection
from quire.config.head_cuts import rank_heads
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the axes, and the rank of this process. The default is a single process."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    rank: int = 0
    dcp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp", "ep", "dcp"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"mesh axis {axis} is {getattr(self, axis)}; it must be >= 1")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} is not in [0, {self.size})")

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.dp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dcp_rank(self) -> int:
        """This rank's place among the `dcp` over which the tokens of a sequence are spread."""
        return self.rank % self.dcp

    @property
    def pp_rank(self) -> int:
        """Number of the pipeline stage."""
        return self.rank // self.tp % self.pp

    @property
    def dp_rank(self) -> int:
        """Number of the data-parallel rank: its tp and pp ranks have the same requests."""
        return self.rank // (self.tp * self.pp)

    @property
    def ep_rank(self) -> int:
        """This rank's place among the `ep` that share experts: those of all tp and dp ranks."""
        return (self.dp_rank * self.tp + self.tp_rank) % self.ep


def mesh_of(section: ParallelSection, rank: int) -> Mesh:
    """Return the place of a rank of an engine."""
    ep = 1 if section.expert_placement is None else section.tensor * section.data
    return Mesh(section.tensor, section.stages, section.data, ep, rank, section.context)


def shard_range(units: int, mesh: Mesh, *, what: str, repeat: bool = False) -> range:
    """Return the units of this tp rank, of `units` equal ones that cannot be split.

    repeat: fewer units than ranks are allowed; neighbours then hold the same one (kv heads).
    """
    tp, rank = mesh.tp, mesh.tp_rank
    if units % tp == 0:
        count = units // tp
        return range(rank * count, (rank + 1) * count)
    if repeat and tp % units == 0:
        one = rank * units // tp
        return range(one, one + 1)
    raise ConfigError(
        f"tensor_parallel_size {tp} does not divide the {units} {what} of this model; "
        f"choose a divisor of {units}"
    )


def head_range(heads: int, kv_heads: int, mesh: Mesh) -> range:
    """This tp rank's query heads, of the KV heads it has: see quire.config.head_cuts."""
    return rank_heads(heads, kv_heads, mesh.tp, mesh.tp_rank)


def width_range(total: int, mesh: Mesh, block: int = 1) -> range:
    """This tp rank's range of a width: of an MLP, or of one expert.

    Equal ranges where it divides, else pieces of up to 64 that ranks share as evenly as they can.
    block: the range consists of whole blocks, but for the last one of all.
    Raises: ConfigError if there are fewer of them than ranks.
    """
    tp, rank = mesh.tp, mesh.tp_rank
    if total % tp == 0 and total // tp % block == 0:
        return range(rank * total // tp, (rank + 1) * total // tp)
    unit = math.lcm(block, math.gcd(total, 64))
    while unit > block and -(-total // unit) < tp:
        unit = max(block, math.gcd(total, unit // 2))
    count = -(-total // unit)
    if count < tp:
        raise ConfigError(
            f"tensor_parallel_size={tp}: a width of {total} has {count} blocks of {unit} that "
            f"share a scale or a word, fewer than ranks; use at most {count}, or for experts "
            "enable_expert_parallel"
        )
    start, stop = (unit * (count * one // tp) for one in (rank, rank + 1))
    return range(start, min(stop, total))


STRIP_GRAIN = 512
"""Tokens that draws from the vocabulary add up together: strips are multiples of it."""


def strip_size(vocab: int, ranks: int) -> int:
    """Tokens in each rank's strip of a vocabulary but the last ones."""
    size = -(-vocab // ranks)
    grains = -(-size // STRIP_GRAIN) * STRIP_GRAIN
    return grains if ranks > 1 and grains * (ranks - 1) < vocab else size


def vocab_range(vocab: int, mesh: Mesh) -> range:
    """This tp rank's strip of a vocabulary: of whole grains, if then every rank has some tokens."""
    return uneven_shard_range(vocab, mesh, strip_size(vocab, mesh.tp))


def uneven_shard_range(total: int, mesh: Mesh, size: int | None = None) -> range:
    """This tp rank's range of `total` rows that need not divide: all but the last are equal.

    size: rows of a rank; None: as few as will do.
    """
    size = size or -(-total // mesh.tp)
    start = min(mesh.tp_rank * size, total)
    return range(start, min(start + size, total))
