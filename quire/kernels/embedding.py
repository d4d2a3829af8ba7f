"""Look up token embeddings, in a plain or a packed weight.

Axes: T tokens in the step, V vocabulary, E hidden size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.packed_weight import PackedWeight, pack_panels, panel_shape
from quire.kernels.formats.weight import kernel_for
from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, EMBEDDING, NativeOp, empty


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, v, e, dtype in [
        (1, 64, 64, torch.float32),
        (7, 101, 96, torch.bfloat16),
        (33, 70, 129, torch.bfloat16),
        (3, 50, 17, torch.float32),
        (2, 64, 32, torch.float16),
    ]:
        ids = torch.randint(0, v, (t,), device=device, dtype=torch.int32)
        w = torch.randn(v, e, device=device).to(dtype)
        for weight in (w, pack_panels(w)) if dtype != torch.float16 else (w,):
            yield {"ids": ids, "weight": weight}
            yield {"ids": ids, "weight": weight, "scale": 7.3}


_run = NativeOp(EMBEDDING, "qqqqqqqqd")


def _native(ids: Tensor, weight: Tensor | PackedWeight, scale: float = 1.0) -> Tensor:
    code, packed = DTYPES.get(weight.dtype), isinstance(weight, PackedWeight)
    data = weight.data if isinstance(weight, PackedWeight) else weight
    if code is None or not data.is_contiguous():
        return NotImplemented
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        return NotImplemented
    (rows,), (outputs, inputs) = ids.shape, weight.shape
    y = empty((rows, inputs), weight.dtype)
    factor = 1.0 if scale == 1.0 else round_to_dtype(scale, weight.dtype)
    _run(
        ids.data_ptr(), data.data_ptr(), y.data_ptr(),
        rows, outputs, inputs, code, packed, factor,
    )  # fmt: skip
    return y


@kernel_for("rows", "plain", "packed")
@op(cases=_cases, native=_native, gpu="rowwise.embedding")
def embedding(ids: Tensor, weight: Tensor | PackedWeight, scale: float = 1.0) -> Tensor:
    """weight[ids] * scale. ids: [T] int32. weight: [V, E], plain or packed. Returns a new [T, E].

    `scale` is rounded to the weight's dtype first, as the models that have one do.
    """
    rows = _packed_rows(weight, ids) if isinstance(weight, PackedWeight) else weight[ids.long()]
    if scale == 1.0:
        return rows
    return (rows.float() * round_to_dtype(scale, weight.dtype)).to(weight.dtype)


def round_to_dtype(scale: float, dtype: torch.dtype) -> float:
    """The nearest value of the dtype, in plain arithmetic: a tape refuses torch's."""
    if dtype != torch.bfloat16:
        return scale
    bits = struct.unpack("<I", struct.pack("<f", scale))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _packed_rows(weight: PackedWeight, ids: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    panels = weight.data.view(*panel_shape(outputs, inputs, weight.dtype))
    at = ids.long()
    return panels[at // 32, :, at % 32].flatten(1)[:, :inputs].contiguous()
