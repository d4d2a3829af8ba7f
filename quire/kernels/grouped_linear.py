"""x @ weight.T + bias over a weight in two to eight bits, and its rows and experts.

    y[t, o] = sum_i x[t, i] * w[o, i] + bias[o]        w as WeightCodes define it

The reference widens the weight to float32 and multiplies there, with one rounding to the dtype of
x at the end; kernels may round values of w to the dtype of x first where that is exact, and add in
float32. Which layout a weight has on its device is decided by `pack`.

Axes: T tokens in the step, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels.embedding import round_to_dtype
from quire.kernels.formats.grouped_weight import GroupedWeight, pack_planes
from quire.kernels.formats.panel_codes import (
    PanelCodes,
    fits_panels,
    pack_panel_codes,
    pack_panel_experts,
)
from quire.kernels.formats.separate_experts import SeparateExperts
from quire.kernels.formats.tiled_weight import (
    TiledWeight,
    kernel_group,
    pack_tiled_experts,
    pack_tiles,
)
from quire.kernels.formats.weight import StoredExperts, StoredWeight, kernel_for
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes, e4m3_table
from quire.kernels.framework.op import op
from quire.kernels.native.library import (
    CODES_EMBEDDING,
    CODES_LINEAR,
    DTYPES,
    NativeOp,
    available,
    empty,
    empty_product,
)


def pack(codes: WeightCodes, dtype: torch.dtype) -> StoredWeight:
    """Return the weight [O, I] as the kernels of its device multiply it by rows of a dtype."""
    if codes.q.device.type != "cpu" and kernel_group(codes) is not None:
        return pack_tiles(codes, dtype)
    return pack_panel_codes(codes, dtype) if _is_native(codes, dtype) else pack_planes(codes, dtype)


def pack_experts(codes: WeightCodes, dtype: torch.dtype) -> StoredExperts:
    """The same of weights [X, O, I]."""
    if codes.q.device.type != "cpu" and kernel_group(codes) is not None:
        return pack_tiled_experts(codes, dtype)
    ones = [one_expert(codes, i) for i in range(codes.q.shape[0])]
    if _is_native(codes, dtype):
        return pack_panel_experts(ones, dtype)
    return SeparateExperts(tuple(pack_planes(one, dtype) for one in ones))


def _is_native(codes: WeightCodes, dtype: torch.dtype) -> bool:
    return codes.q.is_cpu and dtype in DTYPES and fits_panels(codes) and available()


def _layouts(codes: WeightCodes, dtype: torch.dtype) -> Iterator[StoredWeight]:
    """All layouts of a weight that a device multiplies, for tests."""
    yield pack_planes(codes, dtype)
    yield pack_tiles(codes, dtype)
    if codes.q.is_cpu and dtype in DTYPES:
        yield pack_panel_codes(codes, dtype)


def one_expert(codes: WeightCodes, expert: int) -> WeightCodes:
    """Return the codes of one matrix [O, I] of several."""

    def pick(value: Any) -> Any:
        if isinstance(value, GroupFactors):
            return GroupFactors(*(one[expert] for one in value.tensors))
        return value[expert] if isinstance(value, Tensor) and value.dim() > 1 else value

    own = {one.name: pick(getattr(codes, one.name)) for one in fields(codes)}
    return replace(codes, **own)


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, i, o, bits, group, dtype in [
        (1, 128, 64, 4, 128, torch.bfloat16),
        (7, 256, 96, 4, 32, torch.bfloat16),
        (3, 96, 70, 3, 96, torch.float32),
        (33, 640, 200, 8, 128, torch.bfloat16),
        (70, 256, 512, 4, 64, torch.float16),
        (5, 256, 40, 6, 16, torch.bfloat16),
        (2, 128, 33, 2, 16, torch.float32),
        (9, 64, 48, 5, 32, torch.bfloat16),
    ]:
        x = torch.randn(t, i, device=device).to(dtype)
        bias = torch.randn(o, device=device).to(dtype)
        for codes in random_codes(o, i, bits, group, device):
            for weight in _layouts(codes, dtype):
                yield {"x": x, "weight": weight}
                yield {"x": x, "weight": weight, "bias": bias}


def random_codes(
    outputs: int, inputs: int, bits: int, group: int, device: torch.device
) -> Iterator[WeightCodes]:
    """Codes of each kind: a constant zero, zeros and perm, factored scales and offsets, tables."""
    shape, most = (outputs, -(-inputs // group)), (1 << bits) - 1
    q = torch.randint(0, most + 1, (outputs, inputs), device=device, dtype=torch.uint8)
    scale = GroupFactors(((torch.rand(shape, device=device) + 0.5) / most / inputs**0.5).half())
    zeros = torch.randint(0, most + 1, shape, device=device, dtype=torch.uint8)
    base = WeightCodes(q=q, bits=bits, group=group, scale=scale, zero=most // 2 + 1)
    yield base
    yield replace(base, zero=zeros, perm=torch.randperm(inputs, device=device).int())
    sixteenths = torch.randint(1, 64, shape, device=device, dtype=torch.uint8)
    one = torch.rand(outputs, 1, device=device).half()
    factored = GroupFactors(one / most / inputs**0.5 / 32, sixteenths)
    offset = GroupFactors(-one / inputs**0.5 / 64, sixteenths)
    yield replace(base, scale=factored, zero=0, offset=offset)
    if bits <= 4:
        yield replace(base, zero=0, table=torch.randn(1 << bits, device=device))
        own = torch.randn(outputs, 1 << bits, device=device) / inputs**0.5
        yield replace(base, group=inputs, zero=0, scale=None, table=own)
    if bits == 8:
        finite = torch.where(q & 127 == 127, q - 1, q)
        yield replace(base, q=finite, zero=0, table=e4m3_table(device), e4m3=True)


_run = NativeOp(CODES_LINEAR, "qqqqqqq")


def _native(x: Tensor, weight: StoredWeight, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, PanelCodes) or x.dtype != weight.dtype:
        return NotImplemented
    y = empty_product(x, weight.shape, bias)
    if y is None:
        return NotImplemented
    _run(
        x.data_ptr(), x.stride(0) * x.element_size(), weight.header.data_ptr(),
        0 if bias is None else bias.data_ptr(), y.data_ptr(), len(x), DTYPES[x.dtype],
    )  # fmt: skip
    return y


@kernel_for("product", "grouped", "panel_codes")
@op(cases=_cases, native=_native, gpu="linear.grouped_linear", atol=4e-2)
def grouped_linear(
    x: Tensor, weight: GroupedWeight | TiledWeight | PanelCodes, bias: Tensor | None = None
) -> Tensor:
    """Multiply every row of x by a weight of few bits.

    x: [T, I], rows may be strided. weight: [O, I]. bias: [O], x's dtype.
    Returns a new [T, O] in x.dtype.
    """
    y = x.float() @ weight.dequantize().t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _row_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, v, e, bits, group in [(1, 64, 64, 4, 32), (7, 101, 96, 6, 16), (3, 50, 128, 8, 128)]:
        ids = torch.randint(0, v, (t,), device=device, dtype=torch.int32)
        for codes in random_codes(v, e, bits, group, device):
            for weight in _layouts(codes, torch.bfloat16):
                yield {"ids": ids, "weight": weight}
            for weight in _layouts(codes, torch.float32):
                yield {"ids": ids, "weight": weight, "scale": 7.3}


_run_rows = NativeOp(CODES_EMBEDDING, "qqqqqd")


def _native_rows(ids: Tensor, weight: StoredWeight, scale: float = 1.0) -> Tensor:
    if not isinstance(weight, PanelCodes) or ids.dtype != torch.int32 or not ids.is_contiguous():
        return NotImplemented
    y = empty((len(ids), weight.shape[1]), weight.dtype)
    factor = 1.0 if scale == 1.0 else round_to_dtype(scale, weight.dtype)
    _run_rows(
        ids.data_ptr(), weight.header.data_ptr(), y.data_ptr(), len(ids), DTYPES[weight.dtype],
        factor,
    )  # fmt: skip
    return y


@kernel_for("rows", "grouped", "tiled", "panel_codes")
@op(cases=_row_cases, native=_native_rows, gpu="linear.grouped_widen")
def grouped_embedding(
    ids: Tensor, weight: GroupedWeight | TiledWeight | PanelCodes, scale: float = 1.0
) -> Tensor:
    """weight[ids] * scale. ids: [T] int32. weight: [V, E]. Returns a new [T, E] of weight.dtype.

    `scale` is rounded to that dtype first, as in the op embedding.
    """
    at = ids.long()
    if isinstance(weight, (TiledWeight, PanelCodes)):
        rows = weight.dequantize(weight.dtype)[at]
    else:
        rows = _packed_rows(weight, at)
    if scale == 1.0:
        return rows
    return (rows.float() * round_to_dtype(scale, weight.dtype)).to(weight.dtype)


def _packed_rows(weight: GroupedWeight, at: Tensor) -> Tensor:
    def pick(value: Any) -> Any:
        if isinstance(value, GroupFactors):
            return GroupFactors(*(one[at] for one in value.tensors))
        return value[at] if isinstance(value, Tensor) and value.dim() > 1 else value

    found = replace(
        weight, planes=tuple(plane[at] for plane in weight.planes), scale=pick(weight.scale),
        offset=pick(weight.offset), zero=pick(weight.zero), table=pick(weight.table),
    )  # fmt: skip
    return found.dequantize(weight.dtype)
