"""A matrix to the tensors of a compressed-tensors checkpoint, and back.

Axes: O outputs, I inputs, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.kernels.formats.fp8_weight import Fp8Weight
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.quantizers.floats import quantize_mxfp4, quantize_nvfp4
from quire.kernels.quantizers.integers import quantize_integers
from quire.quant import fp8
from quire.quantize.schemes import Scheme, words

Quantized = WeightCodes | Fp8Weight
E8M0_BIAS = 127


def quantize(
    scheme: Scheme,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    global_scale: float | None = None,
) -> Quantized:
    """Round a weight [O, I] to nearest. dtype: of the checkpoint, and of scales."""
    if scheme.format == "float-quantized":
        return fp8.quantize(weight, scheme.block)
    if scheme.kind == "int":
        return quantize_integers(
            weight.float(), bits=scheme.bits, group=scheme.group, symmetric=scheme.symmetric,
            scale_dtype=dtype,
        )  # fmt: skip
    if scheme.strategy == "tensor_group":
        return quantize_nvfp4(weight.float(), global_scale)
    return quantize_mxfp4(weight.float())


def to_tensors(scheme: Scheme, made: Quantized) -> dict[str, Tensor]:
    """The tensors of a quantized matrix, by the names in Scheme.layout."""
    if isinstance(made, Fp8Weight):
        scale = made.scale if made.block_size else made.scale[:, None]
        return {"weight": made.data, "weight_scale": scale}
    assert made.scale is not None
    if scheme.format == "pack-quantized":
        found = {
            "weight_packed": pack_words(made.q, made.bits),
            "weight_scale": made.scale.values,
            "weight_shape": torch.tensor(made.q.shape),
        }
        if isinstance(made.zero, Tensor):
            found["weight_zero_point"] = pack_words(made.zero.t(), made.bits).t()
        return found
    if scheme.format == "int-quantized":
        q = (made.q.int() - 128).to(torch.int8)
        return {"weight": q, "weight_scale": made.scale.values}
    found = {"weight_packed": made.q[:, 0::2] | made.q[:, 1::2] << 4}
    if made.scale.codes is not None:
        found["weight_scale"] = made.scale.codes
        found["weight_global_scale"] = 1.0 / made.scale.values[:1, 0]
    else:
        exponents = made.scale.values.log2().round() + E8M0_BIAS
        found["weight_scale"] = exponents.to(torch.uint8)
    return found


def from_tensors(scheme: Scheme, found: Mapping[str, Tensor]) -> WeightCodes:
    """The codes of a matrix of integers that to_tensors has written."""
    assert scheme.format == "pack-quantized"
    outputs, inputs = found["weight_shape"].tolist()
    scale, zero = found["weight_scale"], 1 << scheme.bits - 1
    zeros = None
    if not scheme.symmetric:
        zeros = unpack_words(found["weight_zero_point"].t(), scheme.bits, outputs).t().contiguous()
    return WeightCodes(
        q=unpack_words(found["weight_packed"], scheme.bits, inputs),
        bits=scheme.bits,
        group=scheme.group or inputs,
        scale=GroupFactors(scale),
        zero=zero if zeros is None else zeros,
    )


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 [R, n] below 2 ** bits -> int32 [R, words], code i at bit i * bits of the row."""
    rows, count = codes.shape
    if 32 % bits == 0:
        each = 32 // bits
        padded = torch.nn.functional.pad(codes, (0, -count % each)).view(rows, -1, each)
        out = padded[..., 0].int()
        for i in range(1, each):
            out |= padded[..., i].int() << i * bits
        return out
    shifts = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = (codes[..., None] >> shifts & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -count * bits % 32)).view(rows, -1, 32)
    places = torch.arange(32, device=codes.device)
    return (stream.long() << places).sum(-1).to(torch.int32)


def unpack_words(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of pack_words: uint8 [R, count]."""
    assert packed.shape[1] == words(count, bits)
    places = torch.arange(32, device=packed.device, dtype=torch.int32)
    stream = (packed[..., None] >> places & 1).flatten(1)[:, : count * bits]
    values = stream.view(len(packed), count, bits) << torch.arange(bits, device=packed.device)
    return values.sum(-1).to(torch.uint8)
