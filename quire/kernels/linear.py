"""The matrix product of every layer: x @ weight.T + bias, over a weight in any stored form.

On CPU, `pack` lays a weight out once at load time for the native product. There every output
element is one fp32 accumulation over the inputs in order, so a row's result does not depend on
how many other rows the step has. The plain path (F.linear) does not guarantee that.

Axes: T tokens in the step, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats.fp8_weight import Fp8Weight
from quire.kernels.formats.int8_weight import Int8Weight
from quire.kernels.formats.packed_weight import PackedWeight, pack_panels, panel_shape
from quire.kernels.formats.tiled_weight import TiledWeight
from quire.kernels.formats.weight import kernel_for
from quire.kernels.fp8_linear import fp8_linear
from quire.kernels.framework.op import op
from quire.kernels.grouped_linear import grouped_linear
from quire.kernels.int8_linear import int8_linear
from quire.kernels.native.library import (
    DTYPES,
    LINEAR,
    PACK,
    NativeOp,
    available,
    empty_huge_pages,
    empty_product,
)


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, i, o, dtype in [
        (1, 64, 64, torch.float32),
        (7, 96, 33, torch.bfloat16),
        (13, 101, 70, torch.float32),
        (5, 101, 40, torch.bfloat16),
        (33, 1000, 96, torch.bfloat16),
        (70, 256, 512, torch.bfloat16),
        (2, 64, 32, torch.float16),
    ]:
        x = torch.randn(t, i, device=device).to(dtype)
        w = (torch.randn(o, i, device=device) / i**0.5).to(dtype)
        b = torch.randn(o, device=device).to(dtype)
        for weight in (w, pack_panels(w)) if dtype != torch.float16 else (w,):
            yield {"x": x, "weight": weight}
            yield {"x": x, "weight": weight, "bias": b}


_run = NativeOp(LINEAR, "qqqqqqqqq")
_run_pack = NativeOp(PACK, "qqqqqq")


def _native(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, PackedWeight) or x.dtype != weight.dtype:
        return NotImplemented
    y = empty_product(x, weight.shape, bias)
    if y is None:
        return NotImplemented
    _run(
        x.data_ptr(), x.stride(0) * x.element_size(), weight.data.data_ptr(),
        0 if bias is None else bias.data_ptr(), y.data_ptr(),
        *x.shape, y.shape[1], DTYPES[x.dtype],
    )  # fmt: skip
    return y


@kernel_for("product", "plain", "packed", "fp8", "int8", "tiled")
@op(cases=_cases, native=_native, gpu="linear.linear")
def linear(
    x: Tensor,
    weight: Tensor | PackedWeight | Fp8Weight | Int8Weight | TiledWeight,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply every row of x by a weight matrix.

    x: [T, I], rows may be strided. weight: [O, I], plain or from `pack`, x's dtype. bias: [O].
    Returns a new [T, O] in x.dtype.
    """
    if isinstance(weight, Fp8Weight):
        return fp8_linear(x, weight, bias)
    if isinstance(weight, Int8Weight):
        return int8_linear(x, weight, bias)
    if isinstance(weight, TiledWeight):
        return grouped_linear(x, weight, bias)
    plain = weight.dequantize() if isinstance(weight, PackedWeight) else weight
    return F.linear(x, plain, bias)


def pack(weight: Tensor) -> Tensor | PackedWeight:
    """The form of a weight [O, I] that `linear` and `embedding` read fastest on its device.

    Packed for the native CPU product, else the tensor itself. The caller drops the original.
    """
    code = DTYPES.get(weight.dtype)
    if code is None or not weight.is_cpu or not available():
        return weight
    plain = weight.detach().contiguous()
    outputs, inputs = plain.shape
    data = empty_huge_pages(math.prod(panel_shape(outputs, inputs, plain.dtype)), plain.dtype)
    _run_pack(
        plain.data_ptr(), inputs * plain.element_size(), data.data_ptr(), inputs, outputs, code
    )
    return PackedWeight(data, (outputs, inputs))
