"""Recurrent layers: what they keep of a sequence is a row of tensors that the step brings.

`place` is the number of the layer among the recurrent ones; models/build.py sets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from quire.kernels.causal_conv import causal_conv
from quire.kernels.gated_delta_rule import gated_delta_rule
from quire.kernels.gated_norm import gated_rms_norm
from quire.kernels.output_gate import product
from quire.kernels.scan_gate import scan_gate
from quire.kernels.selective_scan import selective_scan
from quire.kernels.ssd_scan import ssd_scan
from quire.kernels.state_rows import StateRows
from quire.layers.linear import Linear, OutputGroup
from quire.layers.norm import RMSNorm, UnitRMSNorm
from quire.layers.param_module import ParamModule, VectorModule
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

if TYPE_CHECKING:
    from quire.models.base import StateStep


class CausalConv(ParamModule):
    """Convolves each channel with its last inputs."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, channels: int, width: int, *, bias: bool, silu: bool = True) -> None:
        super().__init__()
        self.channels, self.width, self.silu = channels, width, silu
        self.declare("weight")
        if bias:
            self.declare("bias")
        else:
            self.bias = None

    def forward(self, x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """x [T, C] -> [T, C]; state [N, C, W - 1]."""
        weight = self.weight.view(self.channels, self.width)
        return causal_conv(x, state, rows, weight, self.bias, self.silu)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        if param == "bias":
            return unsharded_layout((self.channels,))
        return unsharded_layout((self.channels, 1, self.width))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, self.width**-0.5)


class GatedRMSNorm(VectorModule):
    """RMSNorm of groups of channels, with a gate. size: of the weight; group: channels of one."""

    weight: Tensor

    def __init__(self, size: int, group: int, eps: float, *, gate_first: bool) -> None:
        super().__init__(size)
        self.group, self.eps, self.gate_first = group, eps, gate_first
        self.declare("weight")

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x float32 and gate [T, C] -> [T, C]."""
        return gated_rms_norm(x, gate, self.weight, self.eps, self.group, self.gate_first)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0, 0.02)


class SplitLinear(Linear):
    """Several projections of an input, as views of one product. Whole on every rank.

    order: for checkpoints with one tensor for all, the row there of each of ours; None: our order.
    factors: (outputs, factor) of runs of outputs, which are multiplied; (): none are.
    """

    multipliers: Tensor | None = None  # [outputs]

    def __init__(
        self,
        inputs: int,
        sizes: tuple[int, ...],
        bias: bool = False,
        *,
        order: Sequence[int] | None = None,
        factors: Sequence[tuple[int, float]] = (),
    ) -> None:
        self.sizes = sizes
        self._order, self._factors = order, factors
        super().__init__(inputs, tuple(OutputGroup(size) for size in sizes), bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """x [T, E] -> [T, size] of each, strided."""
        y = self.weight.product(x, self.bias)
        if self.multipliers is not None:
            y = product(y, self.multipliers.expand(y.shape))
        return torch.split(y, list(self.sizes), dim=1)

    def place_constants(self, dtype: torch.dtype, device: torch.device) -> None:
        """Put the factors of outputs on the device."""
        if self._factors:
            each = [factor for count, factor in self._factors for _ in range(count)]
            self.multipliers = torch.tensor(each, dtype=dtype, device=device)

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        if self._order is None or tensor.shape[0] != len(self._order):
            return super().split_fused(param, tensor)
        ends = [0, *accumulate(self.sizes)]
        return [tensor[torch.tensor(self._order[a:b])] for a, b in pairwise(ends)]


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
    norm_groups: int | None = None  # of the norm; None: as many as groups
    norm: Literal["gate_first", "gate_last", "none"] = "gate_first"
    """The gate of the scan's output is before its norm, behind it, or there is no norm."""
    multipliers: tuple[float, ...] = ()
    """Of the projections: gate, x, B, C and time steps; (): there are none. (Falcon-H1)"""

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


class Mamba2Mixer(RecurrentLayer):
    """Projections, a short convolution, the scan, and a gated norm."""

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    def __init__(self, hidden: int, sizes: Mamba2Sizes) -> None:
        super().__init__()
        self.sizes = s = sizes
        runs = (s.inner, s.inner, s.groups * s.state, s.groups * s.state, s.heads)
        factors = list(zip(runs, s.multipliers))
        self.in_proj = SplitLinear(hidden, (s.inner, s.channels, s.heads), s.bias, factors=factors)
        self.conv1d = CausalConv(s.channels, s.kernel, bias=s.conv_bias)
        groups = s.groups if s.norm_groups is None else s.norm_groups
        self.norm: GatedRMSNorm | None = None
        if s.norm != "none":
            first = s.norm == "gate_first"
            self.norm = GatedRMSNorm(s.inner, s.inner // groups, s.eps, gate_first=first)
        self.out_proj = Linear(s.inner, hidden, s.out_bias)
        self.declare("A_log", "D", "dt_bias")

    def forward(self, x: Tensor, states: StateStep) -> Tensor:
        """x [T, E] -> [T, E]."""
        s, rows, tokens = self.sizes, states.rows, x.shape[0]
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
        return unsharded_layout((self.sizes.heads,))

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

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


class GatedDeltaNet(RecurrentLayer):
    """Projections, a short convolution, the gated delta rule, and a norm with a gate.

    by_head: the checkpoint's projections have what belongs to a key head together. (Qwen3-Next)
    """

    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, hidden: int, sizes: DeltaNetSizes, *, by_head: bool = False) -> None:
        super().__init__()
        self.sizes = s = sizes
        each = s.value_heads // s.key_heads
        inner = (s.key_dim, s.key_dim, each * s.value_dim, each * s.value_dim)
        order = order_by_head(s.key_heads, inner) if by_head else None
        self.in_proj_qkvz = SplitLinear(hidden, (s.channels, s.values), order=order)
        order = order_by_head(s.key_heads, (each, each)) if by_head else None
        self.in_proj_ba = SplitLinear(hidden, (s.value_heads, s.value_heads), order=order)
        self.conv1d = CausalConv(s.channels, s.kernel, bias=False)
        self.norm = GatedRMSNorm(s.value_dim, s.value_dim, s.eps, gate_first=False)
        self.out_proj = Linear(s.values, hidden)
        self.declare("A_log", "dt_bias")

    def forward(self, x: Tensor, states: StateStep) -> Tensor:
        """x [T, E] -> [T, E]."""
        s, rows, tokens = self.sizes, states.rows, x.shape[0]
        mixed, gate = self.in_proj_qkvz(x)
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
        return unsharded_layout((self.sizes.value_heads,))

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
    """Projections, a short convolution, and the selective scan with its gate."""

    A_log: Tensor
    D: Tensor

    def __init__(self, hidden: int, sizes: MambaSizes) -> None:
        super().__init__()
        self.sizes = s = sizes
        self.in_proj = SplitLinear(hidden, (s.inner, s.inner), s.bias)
        self.conv1d = CausalConv(s.inner, s.kernel, bias=s.conv_bias)
        self.x_proj = SplitLinear(s.inner, (s.rank, s.state, s.state))
        self.dt_proj = Linear(s.rank, s.inner, bias=True)
        self.out_proj = Linear(s.inner, hidden, s.bias)
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
        dt, b, c = self.x_proj(x)
        if self.dt_layernorm is not None:
            assert self.b_layernorm is not None
            assert self.c_layernorm is not None
            dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        state = states.recurrent[self.place]
        dt = self.dt_proj(dt)
        y = selective_scan(x, dt, b, c, gate, state, states.rows, self.A_log, self.D)
        return self.out_proj(y)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        s = self.sizes
        return unsharded_layout((s.inner, s.state) if param == "A_log" else (s.inner,))

    def dtype(self, param: str) -> torch.dtype:
        return torch.float32

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec({"A_log": 0.5, "D": 1.0}[param], 0.5)


class ShortConv(RecurrentLayer):
    """A convolution of gated inputs, and a gate of its output. (LFM2)"""

    def __init__(self, hidden: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.in_proj = SplitLinear(hidden, (hidden, hidden, hidden), bias)
        self.conv = CausalConv(hidden, width, bias=bias, silu=False)
        self.out_proj = Linear(hidden, hidden, bias)

    def forward(self, x: Tensor, states: StateStep) -> Tensor:
        """x [T, E] -> [T, E]."""
        before, after, x = self.in_proj(x)
        y = self.conv(product(before, x), states.conv[self.place], states.rows)
        return self.out_proj(product(after, y))


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
