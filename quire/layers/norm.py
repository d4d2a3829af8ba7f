"""Norms. Those named Add... take the residual too, and return it summed for the next layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from quire.distributed.mesh import Mesh, head_range, shard_range
from quire.kernels.framework import lazy_fusion
from quire.kernels.layer_norm import layer_norm
from quire.kernels.native.op_tape import on_replay
from quire.kernels.rms_norm import rms_norm
from quire.layers.param_module import ParamModule, VectorModule
from quire.weights.mapping import InitSpec, WeightShard


class RMSNorm(VectorModule):
    """y = x / rms(x) * (offset + weight), over the last axis."""

    weight: Tensor

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(size)
        self.eps, self.offset = eps, offset
        self.declare("weight")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., E], strided views allowed -> the same shape."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset)[0]

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0 - self.offset, 0.02)


class AddRMSNorm(RMSNorm):
    """RMSNorm of x + residual."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, residual [T, E] -> (normed, x + residual)."""
        return rms_norm(x, self.weight, self.eps, residual, self.offset)


class UnitRMSNorm(nn.Module):
    """RMSNorm without a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self._ones = torch.empty(0)  # until `place_constants`

    def place_constants(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the weight that the kernel reads, before the first forward."""
        self._ones = torch.ones(self.size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., E], strided views allowed -> the same shape."""
        return rms_norm(x, self._ones, self.eps)[0]


class AllHeadsRMSNorm(ParamModule):
    """RMSNorm over all heads of a projection at once. Each rank has the heads of its QKVLinear.

    kv_heads: of queries; None: these are the KV heads, of which ranks may share one.
    """

    weight: Tensor

    def __init__(self, heads: int, head_dim: int, eps: float, kv_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.head_dim, self.eps, self.kv_heads = heads, head_dim, eps, kv_heads
        self.declare("weight")

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H, D], heads of this rank, strided views allowed -> the same shape."""
        flat = x.view(x.shape[0], -1)
        if self.mesh.tp > 1:
            return self._norm_sharded(flat).view(x.shape)
        return rms_norm(flat, self.weight, self.eps)[0].view(x.shape)

    def _norm_sharded(self, x: Tensor) -> Tensor:
        """The squares are summed over ranks; a head that several ranks have counts on each."""
        lazy_fusion.flush()  # x is read by torch
        squares = on_replay(_sum_squares, x, shape=(x.shape[0], 1), dtype=torch.float32)
        return on_replay(self._scale_sharded, x, self.comm.all_reduce(squares))

    def _scale_sharded(self, x: Tensor, squares: Tensor) -> Tensor:
        lazy_fusion.flush()  # the sum is read by torch
        copies = 1 if self.kv_heads is not None else max(1, self.mesh.tp // self.heads)
        scale = torch.rsqrt(squares / (self.heads * self.head_dim * copies) + self.eps)
        return (x.float() * scale * self.weight.float()).to(x.dtype)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        heads = _rank_heads(self.heads, self.kv_heads, self.mesh)
        mine = range(heads.start * self.head_dim, heads.stop * self.head_dim)
        return (WeightShard((self.heads * self.head_dim,), (mine,)),)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0, 0.02)


def _rank_heads(heads: int, kv_heads: int | None, mesh: Mesh) -> range:
    if kv_heads is None:
        return shard_range(heads, mesh, what="key-value heads", repeat=True)
    return head_range(heads, kv_heads, mesh)


def _sum_squares(x: Tensor) -> Tensor:
    return x.float().square().sum(-1, keepdim=True)


class LayerNorm(VectorModule):
    """y = (x - mean) / deviation * weight + bias, over the last axis."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, size: int, eps: float, bias: bool = True) -> None:
        super().__init__(size)
        self.eps = eps
        self.declare("weight")
        if bias:
            self.declare("bias")
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, E] -> [T, E]."""
        return layer_norm(x, self.weight, self.bias, self.eps)[0]

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0 if param == "weight" else 0.0, 0.02)


class ClassifierNorm(LayerNorm):
    """LayerNorm of pooled states. float32: whatever the model's dtype is."""

    def __init__(self, size: int, eps: float, bias: bool = True, *, float32: bool = True) -> None:
        self.computed_in = torch.float32 if float32 else None  # None: the model's
        super().__init__(size, eps, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, E] float32 -> the same."""
        return super().forward(x.to(self.weight.dtype)).float()

    def dtype(self, param: str) -> torch.dtype | None:
        return self.computed_in


class AddLayerNorm(LayerNorm):
    """LayerNorm of x + residual."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, residual [T, E] -> (normed, x + residual)."""
        return layer_norm(x, self.weight, self.bias, self.eps, residual)


class HeadLayerNorm(ParamModule):
    """LayerNorm of each head, with weights of its own and no bias.

    A checkpoint has them as one tensor [H, D], or as one per head. kv_heads: as in AllHeadsRMSNorm.
    """

    weight: Tensor

    def __init__(self, heads: int, head_dim: int, eps: float, kv_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.head_dim, self.eps, self.kv_heads = heads, head_dim, eps, kv_heads
        self.declare("weight")

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H, D], heads of this rank, strided views allowed -> the same shape."""
        return layer_norm(x, self.weight, None, self.eps)[0]

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        """A part per head; nothing of those that this rank has not."""
        mine = _rank_heads(self.heads, self.kv_heads, self.mesh)
        kept = [range(self.head_dim if head in mine else 0) for head in range(self.heads)]
        starts = accumulate((len(rows) for rows in kept), initial=0)
        return tuple(WeightShard((self.head_dim,), (rows,), at) for rows, at in zip(kept, starts))

    def fused_shape(self, param: str) -> tuple[int, ...]:
        return (self.heads, self.head_dim)

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.unbind()

    def set_param(self, param: str, value: object) -> None:
        """Take the weights as the loader joins them, and give them their axis of heads."""
        if isinstance(value, Tensor) and value.dim() == 1:
            value = value.view(-1, self.head_dim)
        super().set_param(param, value)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0, 0.02)
