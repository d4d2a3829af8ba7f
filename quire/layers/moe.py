"""Mixture of experts: a router, and the bank of experts from which it chooses.

    experts(x, *router(x))                        [T, E] -> [T, E]

A bank is two stacked parameters, gate_up_proj [X, 2F, E] (gate rows first) and down_proj
[X, E, F]. Checkpoints hold them as one tensor per expert and projection (under the names
of `Weights.experts`), or as one tensor for all experts. Shared experts are an ordinary MLP of the
model file, added with `add`, or with `gated_add` if they have a gate.

Ranks cut F, so each has a slice of every expert; the sum over ranks is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.distributed.mesh import shard_range
from quire.kernels.formats.weight import PlainExperts, PlainWeight, StoredExperts
from quire.kernels.moe_experts import ExpertActivation
from quire.kernels.moe_router import RoutingMethod, moe_router
from quire.layers.weight_module import PLAIN, WeightModule
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout


class Router(WeightModule):
    """Chooses experts. `correction` adds the parameter e_score_correction_bias (DeepSeek-V3).

    A checkpoint may have the weight quantized: once it is loaded it is plain, as scores are exact.
    """

    role = "router"
    weight: PlainWeight
    bias: Tensor | None
    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        experts: int,
        routing: RoutingMethod,
        *,
        bias: bool = False,
        correction: bool = False,
    ) -> None:
        super().__init__()
        self.hidden, self.experts, self.routing = hidden, experts, routing
        self.multiplied = False  # by no kernel of a format
        self.bias = self.e_score_correction_bias = None
        self.set_quant_method(PLAIN)
        if bias:
            self.declare("bias")
        if correction:
            self.declare("e_score_correction_bias")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, E] -> ids [T, k] int32, weights [T, k] float32."""
        return moe_router(x, self.weight, self.routing, self.bias, self.e_score_correction_bias)

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((self.experts, self.hidden))

    def vector_layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((self.experts,))

    def weight_init(self, matrix: str) -> InitSpec:
        return InitSpec(0.0, self.hidden**-0.5)

    def dtype(self, param: str) -> torch.dtype | None:
        """Float32 for the correction: scores differ by less than bfloat16 resolves."""
        return torch.float32 if param == "e_score_correction_bias" else super().dtype(param)

    def after_load(self, dtype: torch.dtype) -> None:
        if self.weight.kind != PlainWeight.kind:
            self.set_param("weight", self.weight.dequantize(dtype))
        super().after_load(dtype)


class Experts(WeightModule):
    """A bank of gated MLPs of one size.

    turned: a checkpoint that holds all experts in one tensor has them as [X, inputs, outputs].
    interleaved: gate and up rows take turns in it. (GPT-OSS: both; Qwen3-VL: turned)
    """

    role = "experts"
    matrices: tuple[str, ...] = ("gate_up_proj", "down_proj")
    plain_class = PlainExperts
    gate_up_proj: StoredExperts
    down_proj: StoredExperts
    gate_up_proj_bias: Tensor | None
    down_proj_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        mlp: int,
        experts: int,
        gate: ExpertActivation,
        *,
        bias: bool = False,
        turned: bool = False,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.hidden, self.mlp, self.experts = hidden, mlp, experts
        self.gate, self.transposed, self.interleaved = gate, turned, interleaved
        self.gate_up_proj_bias = self.down_proj_bias = None
        self.set_quant_method(PLAIN)
        if bias:
            self.declare("gate_up_proj_bias", "down_proj_bias")

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, E], ids and weights [T, k] of the router -> [T, E]."""
        first = self.mesh.tp_rank == 0  # the sum over ranks must have the last bias once
        y = self.gate_up_proj.mlp(
            x,
            ids,
            weights,
            self.down_proj,
            self.gate,
            self.gate_up_proj_bias,
            self.down_proj_bias if first else None,
        )
        return self.comm.all_reduce(y)

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        """A part per expert and projection; the rows of all experts follow one another."""
        mine = shard_range(self.mlp, self.mesh, what="expert widths")
        every = range(self.hidden)
        if matrix == "gate_up_proj":
            return self._parts((self.mlp, self.hidden), (mine, every), 2)
        return self._parts((self.hidden, self.mlp), (every, mine), 1)

    def vector_layout(self, param: str) -> tuple[WeightShard, ...]:
        (size, *_), (cut, *_) = (
            (part := self.weight_layout(param.removesuffix("_bias"))[0]).shape,
            part.ranges,
        )
        return self._parts((size,), (cut,), 2 if param.startswith("gate") else 1)

    def _parts(
        self, shape: tuple[int, ...], cut: tuple[range, ...], each: int
    ) -> tuple[WeightShard, ...]:
        rows = len(cut[0])
        return tuple(WeightShard(shape, cut, i * rows) for i in range(each * self.experts))

    def weight_init(self, matrix: str) -> InitSpec:
        return InitSpec(0.0, (self.mlp if matrix == "down_proj" else self.hidden) ** -0.5)

    def fused_shape(self, param: str) -> tuple[int, ...]:
        """The shape of a checkpoint tensor that holds a parameter of all experts."""
        parts = self.layout(param)
        rows = parts[0].shape[0] * len(parts) // self.experts
        rest = parts[0].shape[1:]
        turned = self.transposed and param in self.matrices and rest
        return (self.experts, *rest, rows) if turned else (self.experts, rows, *rest)

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        """Such a tensor as views, one per part of the layout."""
        if self.transposed and param in self.matrices:
            tensor = tensor.transpose(1, 2)
        if param.startswith("down"):
            return tensor.unbind()
        if self.interleaved:
            return [half for one in tensor for half in (one[0::2], one[1::2])]
        return [half for one in tensor for half in one.chunk(2)]

    def set_param(self, param: str, value: Any) -> None:
        """Take a parameter as the loader stacks it, and give it its expert axis."""
        stacked = isinstance(value, Tensor) and param in self.param_names()
        if stacked and value.dim() == len(self.layout(param)[0].shape):
            value = value.view(self.experts, -1, *value.shape[1:])
        super().set_param(param, value)
