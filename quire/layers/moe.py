"""Mixture of experts: a router, and the bank of experts from which it chooses.

    experts(x, *router(x))                        [T, E] -> [T, E]

A bank is two stacked parameters, gate_up_proj [X, 2F, E] (gate rows first) and down_proj
[X, E, F]; of MLPs without a gate the first is [X, F, E]. Checkpoints hold them as one tensor per
expert and projection (under the names of `Weights.experts`), or as one tensor for all experts.
Shared experts are an ordinary MLP of the model file, added with `add`, or with `gated_add` if they
have a gate.

Ranks cut F, so each has a slice of every expert; or each has some experts whole (expert
parallelism). The sum over ranks is whole either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.distributed.collectives import Collectives
from quire.distributed.expert_exchange import ExpertExchange, TensorParallelExchange
from quire.distributed.expert_placement import Placement
from quire.distributed.mesh import Mesh, width_range
from quire.kernels.formats.expert_tensors import stored_tensors
from quire.kernels.formats.weight import PlainExperts, PlainWeight, StoredExperts
from quire.kernels.framework import lazy_fusion
from quire.kernels.local_experts import local_experts
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
    """A bank of MLPs of one size, gated or, by the kind of `gate`, not.

    turned: a checkpoint that holds all experts in one tensor has them as [X, inputs, outputs].
    interleaved: gate and up rows take turns in it. (GPT-OSS: both; Qwen3-VL: turned)

    `local` are the experts of this rank, by their numbers in the layer, in the order of its bank;
    parameters have these only. `load` counts tokens by expert where experts move between ranks:
    then the output of each choice is exchanged, and summed in the order of choices, so that results
    do not depend on which rank has an expert.
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
        self.local: Sequence[int] = range(experts)
        self.placement: Placement = []  # of all ranks; empty: every rank has all experts
        self.exchange: ExpertExchange = TensorParallelExchange(self.comm)
        self.load: Tensor | None = None  # [experts] int64; None: experts do not move
        self._moves = False
        self._places: tuple[Tensor, Tensor] | None = None  # see local_experts; None: all are here
        self.gate_up_proj_bias = self.down_proj_bias = None
        self.set_quant_method(PLAIN)
        if bias:
            self.declare("gate_up_proj_bias", "down_proj_bias")

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, E], ids and weights [T, k] of the router -> [T, E]."""
        own = weights
        x, ids, weights = self.exchange.gather(x, ids, weights)
        if self._places is not None:
            ids = local_experts(ids, *self._places, self.load)
        if self.load is None:
            return self.exchange.combine(self._multiply(x, ids, weights))
        lazy_fusion.flush()  # torch reads it
        rows, k = ids.shape
        pairs = x.repeat_interleave(k, 0)
        y = self._multiply(pairs, ids.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        y = self.exchange.combine(y.view(rows, k * self.hidden))
        lazy_fusion.flush()
        terms = y.view(*own.shape, self.hidden).float() * own[:, :, None]
        return terms.sum(1).to(x.dtype)

    def combined_width(self, k: int) -> int:
        """Numbers of a row that ranks combine. k: experts of a token."""
        return self.hidden if self.load is None else k * self.hidden

    def _multiply(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What this rank adds to the result."""
        # where ranks have slices of one expert, the sum over them must have its last bias once
        first = self.mesh.ep > 1 or self.mesh.tp_rank == 0
        return self.gate_up_proj.mlp(
            x,
            ids,
            weights,
            self.down_proj,
            self.gate,
            self.gate_up_proj_bias,
            self.down_proj_bias if first else None,
            self._places is not None,
        )

    def shard(self, mesh: Mesh, comm: Collectives) -> None:
        self.exchange = TensorParallelExchange(comm)
        super().shard(mesh, comm)

    def spread(self, placement: Placement, rank: int, *, moves: bool) -> None:
        """Keep only the experts of one rank, whole. It comes before `shard`.

        moves: the placement will change.
        """
        self.placement, self.local, self._moves = placement, placement[rank], moves

    def place_constants(self, dtype: torch.dtype, device: torch.device) -> None:
        """Put the tables of a rank's experts on the device."""
        if not self.placement:
            return
        copies = sum(map(len, self.placement)) - self.experts + 1
        shape = (self.experts, min(copies, len(self.placement)))
        self._places = (
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(self.experts, dtype=torch.int32, device=device),
        )
        if self._moves:
            self.load = torch.zeros(self.experts, dtype=torch.int64, device=device)
        self.set_placement(self.placement)

    def set_placement(self, placement: Placement) -> None:
        """Take another placement, of as many experts on each rank, whose weights are in the banks.

        Tables are written in place: tapes and CUDA graphs have their addresses.
        """
        assert self._places is not None, "every rank has all experts"
        rank, (place, copies) = self.mesh.ep_rank, self._places
        self.placement, self.local = placement, placement[rank]
        found: list[list[int]] = [[] for _ in range(self.experts)]
        for one, own in enumerate(placement):
            for slot, expert in enumerate(own):
                found[expert].append(slot if one == rank else -1)
        padded = [(row + [-1] * place.shape[1])[: place.shape[1]] for row in found]
        place.copy_(torch.tensor(padded, dtype=torch.int32))
        copies.copy_(torch.tensor([len(row) for row in found], dtype=torch.int32))

    def expert_tensors(self, slot: int) -> list[Tensor]:
        """Return all tensors of one of this rank's experts: writing to them changes it."""
        biases = (self.gate_up_proj_bias, self.down_proj_bias)
        found = [
            *stored_tensors(self.gate_up_proj, slot),
            *stored_tensors(self.down_proj, slot),
        ]
        return [*found, *(one[slot] for one in biases if one is not None)]

    def _experts_of(self, param: str) -> Sequence[int]:
        """The experts whose numbers a parameter has: of activations, which share one scale, all."""
        if param in self._specs:
            _, _, spec = self._specs[param]
            if spec.of_activations and spec.parts is None:
                return range(self.experts)
        return self.local

    def _build_layout(self, param: str) -> tuple[WeightShard, ...]:
        if self._experts_of(param) is self.local:
            return super()._build_layout(param)
        matrix, _, spec = self._specs[param]
        return spec.layout(self._bank_layout(matrix, self.experts))

    def local_part(self, param: str, part: int) -> int | None:
        each = self._parts_each(param)
        expert, projection = divmod(part, each)
        if expert >= self.experts:
            return part  # one too many, which the loader refuses
        own = self._experts_of(param)
        return own.index(expert) * each + projection if expert in own else None

    def stored_as(self, param: str, part: int) -> tuple[str, int]:
        own, each = self._experts_of(param), self._parts_each(param)
        param, part = super().stored_as(param, part)
        return param, own[part // each] * each + part % each

    def _parts_each(self, param: str) -> int:
        """Parts of one expert: gate and up, or up; down."""
        return self.gate.rows if param.startswith("gate") else 1

    def weight_layout(self, matrix: str) -> tuple[WeightShard, ...]:
        """A part per local expert and projection; the rows of the experts follow one another."""
        return self._bank_layout(matrix, len(self.local))

    def _bank_layout(self, matrix: str, experts: int) -> tuple[WeightShard, ...]:
        """The layout of a matrix of so many experts."""
        mine = range(self.mlp)
        if self.mesh.ep == 1:
            (gate_rows, _), (_, down_columns) = map(self.blocks_of, self.matrices)
            mine = width_range(self.mlp, self.mesh, math.lcm(gate_rows, down_columns))
        every = range(self.hidden)
        if matrix == "gate_up_proj":
            return _parts((self.mlp, self.hidden), (mine, every), self.gate.rows * experts)
        return _parts((self.hidden, self.mlp), (every, mine), experts)

    def vector_layout(self, param: str) -> tuple[WeightShard, ...]:
        (size, *_), (cut, *_) = (
            (part := self.weight_layout(param.removesuffix("_bias"))[0]).shape,
            part.ranges,
        )
        return _parts((size,), (cut,), self._parts_each(param) * len(self.local))

    def weight_init(self, matrix: str) -> InitSpec:
        return InitSpec(0.0, (self.mlp if matrix == "down_proj" else self.hidden) ** -0.5)

    def fused_shape(self, param: str) -> tuple[int, ...]:
        """The shape of a checkpoint tensor that holds a parameter of all experts."""
        parts = self.layout(param)
        rows = parts[0].shape[0] * self._parts_each(param)
        rest = parts[0].shape[1:]
        turned = self.transposed and param in self.matrices and rest
        return (self.experts, *rest, rows) if turned else (self.experts, rows, *rest)

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        """Such a tensor of all experts as views, one per part of the layout."""
        own = [tensor[expert] for expert in self._experts_of(param)]
        if self.transposed and param in self.matrices:
            own = [one.t() for one in own]
        if self._parts_each(param) == 1:
            return own
        if self.interleaved:
            return [half for one in own for half in (one[0::2], one[1::2])]
        return [half for one in own for half in one.chunk(2)]

    def set_param(self, param: str, value: Any) -> None:
        """Take a parameter as the loader stacks it, and give it its expert axis."""
        stacked = isinstance(value, Tensor) and param in self.param_names()
        if stacked and value.dim() == len(self.layout(param)[0].shape):
            value = value.view(len(self._experts_of(param)), -1, *value.shape[1:])
        super().set_param(param, value)


def _parts(shape: tuple[int, ...], cut: tuple[range, ...], count: int) -> tuple[WeightShard, ...]:
    rows = len(cut[0])
    return tuple(WeightShard(shape, cut, i * rows) for i in range(count))
