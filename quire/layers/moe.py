"""Mixture of experts: a router that chooses, and the bank of experts it chooses from.

    experts(x, *router(x))                        [T, E] -> [T, E]

A bank is two stacked parameters, gate_up_proj [X, 2F, E] (gate rows first) and down_proj
[X, E, F]. Checkpoints hold them as one tensor per expert and projection (`Weights.experts` says
under which names), or as one tensor for all experts. Shared experts are an ordinary MLP of the
model file, added with `add`, or with `gated_add` if they have a gate.

Ranks cut F, so each has a slice of every expert; the sum over ranks is whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.distributed.collectives import Collectives
from quire.distributed.mesh import Mesh, shard_range
from quire.kernels.formats.fp8_weight import Fp8ExpertWeights
from quire.kernels.moe_experts import ExpertActivation, moe_experts
from quire.kernels.moe_router import RoutingMethod, moe_router
from quire.layers.param_module import ParamModule
from quire.quant.base import Method
from quire.quant.none import Method as Plain
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout


class Router(ParamModule):
    """Chooses experts. `correction` adds the parameter e_score_correction_bias (DeepSeek-V3)."""

    weight: Tensor
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
        self.bias = self.e_score_correction_bias = None
        self.declare("weight")
        if bias:
            self.declare("bias")
        if correction:
            self.declare("e_score_correction_bias")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, E] -> ids [T, k] int32, weights [T, k] float32."""
        return moe_router(x, self.weight, self.routing, self.bias, self.e_score_correction_bias)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout(
            (self.experts, self.hidden) if param == "weight" else (self.experts,)
        )

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, self.hidden**-0.5 if param == "weight" else 0.02)

    def dtype(self, param: str) -> torch.dtype | None:
        """Float32 for the correction: scores differ by less than bfloat16 resolves."""
        return torch.float32 if param == "e_score_correction_bias" else None


class Experts(ParamModule):
    """A bank of gated MLPs of one size.

    turned: a checkpoint that holds all experts in one tensor has them as [X, inputs, outputs],
    with gate and up rows taking turns. (GPT-OSS)
    """

    matrices: tuple[str, ...] = ("gate_up_proj", "down_proj")
    is_quantizable = True
    gate_up_proj: Tensor | Fp8ExpertWeights
    down_proj: Tensor | Fp8ExpertWeights
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
    ) -> None:
        super().__init__()
        self.hidden, self.mlp, self.experts = hidden, mlp, experts
        self.gate, self.transposed = gate, turned
        self.gate_up_proj_bias = self.down_proj_bias = None
        self._layouts: dict[str, tuple[WeightShard, ...]] = {}
        self._scales: dict[str, tuple[str, str]] = {}  # parameter -> matrix, name in the method
        self.method: Method = Plain()
        self.declare(*self.matrices)
        if bias:
            self.declare("gate_up_proj_bias", "down_proj_bias")

    def set_quant_method(self, method: Method) -> None:
        """Take another quantization method, and the parameters it needs. Before values come."""
        self.method = method
        self._scales = {
            f"{m}_{one}": (m, one) for m in self.matrices for one in method.extra_params
        }
        self.declare(*(name for name in self._scales if name not in self.param_names()))

    def dtype(self, param: str) -> torch.dtype | None:
        """As the method stores it; a bias in the model's."""
        if param in self.matrices:
            return self.method.dtype("weight")
        return self.method.dtype(self._scales[param][1]) if param in self._scales else None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, E], ids and weights [T, k] of the router -> [T, E]."""
        first = self.mesh.tp_rank == 0  # the sum over ranks must have the last bias once
        y = moe_experts(
            x,
            ids,
            weights,
            self.gate_up_proj,
            self.down_proj,
            self.gate,
            self.gate_up_proj_bias,
            self.down_proj_bias if first else None,
        )
        return self.comm.all_reduce(y)

    def shard(self, mesh: Mesh, comm: Collectives) -> None:
        self._layouts.clear()
        super().shard(mesh, comm)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        """A part per expert and projection; rows of all experts lie one after another."""
        if param not in self._layouts:  # the loader asks once per tensor: thousands of times
            self._layouts[param] = self._build_layout(param)
        return self._layouts[param]

    def _build_layout(self, param: str) -> tuple[WeightShard, ...]:
        if param in self._scales:
            matrix, name = self._scales[param]
            return self.method.layout(self.layout(matrix), name)
        mine = shard_range(self.mlp, self.mesh, what="expert widths")
        every = range(self.hidden)
        shape, cut, each = {
            "gate_up_proj": ((self.mlp, self.hidden), (mine, every), 2),
            "down_proj": ((self.hidden, self.mlp), (every, mine), 1),
            "gate_up_proj_bias": ((self.mlp,), (mine,), 2),
            "down_proj_bias": ((self.hidden,), (every,), 1),
        }[param]
        rows = len(cut[0])
        return tuple(WeightShard(shape, cut, i * rows) for i in range(each * self.experts))

    def fused_shape(self, param: str) -> tuple[int, ...]:
        """The shape of a checkpoint tensor that holds a parameter of all experts."""
        rows = self.hidden if param.startswith("down") else 2 * self.mlp
        if param.endswith("_bias"):
            return (self.experts, rows)
        inputs = self.mlp if param.startswith("down") else self.hidden
        return (self.experts, inputs, rows) if self.transposed else (self.experts, rows, inputs)

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        """Such a tensor as views, one per part of the layout."""
        if self.transposed and tensor.dim() == 3:
            tensor = tensor.transpose(1, 2)
        if param.startswith("down"):
            return tensor.unbind()
        if self.transposed:
            return [half for one in tensor for half in (one[0::2], one[1::2])]
        return [half for one in tensor for half in one.chunk(2)]

    def set_param(self, param: str, value: object) -> None:
        """Take a parameter as the loader stacks it, and give it its expert axis."""
        if isinstance(value, Tensor) and value.dim() == (1 if param.endswith("_bias") else 2):
            value = value.view(self.experts, -1, *value.shape[1:])
        super().set_param(param, value)

    def init_spec(self, param: str) -> InitSpec:
        if param.endswith("_bias"):
            return InitSpec(0.0, 0.02)
        inputs = self.mlp if param.startswith("down_proj") else self.hidden
        _, name = self._scales.get(param, (param, "weight"))
        return self.method.init_spec(inputs, name) or InitSpec(0.0, inputs**-0.5)
