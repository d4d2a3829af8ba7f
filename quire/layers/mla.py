"""Multi-head latent attention: keys and values of all heads are made of one latent per token.

    LatentInputs     hidden -> (queries or their compressed form, latents), one product
    LatentUp         the matrices that make keys and values of a latent; or are multiplied into
                     queries and outputs instead, see quire.kernels.mla_attention
    LatentAttention  norms, turns and files the latents, then attends

A checkpoint in fewer bits gives LatentUp its weight in the model's dtype: a step reads it as two
batches of small matrices, which is no linear layer's product.

Axes: T tokens in the step, E hidden, H query heads, P size of a query without its rotated part,
R rotated size, L latent size, V size of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from quire.kernels.fp8 import Fp8Weight
from quire.kernels.mla_write import mla_write
from quire.kernels.packed import PackedWeight
from quire.layers.attention import Attention
from quire.layers.linear import Linear, Outputs
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope
from quire.quant.base import Method

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


class LatentUp(Linear):
    """[H * (P + V), L]: per head, the rows that make its keys, then those that make its values."""

    weight: Tensor

    def __init__(self, sizes: LatentSizes) -> None:
        self.sizes = sizes
        super().__init__(
            sizes.latent, (Outputs(sizes.heads, sizes.plain + sizes.value, "attention heads"),)
        )

    def forward(self) -> Tensor:  # type: ignore[override]
        """[H, P + V, L] of this rank's heads, a view."""
        return self.weight.view(-1, self.outputs[0].width, self.sizes.latent)

    def rows(self) -> list[range]:
        out = self.outputs[0]
        mine = out.of(self.mesh)
        return [range(mine.start * out.width, mine.stop * out.width)]

    def equip(self, method: Method) -> None:
        """A checkpoint may have it in fewer bits; there is no use in making them here."""
        if method.extra:
            super().equip(method)

    def settle(self, dtype: torch.dtype) -> None:
        """Back to a plain matrix of the model's dtype, however it came."""
        weight: Tensor | PackedWeight | Fp8Weight = self.weight
        if not isinstance(weight, Tensor):
            self.put("weight", weight.unpack().to(dtype))


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
        turned, latents = mla_write(
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
        return latent.attend(plain, turned, latents, up(), self)
