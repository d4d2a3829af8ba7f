"""Lays codes out in the blocks of GGUF files: the inverse of reading them.

A row of a tensor is a run of blocks. Axes: O outputs, I inputs, N blocks, K groups of a block.

Source: the layouts of ggml's blocks, https://github.com/ggml-org/ggml
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config.quant.ggml import TYPE_BY_NAME
from quire.kernels.formats.weight_codes import WeightCodes


def to_blocks(kind: str, codes: WeightCodes) -> Tensor:
    """The bytes uint8 [O, n] of a weight [O, I] that quantize_ggml made."""
    outputs = codes.q.shape[0]
    form = TYPE_BY_NAME[kind]
    q = codes.q.view(-1, form.values)
    if kind.endswith("_K"):
        parts = _K_BLOCKS[kind](q, codes)
    else:
        parts = _simple(kind, q, codes)
    out = torch.cat(parts, 1)
    assert out.shape[1] == form.nbytes, (kind, out.shape)
    return out.view(outputs, -1)


def plain_bytes(kind: str, weight: Tensor) -> Tensor:
    """The bytes of a tensor in F32, F16 or BF16: uint8 of its shape, the last axis in bytes."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    return weight.to(dtype).contiguous().view(torch.uint8)


def _half(values: Tensor) -> Tensor:
    """float16 [N, n] -> bytes [N, 2 n]."""
    return values.half().contiguous().view(torch.uint8)


def _simple(kind: str, q: Tensor, codes: WeightCodes) -> list[Tensor]:
    assert codes.scale is not None
    d = _half(codes.scale.values.reshape(-1, 1))
    if kind == "Q8_0":
        return [d, (q.int() - 128).to(torch.int8).view(torch.uint8)]
    parts = [d]
    if codes.offset is not None:
        parts.append(_half(codes.offset.values.reshape(-1, 1)))
    if codes.bits == 5:
        shifts = torch.arange(32, device=q.device)
        high = ((q >> 4).long() << shifts).sum(1)
        parts.append(torch.stack([high >> 8 * i & 255 for i in range(4)], 1).to(torch.uint8))
    low = q & 15
    return [*parts, low[:, :16] | low[:, 16:] << 4]


def _runs(values: Tensor, bits: int) -> Tensor:
    """Values [N, n] below 2 ** bits, in runs of 32 * 8 / bits -> bytes [N, n bits / 8].

    Byte j of a run has its values j, j + 32, j + 64, ...: the first in its low bits.
    """
    each = 8 // bits
    parts = values.view(len(values), -1, each, 32)
    out = parts[:, :, 0].clone()
    for i in range(1, each):
        out |= parts[:, :, i] << i * bits
    return out.flatten(1)


def _block_factors(codes: WeightCodes) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(d bytes [N, 2], integers [N, K], dmin bytes, integers)."""
    assert codes.scale is not None
    assert codes.scale.codes is not None
    groups = 256 // codes.group
    d, sc = _half(codes.scale.values.reshape(-1, 1)), codes.scale.codes.reshape(-1, groups)
    if codes.offset is None or codes.offset.codes is None:
        return d, sc, None, None
    dmin = _half(-codes.offset.values.reshape(-1, 1))
    return d, sc, dmin, codes.offset.codes.reshape(-1, groups)


def _q2_k(q: Tensor, codes: WeightCodes) -> list[Tensor]:
    d, sc, dmin, mn = _block_factors(codes)
    assert mn is not None
    assert dmin is not None
    return [sc | mn << 4, _runs(q, 2), d, dmin]


def _q3_k(q: Tensor, codes: WeightCodes) -> list[Tensor]:
    d, sc, _, _ = _block_factors(codes)
    high = _runs(q >> 2, 1)
    wide = (sc.int() + 32).to(torch.uint8)
    low = wide & 15
    packed = low[:, :8] | low[:, 8:] << 4
    top = wide >> 4
    rest = top[:, :4] | top[:, 4:8] << 2 | top[:, 8:12] << 4 | top[:, 12:] << 6
    return [high, _runs(q & 3, 2), packed, rest, d]


def _six_bit_pairs(sc: Tensor, mn: Tensor) -> Tensor:
    """Eight scales and eight mins of six bits -> 12 bytes."""
    first, second = sc[:, :4] | sc[:, 4:] >> 4 << 6, mn[:, :4] | mn[:, 4:] >> 4 << 6
    return torch.cat([first, second, sc[:, 4:] & 15 | (mn[:, 4:] & 15) << 4], 1)


def _nibble_runs(values: Tensor) -> Tensor:
    """256 values below 16: runs of 32 bytes, low nibbles from one group, high from the next."""
    return _runs(values, 4)


def _q4_k(q: Tensor, codes: WeightCodes) -> list[Tensor]:
    d, sc, dmin, mn = _block_factors(codes)
    assert mn is not None
    assert dmin is not None
    return [d, dmin, _six_bit_pairs(sc, mn), _nibble_runs(q)]


def _q5_k(q: Tensor, codes: WeightCodes) -> list[Tensor]:
    d, sc, dmin, mn = _block_factors(codes)
    assert mn is not None
    assert dmin is not None
    return [d, dmin, _six_bit_pairs(sc, mn), _runs(q >> 4, 1), _nibble_runs(q & 15)]


def _q6_k(q: Tensor, codes: WeightCodes) -> list[Tensor]:
    d, sc, _, _ = _block_factors(codes)
    low = (q & 15).view(-1, 2, 2, 64)  # halves of 128: low nibbles from 64, high from 64 more
    nibbles = (low[:, :, 0] | low[:, :, 1] << 4).flatten(1)
    return [nibbles, _runs(q >> 4, 2), sc.contiguous().view(torch.uint8), d]


_K_BLOCKS = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
