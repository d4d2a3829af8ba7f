"""Multi-head latent attention: keys and values of all heads are made of one latent per token.

    LatentInputs     hidden -> (queries or their compressed form, latents), one product
    LatentUp         the matrices that would make keys and values of a latent; they never do, but
                     are multiplied into queries and outputs instead
    LatentAttention  norms, turns and files the latents, then attends

A checkpoint in fewer bits gives LatentUp its weight in the model's dtype: it is read once a step
as two batches of small matrices, which is no linear layer's product.

Axes: T tokens in the step, E hidden, H query heads, P size of a query without its rotated part,
R rotated size, L latent size, V size of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor

from quire.distributed.collectives import Collectives
from quire.distributed.mesh import Mesh, share
from quire.kernels.mla_write import mla_write
from quire.layers.attention import Attention
from quire.layers.leaf import Leaf
from quire.layers.linear import Linear, Outputs
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope
from quire.weights.mapping import Part, Spread

if TYPE_CHECKING:
    from quire.attention.base import AttentionStep
    from quire.attention.mla import LatentStep


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The shape of one latent attention layer."""

    heads: int
    plain: int
    rotated: int
    value: int
    latent: int
    q_rank: int | None  # queries are compressed to so many numbers first; None: they are not

    @property
    def query(self) -> int:
        """Numbers of one head's query."""
        return self.plain + self.rotated

    @property
    def kept(self) -> int:
        """Numbers in the cache per token."""
        return self.latent + self.rotated


class LatentInputs(Linear):
    """One product for the queries' side and the latents' side. Only heads are cut over ranks."""

    def __init__(self, inputs: int, sizes: LatentSizes) -> None:
        queries = Outputs(sizes.heads, sizes.query, "attention heads")
        if sizes.q_rank is not None:
            queries = Outputs(sizes.q_rank)
        self.cut = sizes.q_rank is None
        super().__init__(inputs, (queries, Outputs(sizes.kept)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x [T, E] -> queries' side [T, H * (P + R)] or [T, q_rank], latents' side [T, L + R]."""
        both = self.method.apply(self, x, self.bias)
        kept = self.outputs[1].rows
        return both[:, :-kept], both[:, -kept:]

    def rows(self) -> list[range]:
        queries, latents = self.outputs
        mine = queries.of(self.mesh) if self.cut else range(queries.units)
        width = queries.width
        return [range(mine.start * width, mine.stop * width), range(latents.rows)]


class LatentUp(Leaf):
    """[H * (P + V), L]: per head, the rows that make its keys, then those that make its values."""

    weight: Tensor

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.heads = sizes.heads
        self.declare("weight")

    def forward(self) -> tuple[Tensor, Tensor]:
        """(keys [H, P, L], values [H, V, L]), views."""
        whole = self.weight.view(self.heads, -1, self.sizes.latent)
        return whole[:, : self.sizes.plain], whole[:, self.sizes.plain :]

    def shard(self, mesh: Mesh, comm: Collectives) -> None:
        self.heads = len(share(self.sizes.heads, mesh, what="attention heads"))
        super().shard(mesh, comm)

    def layout(self, param: str) -> tuple[Part, ...]:
        each = self.sizes.plain + self.sizes.value
        mine = share(self.sizes.heads, self.mesh, what="attention heads")
        rows = range(mine.start * each, mine.stop * each)
        shape = (self.sizes.heads * each, self.sizes.latent)
        return (Part(shape, (rows, range(self.sizes.latent))),)

    def spread(self, param: str) -> Spread:
        return Spread(0.0, self.sizes.latent**-0.5)


class LatentAttention(Attention):
    """Attends over the cached latents of one layer.

    interleaved: channels (2i, 2i + 1) turn together, as in the checkpoint; else (i, i + R/2).
    """

    def __init__(self, sizes: LatentSizes, scale: float, interleaved: bool = True) -> None:
        super().__init__(sizes.heads, 1, sizes.kept, scale=scale)
        self.sizes, self.interleaved = sizes, interleaved

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        kv: Tensor,
        norm: RMSNorm,
        up: LatentUp,
        rope: Rope,
        positions: Tensor,
        step: AttentionStep,
    ) -> Tensor:
        """q [T, H * (P + R)], kv [T, L + R], as projected -> [T, H * V]."""
        latent = cast("LatentStep", step)
        q = q.view(q.shape[0], self.heads, self.sizes.query)
        plain, rotated = q[..., : self.sizes.plain], q[..., self.sizes.plain :]
        cache, slots = latent.room(self)
        turned, _ = mla_write(
            rotated,
            kv,
            norm.weight,
            norm.eps,
            positions,
            rope.table,
            cache,
            slots,
            self.interleaved,
        )
        keys, values = up()
        return latent.attend(plain, turned, keys, values, self)
