"""Multi-head latent attention: keys and values of all heads are made of one latent per token.

    MLADownProjection  hidden -> (queries or their compressed form, latents), one product
    MLAUpProjection    the matrices that make keys and values of a latent; or are multiplied into
                     queries and outputs instead, see quire.kernels.mla_attention
    MLAAttention       norms, rotates and stores the latents, then attends

A checkpoint in fewer bits gives MLAUpProjection its weight in the model's dtype: a step
reads it as two batches of small matrices, which is no linear layer's product.

Axes: T tokens in the step, E hidden, H query heads, P size of a query without its rotated part,
R rotated size, L latent size, V size of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from quire.kernels.formats.weight import PlainWeight
from quire.kernels.mla_write import mla_write
from quire.layers.attention import Attention
from quire.layers.linear import Linear, OutputGroup
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope
from quire.layers.weight_module import PLAIN
from quire.quant.base import Method

if TYPE_CHECKING:
    from quire.attention.base import AttentionStep
    from quire.attention.mla import MLAStep


@dataclass(frozen=True, slots=True)
class MLASizes:
    """The shape of one latent attention layer."""

    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    q_rank: int | None  # queries are compressed to so many numbers first; None: they are not

    @property
    def query_dim(self) -> int:
        """Numbers of one head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Numbers in the cache per token."""
        return self.latent_dim + self.rope_dim


class MLADownProjection(Linear):
    """One product for the queries' side and the latents' side. Only heads are cut over ranks."""

    def __init__(self, inputs: int, sizes: MLASizes) -> None:
        queries = OutputGroup(sizes.heads, sizes.query_dim, "attention heads")
        if sizes.q_rank is not None:
            queries = OutputGroup(sizes.q_rank)
        self.shards_queries = sizes.q_rank is None
        super().__init__(inputs, (queries, OutputGroup(sizes.cache_dim)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x [T, E] -> queries' side [T, H * (P + R)] or [T, q_rank], latents' side [T, L + R]."""
        both = self.weight.product(x, self.bias)
        kept = self.outputs[1].rows
        return both[:, :-kept], both[:, -kept:]

    def rank_rows(self) -> list[range]:
        queries, latents = self.outputs
        mine = queries.units_of_rank(self.mesh) if self.shards_queries else range(queries.units)
        width = queries.width
        return [range(mine.start * width, mine.stop * width), range(latents.rows)]


class MLAUpProjection(Linear):
    """[H * (P + V), L]: per head, the rows that make its keys, then those that make its values."""

    weight: PlainWeight
    adapter_refusal = (
        "quire multiplies kv_b_proj into queries and outputs, where an adapter cannot be added; "
        "train one without it"
    )

    def __init__(self, sizes: MLASizes) -> None:
        self.sizes = sizes
        super().__init__(
            sizes.latent_dim,
            (OutputGroup(sizes.heads, sizes.nope_dim + sizes.value_dim, "attention heads"),),
        )

    def forward(self) -> Tensor:  # type: ignore[override]
        """[H, P + V, L] of this rank's heads, a view."""
        return self.weight.view(-1, self.outputs[0].width, self.sizes.latent_dim)

    def rank_rows(self) -> list[range]:
        out = self.outputs[0]
        mine = out.units_of_rank(self.mesh)
        return [range(mine.start * out.width, mine.stop * out.width)]

    def set_quant_method(self, method: Method) -> None:
        """A checkpoint may have it in fewer bits; there is no use in making them here."""
        if method.is_stored or method is PLAIN:
            super().set_quant_method(method)

    def after_load(self, dtype: torch.dtype) -> None:
        """Back to a plain matrix of the model's dtype, however it came."""
        if self.weight.kind != PlainWeight.kind:
            self.set_param("weight", self.weight.dequantize(dtype))


class MLAAttention(Attention):
    """Attends over the cached latents of one layer.

    interleaved: channels (2i, 2i + 1) turn together, as in the checkpoint; else (i, i + R/2).
    """

    def __init__(self, sizes: MLASizes, scale: float, interleaved: bool = True) -> None:
        super().__init__(sizes.heads, 1, sizes.cache_dim, scale=scale)
        self.sizes, self.interleaved = sizes, interleaved

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        kv: Tensor,
        norm: RMSNorm,
        up: MLAUpProjection,
        rope: Rope,
        positions: Tensor,
        step: AttentionStep,
    ) -> Tensor:
        """q [T, H * (P + R)], kv [T, L + R], as projected -> [T, H * V]."""
        latent = cast("MLAStep", step)
        q = q.view(q.shape[0], self.heads, self.sizes.query_dim)
        plain, rotated = q[..., : self.sizes.nope_dim], q[..., self.sizes.nope_dim :]
        cache, slots = latent.cache_and_slots(self)
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
