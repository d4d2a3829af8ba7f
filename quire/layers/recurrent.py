"""Recurrent layers: what they keep of a sequence is a row of tensors that the step brings.

`place` is the number of the layer among the recurrent ones; models/build.py sets it. Ranks divide
the heads of a layer, or its channels where it has no heads, and each has the states of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from quire.distributed.collectives import Collectives
from quire.distributed.mesh import Mesh, shard_range, width_range
from quire.errors import WeightError
from quire.kernels.causal_conv import causal_conv
from quire.kernels.framework import lazy_fusion
from quire.kernels.gated_delta_rule import gated_delta_rule
from quire.kernels.gated_norm import gated_rms_norm, scaled_gated_values, sum_gated_squares
from quire.kernels.native.op_tape import on_replay
from quire.kernels.output_gate import product
from quire.kernels.scan_gate import scan_gate
from quire.kernels.selective_scan import selective_scan
from quire.kernels.ssd_scan import ssd_scan
from quire.kernels.state_rows import StateRows
from quire.layers.linear import ColumnLinear, Linear, OutputGroup, RowLinear
from quire.layers.norm import RMSNorm, UnitRMSNorm
from quire.layers.param_module import ParamModule
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

if TYPE_CHECKING:
    from quire.models.base import StateStep


class CausalConv(ParamModule):
    """Convolves each channel with its last inputs. Ranks have some channels of every group."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, groups: tuple[OutputGroup, ...], width: int, *, bias: bool, silu: bool = True
    ) -> None:
        super().__init__()
        self.groups, self.width, self.silu = groups, width, silu
        self.declare("weight")
        if bias:
            self.declare("bias")
        else:
            self.bias = None

    def forward(self, x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """x [T, C] -> [T, C]; state [N, C, W - 1]."""
        return causal_conv(x, state, rows, self.weight.view(-1, self.width), self.bias, self.silu)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        own = [group.rows_of_rank(self.mesh) for group in self.groups]
        starts = accumulate((len(rows) for rows in own), initial=0)
        inner = () if param == "bias" else (1, self.width)
        return tuple(
            WeightShard((group.rows, *inner), (rows, *map(range, inner)), start)
            for group, rows, start in zip(self.groups, own, starts)
        )

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, self.width**-0.5)


class GatedRMSNorm(ParamModule):
    """RMSNorm of groups of channels, with a gate. Ranks have as many channels each.

    shared: the weight is of one group, for all of them.
    """

    weight: Tensor

    def __init__(
        self, groups: int, group: int, eps: float, *, gate_first: bool, shared: bool = False
    ) -> None:
        super().__init__()
        self.groups, self.group, self.eps = groups, group, eps
        self.gate_first, self.shared = gate_first, shared
        self.declare("weight")

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x float32 and gate [T, C] -> [T, C], channels of this rank."""
        if x.shape[1] < self.group:
            return self._norm_over_ranks(x, gate)
        return gated_rms_norm(x, gate, self.weight, self.eps, self.group, self.gate_first)

    def _norm_over_ranks(self, x: Tensor, gate: Tensor) -> Tensor:
        """Several ranks have channels of one group: its squares are summed over them."""
        lazy_fusion.flush()  # x is read by torch
        shape = (len(x), self.groups)
        squares = on_replay(self._sum_squares, x, gate, shape=shape, dtype=torch.float32)
        squares = self.comm.all_reduce(squares)
        return on_replay(self._scale, x, gate, squares, dtype=self.weight.dtype)

    def _own_group(self) -> int:
        return self.mesh.tp_rank * self.groups // self.mesh.tp

    def _sum_squares(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return those of this rank, beside zeros for the other groups: [T, groups]."""
        squares = x.new_zeros((len(x), self.groups))
        squares[:, self._own_group()] = sum_gated_squares(x, gate, self.gate_first)
        return squares

    def _scale(self, x: Tensor, gate: Tensor, squares: Tensor) -> Tensor:
        lazy_fusion.flush()  # the sum is read by torch
        mean = squares[:, self._own_group(), None, None] / self.group
        factor = torch.rsqrt(mean + self.eps)
        return scaled_gated_values(x, gate, factor, self.weight, self.gate_first)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        if self.shared:
            return unsharded_layout((self.group,))
        size = self.groups * self.group
        return (WeightShard((size,), (width_range(size, self.mesh),)),)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0, 0.02)


class SplitLinear(ColumnLinear):
    """Several projections of an input, as views of one product. Each rank has some of every group.

    views: of how many groups each view is; (): of one each.
    order: for checkpoints with one tensor for all, the row there of each of ours; None: our order.
    factors: by which the outputs of each group are multiplied; (): they are not.
    """

    multipliers: Tensor | None = None  # [outputs]

    def __init__(
        self,
        inputs: int,
        groups: tuple[OutputGroup, ...],
        bias: bool = False,
        *,
        views: tuple[int, ...] = (),
        order: Sequence[int] | None = None,
        factors: Sequence[float] = (),
    ) -> None:
        self._order, self._factors = order, factors
        ends = list(accumulate(views or (1,) * len(groups), initial=0))
        self._views = [slice(a, b) for a, b in pairwise(ends)]
        Linear.__init__(self, inputs, groups, bias)
        self._set_sizes()

    def _set_sizes(self) -> None:
        counts = [len(rows) for rows in self.rank_rows()]
        self.sizes = [sum(counts[view]) for view in self._views]

    def shard(self, mesh: Mesh, comm: Collectives) -> None:
        super().shard(mesh, comm)
        self._set_sizes()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """x [T, E] -> [T, size] of each, strided."""
        y = self.weight.product(x, self.bias)
        if self.multipliers is not None:
            y = product(y, self.multipliers.expand(y.shape))
        return torch.split(y, self.sizes, dim=1)

    def place_constants(self, dtype: torch.dtype, device: torch.device) -> None:
        """Put the factors of outputs on the device."""
        if self._factors:
            pairs = zip(self.rank_rows(), self._factors, strict=True)
            each = [factor for rows, factor in pairs for _ in rows]
            self.multipliers = torch.tensor(each, dtype=dtype, device=device)

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        rows, ours = tensor.shape[0], self._order
        if ours is None or rows == len(self.outputs) or self.is_shared(param):
            return super().split_fused(param, tensor)
        step = len(ours) // rows  # rows of the weight for each of the tensor: of a scale
        firsts = ours[::step]
        if any(ours[i] != firsts[i // step] + i % step for i in range(len(ours))) or any(
            first % step for first in firsts
        ):
            raise WeightError(
                f"a tensor of several projections has {rows} rows of {param} for {len(ours)} "
                "outputs: they are in the order of heads, which blocks of a quantized weight must "
                "not span"
            )
        moved = tensor[torch.tensor([first // step for first in firsts])]
        return torch.split(moved, [part.shape[0] for part in self.layout(param)])


HEADS, KEY_HEADS = "heads of recurrent layers", "key heads of recurrent layers"


class RecurrentLayer(ParamModule):
    """Base of layers with a state."""

    place = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes:
    """The settings of a Mamba-2 mixer."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    eps: float
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    norm: Literal["gate_first", "gate_last", "none"] = "gate_first"
    """The gate of the scan's output is before its norm, behind it, or there is no norm."""
    multipliers: tuple[float, ...] = ()
    """Of the projections: gate, x, B, C and time steps; (): there are none. (Falcon-H1)"""

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    def of_rank(self, mesh: Mesh) -> Mamba2Sizes:
        """The settings with the heads of one rank, and the groups that these use."""
        return replace(self, heads=self.heads // mesh.tp, groups=max(1, self.groups // mesh.tp))


class Mamba2Mixer(RecurrentLayer):
    """Projections, a short convolution, the scan, and a gated norm.

    Ranks divide the heads. B and C of a group are on each rank with heads of it.
    """

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    def __init__(self, hidden: int, sizes: Mamba2Sizes) -> None:
        super().__init__()
        self.sizes = self.own = s = sizes
        x, dt = (OutputGroup(s.heads, width, HEADS) for width in (s.head_dim, 1))
        shared = OutputGroup(s.groups, s.state, "groups of recurrent heads", repeat=True)
        mixed = (x, shared, shared)
        self.in_proj = SplitLinear(
            hidden, (x, *mixed, dt), s.bias, views=(1, 3, 1), factors=s.multipliers
        )
        self.conv1d = CausalConv(mixed, s.kernel, bias=s.conv_bias)
        self.norm: GatedRMSNorm | None = None
        if s.norm != "none":
            first = s.norm == "gate_first"
            self.norm = GatedRMSNorm(s.groups, s.inner // s.groups, s.eps, gate_first=first)
        self.out_proj = RowLinear(s.inner, hidden, s.out_bias)
        self.declare("A_log", "D", "dt_bias")

    def shard(self, mesh: Mesh, comm: Collectives) -> None:
        super().shard(mesh, comm)
        self.own = self.sizes.of_rank(mesh)

    def forward(self, x: Tensor, states: StateStep) -> Tensor:
        """x [T, E] -> [T, E]."""
        s, rows, tokens = self.own, states.rows, x.shape[0]
        gate, mixed, dt = self.in_proj(x)
        mixed = self.conv1d(mixed, states.conv[self.place], rows)
        x, b, c = torch.split(mixed, [s.inner, s.groups * s.state, s.groups * s.state], dim=1)
        y = ssd_scan(
            x.view(tokens, s.heads, s.head_dim),
            dt,
            b.view(tokens, s.groups, s.state),
            c.view(tokens, s.groups, s.state),
            states.recurrent[self.place],
            rows,
            self.A_log,
            self.D,
            self.dt_bias,
            s.dt_limit,
        )
        y = y.view(tokens, s.inner)
        return self.out_proj(scan_gate(y, gate) if self.norm is None else self.norm(y, gate))

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return _layout_of_heads(self.sizes.heads, self.mesh)

    def dtype(self, param: str) -> torch.dtype:
        return torch.float32

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec({"A_log": 0.5, "D": 1.0, "dt_bias": -2.0}[param], 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSizes:
    """The settings of a gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def of_rank(self, mesh: Mesh) -> DeltaNetSizes:
        """The settings with the heads of one rank."""
        heads = self.key_heads // mesh.tp, self.value_heads // mesh.tp
        return replace(self, key_heads=heads[0], value_heads=heads[1])


class GatedDeltaNet(RecurrentLayer):
    """Projections, a short convolution, the gated delta rule, and a norm with a gate.

    by_head: the checkpoint's projections have what belongs to a key head together. (Qwen3-Next)
    """

    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, hidden: int, sizes: DeltaNetSizes, *, by_head: bool = False) -> None:
        super().__init__()
        self.by_head = by_head
        self.sizes = self.own = s = sizes
        each = s.value_heads // s.key_heads
        keys = OutputGroup(s.key_heads, s.key_dim, KEY_HEADS)
        values = OutputGroup(s.value_heads, s.value_dim, HEADS)
        mixed, single = (keys, keys, values), OutputGroup(s.value_heads, 1, HEADS)
        order = None
        if by_head:
            widths = (s.key_dim, s.key_dim, each * s.value_dim, each * s.value_dim)
            self.in_proj_qkvz = SplitLinear(
                hidden,
                (*mixed, values),
                views=(3, 1),
                order=order_by_head(s.key_heads, widths),
            )
            order = order_by_head(s.key_heads, (each, each))
        else:
            self.in_proj_qkv = SplitLinear(hidden, mixed, views=(3,))
            self.in_proj_z = SplitLinear(hidden, (values,))
        self.in_proj_ba = SplitLinear(hidden, (single, single), order=order)
        self.conv1d = CausalConv(mixed, s.kernel, bias=False)
        self.norm = GatedRMSNorm(s.value_heads, s.value_dim, s.eps, gate_first=False, shared=True)
        self.out_proj = RowLinear(s.values, hidden)
        self.declare("A_log", "dt_bias")

    def shard(self, mesh: Mesh, comm: Collectives) -> None:
        super().shard(mesh, comm)
        self.own = self.sizes.of_rank(mesh)

    def forward(self, x: Tensor, states: StateStep) -> Tensor:
        """x [T, E] -> [T, E]."""
        s, rows, tokens = self.own, states.rows, x.shape[0]
        if self.by_head:
            mixed, gate = self.in_proj_qkvz(x)
        else:
            (mixed,), (gate,) = self.in_proj_qkv(x), self.in_proj_z(x)
        b, a = self.in_proj_ba(x)
        mixed = self.conv1d(mixed, states.conv[self.place], rows)
        q, k, v = torch.split(mixed, [s.keys, s.keys, s.values], dim=1)
        y = gated_delta_rule(
            q.view(tokens, s.key_heads, s.key_dim),
            k.view(tokens, s.key_heads, s.key_dim),
            v.view(tokens, s.value_heads, s.value_dim),
            a,
            b,
            states.recurrent[self.place],
            rows,
            self.A_log,
            self.dt_bias,
        )
        return self.out_proj(self.norm(y.view(tokens, s.values), gate))

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return _layout_of_heads(self.sizes.value_heads, self.mesh)

    def dtype(self, param: str) -> torch.dtype:
        return torch.float32

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec({"A_log": 0.5, "dt_bias": -2.0}[param], 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    """The settings of a Mamba-1 mixer."""

    inner: int
    state: int
    kernel: int
    rank: int  # of the projection to time steps
    bias: bool = False
    conv_bias: bool = True
    eps: float | None = None  # of norms of time steps, B and C; None: there are none
    norm_weights: bool = False  # whether these have weights


class MambaMixer(RecurrentLayer):
    """Projections, a short convolution, and the selective scan with its gate.

    Ranks divide the channels; time steps, B and C are sums over them.
    """

    A_log: Tensor
    D: Tensor

    def __init__(self, hidden: int, sizes: MambaSizes) -> None:
        super().__init__()
        self.sizes = s = sizes
        channels = OutputGroup(s.inner)
        self.in_proj = SplitLinear(hidden, (channels, channels), s.bias)
        self.conv1d = CausalConv((channels,), s.kernel, bias=s.conv_bias)
        self.x_proj = RowLinear(s.inner, s.rank + 2 * s.state)
        self.dt_proj = ColumnLinear(s.rank, s.inner, bias=True)
        self.out_proj = RowLinear(s.inner, hidden, s.bias)
        self.dt_layernorm = self._norm(s.rank)
        self.b_layernorm, self.c_layernorm = self._norm(s.state), self._norm(s.state)
        self.declare("A_log", "D")

    def _norm(self, size: int) -> nn.Module | None:
        if self.sizes.eps is None:
            return None
        made = RMSNorm if self.sizes.norm_weights else UnitRMSNorm
        return made(size, self.sizes.eps)

    def forward(self, x: Tensor, states: StateStep) -> Tensor:
        """x [T, E] -> [T, E]."""
        x, gate = self.in_proj(x)
        x = self.conv1d(x, states.conv[self.place], states.rows)
        s = self.sizes
        dt, b, c = torch.split(self.x_proj(x), [s.rank, s.state, s.state], dim=1)
        if self.dt_layernorm is not None:
            assert self.b_layernorm is not None
            assert self.c_layernorm is not None
            dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        state = states.recurrent[self.place]
        dt = self.dt_proj(dt)
        y = selective_scan(x, dt, b, c, gate, state, states.rows, self.A_log, self.D)
        return self.out_proj(y)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        inner, state = self.sizes.inner, self.sizes.state
        own = width_range(inner, self.mesh)
        if param == "A_log":
            return (WeightShard((inner, state), (own, range(state))),)
        return (WeightShard((inner,), (own,)),)

    def dtype(self, param: str) -> torch.dtype:
        return torch.float32

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec({"A_log": 0.5, "D": 1.0}[param], 0.5)


class ShortConv(RecurrentLayer):
    """A convolution of gated inputs, and a gate of its output. (LFM2)"""

    def __init__(self, hidden: int, width: int, *, bias: bool) -> None:
        super().__init__()
        channels = OutputGroup(hidden)
        self.in_proj = SplitLinear(hidden, (channels,) * 3, bias)
        self.conv = CausalConv((channels,), width, bias=bias, silu=False)
        self.out_proj = RowLinear(hidden, hidden, bias)

    def forward(self, x: Tensor, states: StateStep) -> Tensor:
        """x [T, E] -> [T, E]."""
        before, after, x = self.in_proj(x)
        y = self.conv(product(before, x), states.conv[self.place], states.rows)
        return self.out_proj(product(after, y))


def _layout_of_heads(heads: int, mesh: Mesh) -> tuple[WeightShard, ...]:
    """Layout of a vector with a number for each head."""
    return (WeightShard((heads,), (shard_range(heads, mesh, what=HEADS),)),)


def order_by_head(heads: int, sizes: Sequence[int]) -> list[int]:
    """Return the rows of a matrix that has `sizes` rows of several projections for each head, those
    of each projection together."""
    whole = sum(sizes)
    starts = accumulate(sizes, initial=0)
    return [
        head * whole + start + i
        for start, size in zip(starts, sizes)
        for head in range(heads)
        for i in range(size)
    ]
