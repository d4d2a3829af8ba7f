"""Activations, plain and gated: act(x), and act(gate) * up over the two halves of one tensor.

fp32 inside, rounded once to the dtype of x. Axes: T tokens in the step, F MLP width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, MAP, NativeOp, empty

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "quick_gelu"]
ACTIVATION_KINDS: tuple[ActivationKind, ...] = get_args(ActivationKind)


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, f, dtype in [
        (1, 64, torch.float32),
        (7, 100, torch.bfloat16),
        (33, 1536, torch.bfloat16),
        (3, 17, torch.float32),
        (2, 64, torch.float16),
    ]:
        for kind in ACTIVATION_KINDS:
            yield {"x": 3 * torch.randn(t, 2 * f, device=device).to(dtype), "kind": kind}


def _pair_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for case in _cases(device):
        x, kind = case["x"], case["kind"]
        gate, up = x.chunk(2, -1)
        yield {"gate": gate.contiguous(), "up": up, "kind": kind}


def activate(x: Tensor, kind: ActivationKind) -> Tensor:
    """Return the activation of x, in its dtype."""
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return F.relu(x)
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


run_elementwise = NativeOp(MAP, "qqqqqqqqqd")
_NATIVE_KINDS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "add",
    "softcap",
    "scale",
    "clip",
    "quick_gelu",
    "same",
)
NATIVE_CODES = {kind: code for code, kind in enumerate(_NATIVE_KINDS)}


def _act_mul_native(x: Tensor, kind: ActivationKind) -> Tensor:
    code = DTYPES.get(x.dtype)
    if code is None or x.dim() != 2 or x.stride(1) != 1:
        return NotImplemented
    rows, size, row = x.shape[0], x.shape[1] // 2, x.stride(0)
    y = empty((rows, size), x.dtype)
    at = x.data_ptr()
    other = at + size * x.element_size()
    run_elementwise(at, other, row, row, y.data_ptr(), rows, size, NATIVE_CODES[kind], code, 0.0)
    return y


def _gated_act_native(gate: Tensor, up: Tensor, kind: ActivationKind) -> Tensor:
    code = DTYPES.get(gate.dtype)
    if code is None or up.dtype != gate.dtype or gate.stride(1) != 1 or up.stride(1) != 1:
        return NotImplemented
    (rows, size), y = gate.shape, empty(gate.shape, gate.dtype)
    run_elementwise(
        gate.data_ptr(), up.data_ptr(), gate.stride(0), up.stride(0), y.data_ptr(), rows, size,
        NATIVE_CODES[kind], code, 0.0,
    )  # fmt: skip
    return y


def _act_native(x: Tensor, kind: ActivationKind) -> Tensor:
    return elementwise_native(x, NATIVE_CODES[kind], 0.0)


def elementwise_native(x: Tensor, kind: int, value: float) -> Tensor:
    """An element-wise kernel over one contiguous tensor."""
    code = DTYPES.get(x.dtype)
    if code is None or not x.is_contiguous():
        return NotImplemented
    y, n = empty(x.shape, x.dtype), x.numel()
    run_elementwise(x.data_ptr(), 0, n, 0, y.data_ptr(), 1, n, kind, code, value)
    return y


@op(cases=_cases, native=_act_mul_native, gpu="elementwise.act_mul")
def act_mul(x: Tensor, kind: ActivationKind) -> Tensor:
    """act(gate) * up. x: [T, 2F] = (gate | up). Returns [T, F] in x.dtype."""
    assert kind in ACTIVATION_KINDS, f"activation {kind!r}, known: {ACTIVATION_KINDS}"
    gate, up = x.float().chunk(2, -1)
    return (activate(gate, kind) * up).to(x.dtype)


@op(cases=_cases, native=_act_native, gpu="elementwise.act")
def act(x: Tensor, kind: ActivationKind) -> Tensor:
    """The activation of every element. Returns a new tensor of x's shape and dtype."""
    assert kind in ACTIVATION_KINDS, f"activation {kind!r}, known: {ACTIVATION_KINDS}"
    return activate(x.float(), kind).to(x.dtype)


@op(cases=_pair_cases, native=_gated_act_native, gpu="elementwise.gated_act")
def gated_act(gate: Tensor, up: Tensor, kind: ActivationKind) -> Tensor:
    """act(gate) * up, both [T, F], rows anywhere. Returns a new [T, F]."""
    assert kind in ACTIVATION_KINDS, f"activation {kind!r}, known: {ACTIVATION_KINDS}"
    return (activate(gate.float(), kind) * up.float()).to(gate.dtype)
