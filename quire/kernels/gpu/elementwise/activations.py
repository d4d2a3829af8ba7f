"""Activation arithmetic, inlined into kernels. fp32 in and out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """exp of a large argument is inf, and 2 / inf is 0: no case needed."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """silu, gelu, gelu_tanh, quick_gelu or relu, as quire.kernels.act defines them."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "quick_gelu":
        return x / (1.0 + tl.exp(-1.702 * x))
    else:
        return tl.maximum(x, 0.0)
