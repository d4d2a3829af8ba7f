"""Activations, alone and gated: act(x), and act(gate) * up over the two halves of one tensor.

fp32 inside, rounded once to the dtype of x. Axes: T tokens in the step, F MLP width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.op import op

Kind = Literal["silu", "gelu", "gelu_tanh", "relu"]
KINDS: tuple[Kind, ...] = ("silu", "gelu", "gelu_tanh", "relu")


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, f, dtype in [
        (1, 64, torch.float32),
        (7, 100, torch.bfloat16),
        (33, 1536, torch.bfloat16),
        (3, 17, torch.float32),
        (2, 64, torch.float16),
    ]:
        for kind in KINDS:
            yield {"x": 3 * torch.randn(t, 2 * f, device=device).to(dtype), "kind": kind}


def _apply(x: Tensor, kind: Kind) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


@op(cases=_cases)
def act_mul(x: Tensor, kind: Kind) -> Tensor:
    """act(gate) * up. x: [T, 2F] = (gate | up). Returns [T, F] in x.dtype."""
    assert kind in KINDS, f"activation {kind!r}, known: {KINDS}"
    gate, up = x.float().chunk(2, -1)
    return (_apply(gate, kind) * up).to(x.dtype)


@op(cases=_cases)
def act(x: Tensor, kind: Kind) -> Tensor:
    """The activation of every element. Returns a new tensor of x's shape and dtype."""
    assert kind in KINDS, f"activation {kind!r}, known: {KINDS}"
    return _apply(x.float(), kind).to(x.dtype)
