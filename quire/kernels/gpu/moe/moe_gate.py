"""Expert gate: the activation between an expert's two products, inlined. fp32 in and out."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.elementwise.activations import activate


@triton.jit
def apply_gate(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """As quire.kernels.moe_experts.ExpertActivation defines it. relu2: `up` is not read."""
    if KIND == "clamped":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    elif KIND == "relu2":
        gate = tl.maximum(gate, 0.0)
        return gate * gate
    else:
        return activate(gate, KIND) * up
