"""Faster forms of parts of a skeleton, each proven by its results on random numbers.

    RMSNorm          quire's norm
    gated MLP        gate and up as one product, then quire's activation
    linear layers    those that read the same tensor: one product
    rotary function  quire's kernel, where an attention module calls `apply_rotary_pos_emb`

A part whose results differ from the proven form by more than rounding stays as it is.

Axes: T tokens, E hidden, F mlp width, H heads, D head size, R rotated size
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.act import ACTIVATION_KINDS, ActivationKind, act_mul
from quire.kernels.framework import lazy_fusion
from quire.kernels.rope import rope
from quire.layers import ColumnLinear, RMSNorm, RowLinear

ROTARY_FUNCTION = "apply_rotary_pos_emb"
TINY = 8
"""Widths of the copies that are compared."""


class AnyAxesRMSNorm(RMSNorm):
    """RMSNorm of [1, T, E], or of heads [1, T, H, D]."""

    flushed = True  # other code than quire's linear layers reads the result

    def forward(self, x: Tensor) -> Tensor:
        """x [1, T, ..., E] -> the same shape."""
        inner = x[0] if x.dim() > 2 and x.shape[0] == 1 else x
        y = super().forward(inner if inner.dim() <= 3 else inner.reshape(-1, self.size))
        if self.flushed:
            lazy_fusion.flush()
        return y.view(x.shape)


def proven_norm(module: nn.Module) -> AnyAxesRMSNorm | None:
    """Return quire's norm in place of a module with one vector; None: it computes another."""
    own = dict(module.named_parameters())
    if not type(module).__name__.endswith("RMSNorm") or list(own) != ["weight"]:
        return None
    size = own["weight"].numel()
    if own["weight"].dim() != 1 or size > 1 << 16:
        return None
    trial, generator = copy.copy(module), torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(size, generator=generator, device="cpu")
    trial._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    x = 0.01 * torch.randn(3, 2, size, generator=generator, device="cpu")  # eps shows
    wanted = _result_of(trial, x)
    numbers = {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1}
    for eps in sorted(numbers):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        for offset in (0.0, 1.0):
            if _alike(wanted, normed * (offset + weight)):
                return AnyAxesRMSNorm(size, eps, offset)
    return None


class MergedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up as one matrix."""

    def __init__(self, gate: Any, down: Any, kind: ActivationKind) -> None:
        super().__init__()
        width = gate.out_features
        self.gate_up_proj = ColumnLinear(gate.in_features, (width, width), gate.bias is not None)
        self.down_proj = RowLinear(width, down.out_features, down.bias is not None)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """x [..., E] -> the same shape."""
        flat = x.reshape(-1, x.shape[-1])
        y = self.down_proj(act_mul(self.gate_up_proj(flat), self.kind))
        lazy_fusion.flush()
        return y.view(x.shape)


def proven_mlp(module: nn.Module) -> tuple[MergedMLP, Mapping[str, tuple[str, int | None]]] | None:
    """Return a merged MLP in place of a module with three linear layers, and where these go.

    The second: name of a linear layer -> name of the merged one, and its part of it.
    """
    linears = {n: m for n, m in module.named_children() if type(m) is nn.Linear}
    others = [m for n, m in module.named_children() if n not in linears]
    if len(linears) != 3 or any(True for m in others for _ in m.parameters()):
        return None
    if module._parameters:
        return None
    shapes = {name: (m.in_features, m.out_features, m.bias is None) for name, m in linears.items()}
    for down in linears:
        first, second = (name for name in linears if name != down)
        if shapes[first] != shapes[second] or shapes[down][:2] != shapes[first][1::-1]:
            continue
        for gate, up in ((first, second), (second, first)):
            kind = _proven_gate(module, gate, up, down)
            if kind is not None:
                made = MergedMLP(linears[gate], linears[down], kind)
                places = {gate: ("gate_up_proj", 0), up: ("gate_up_proj", 1)}
                return made, {**places, down: ("down_proj", None)}
    return None


def _proven_gate(module: nn.Module, gate: str, up: str, down: str) -> ActivationKind | None:
    """Return the activation with which a tiny copy gives the results of a gated MLP."""
    with torch.device("cpu"):  # the model is being built on the meta device
        return _first_alike(module, gate, up, down)


def _first_alike(module: nn.Module, gate: str, up: str, down: str) -> ActivationKind | None:
    trial = copy.copy(module)
    trial._modules = dict(module._modules)
    generator = torch.Generator("cpu").manual_seed(0)
    made = {}
    for name, shape in ((gate, (12, TINY)), (up, (12, TINY)), (down, (TINY, 12))):
        weight = torch.randn(shape, generator=generator, device="cpu")
        made[name] = trial._modules[name] = _FixedLinear(weight)
    x = 2 * torch.randn(2, 5, TINY, generator=generator, device="cpu")
    wanted = _result_of(trial, x)
    for kind in ACTIVATION_KINDS:
        both = torch.cat((made[gate](x), made[up](x)), -1)
        if _alike(wanted, made[down](act_mul(both.view(10, -1), kind).view(2, 5, -1))):
            return kind
    return None


class _FixedLinear(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class MergedLinear(ColumnLinear):
    """Linear layers that read one tensor, as one matrix. Its members return their parts."""

    def __init__(self, inputs: int, outputs: Sequence[int], bias: bool) -> None:
        super().__init__(inputs, tuple(outputs), bias)
        self._sizes = list(outputs)
        self._last: list[Any] = [None, ()]  # the input, and the parts of its product

    def part(self, x: Tensor, which: int) -> Tensor:
        """x [..., I] -> part `which` of the product [..., O], computed once for all parts."""
        last = self._last
        if last[0] is not x:
            y = self.forward(x.reshape(-1, self.inputs))
            lazy_fusion.flush()
            last[1] = torch.split(y.view(*x.shape[:-1], y.shape[-1]), self._sizes, -1)
            last[0] = x
        found: Tensor = last[1][which]
        if which == len(self._sizes) - 1:
            last[:] = None, ()
        return found


class LinearPart(nn.Module):
    """One of the layers of a MergedLinear, where the skeleton calls it."""

    def __init__(self, merged: MergedLinear, which: int) -> None:
        super().__init__()
        self._merged, self._which = (merged,), which  # a tuple: the first member registers it

    @property
    def weight(self) -> Any:
        """The whole matrix: other code reads its dtype."""
        return self._merged[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O of this part]."""
        return self._merged[0].part(x, self._which)


class RotaryKernel:
    """quire's rotary kernel as a function of queries, keys, cosines and sines.

    The angles of a step are the same in all layers: their table is made once, for the first.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._angles: Tensor | None = None
        self._table, self._rows = torch.empty(0), torch.empty(0)

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any
    ) -> Any:
        """q [1, H, T, D], k [1, K, T, D], cos and sin [1, T, D] -> both rotated."""
        if more or named or cos.dim() != 3 or cos.shape[-1] != q.shape[-1]:
            return self._original(q, k, cos, sin, *more, **named)
        if self._angles is not cos:
            half = cos.shape[-1] // 2
            self._table = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).float()
            self._rows = torch.arange(cos.shape[1], dtype=torch.int32, device=cos.device)
            self._angles = cos
        turned = rope(q[0].transpose(0, 1), k[0].transpose(0, 1), self._rows, self._table)
        lazy_fusion.flush()
        first, second = (one.transpose(0, 1)[None] for one in turned)
        return first, second


def use_rotary_kernel(skeleton: nn.Module, paths: Sequence[str]) -> None:
    """Let attention modules call quire's rotary kernel, if their function is proven to be it."""
    kernels: dict[Any, RotaryKernel | None] = {}
    for path in dict.fromkeys(paths):
        module = skeleton.get_submodule(path)
        forward = type(module).forward
        if not isinstance(forward, types.FunctionType) or hasattr(forward, "__wrapped__"):
            continue
        original = forward.__globals__.get(ROTARY_FUNCTION)
        if original is None or ROTARY_FUNCTION not in forward.__code__.co_names:
            continue
        if original not in kernels:
            kernels[original] = RotaryKernel(original) if _is_half_split(original) else None
        kernel = kernels[original]
        if kernel is not None:
            names = {**forward.__globals__, ROTARY_FUNCTION: kernel}
            own = types.FunctionType(
                forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
            )
            own.__kwdefaults__ = forward.__kwdefaults__
            module.forward = _bound_weakly(own, module)


def _bound_weakly(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return a method that does not keep its module alive: the module has it as an attribute."""
    owner = weakref.ref(module)
    return lambda *given, **named: function(owner(), *given, **named)


def _is_half_split(function: Callable[..., Any]) -> bool:
    """Whether a rotary function turns pairs (i, i + D/2), of queries and keys alike."""
    generator = torch.Generator("cpu").manual_seed(0)
    q = torch.randn(1, 3, 4, TINY, generator=generator, device="cpu")
    k = torch.randn(1, 2, 4, TINY, generator=generator, device="cpu")
    angles = torch.randn(1, 4, TINY // 2, generator=generator, device="cpu")
    cos, sin = (torch.cat((one, one), -1) for one in (angles.cos(), angles.sin()))
    try:
        with torch.inference_mode():
            found = function(q, k, cos, sin)
    except Exception:  # noqa: BLE001 - a function of other arguments is not this one
        return False
    wanted = []
    for x in (q, k):
        low, high = x.chunk(2, -1)
        c, s = angles.cos()[:, None], angles.sin()[:, None]
        wanted.append(torch.cat((low * c - high * s, high * c + low * s), -1))
    return all(_alike(one, other) for one, other in zip(found, wanted))


def _result_of(module: nn.Module, x: Tensor) -> Any:
    """Return module(x); None if it takes other arguments."""
    try:
        with torch.inference_mode():
            return module(x)
    except Exception:  # noqa: BLE001 - then it is not what it is compared with
        return None


def _alike(one: Any, other: Tensor) -> bool:
    return (
        isinstance(one, Tensor)
        and one.shape == other.shape
        and torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    )
