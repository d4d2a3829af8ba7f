"""The inline assembly that decodes weights of few bits gives what the plain path gives."""

import numpy as np
import pytest
import torch

from quire.kernels.formats.tiled_weight import PLANES
from tests.cpu.gpu_kernels import ptx

pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.gpu.linear import grouped_decode as decode


def function(found):
    """The Python function of what Triton calls while it compiles."""
    return getattr(found, "__wrapped__", found)


def text_of(found):
    return getattr(found, "value", found)


@pytest.mark.parametrize("bits", PLANES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_in_every_field_is_decoded(bits, dtype):
    low, high = PLANES[bits]
    draw = np.random.default_rng(1)
    q = np.arange(1 << bits).repeat(2)
    draw.shuffle(q)
    first, second = q[::2], q[1::2]  # the neighbours of a register
    bf16 = dtype == torch.bfloat16
    magic = text_of(decode.magic_of(bits, bf16))
    for slice_ in range(16 // min(low, high or low)):
        at, high_at = slice_ * low % 16, slice_ * high % 16
        for zero in (0, 1 << bits - 1, (1 << bits) - 1):
            minus = ptx.bits(torch.tensor([-magic - zero]).to(dtype))
            assert ptx.numbers(minus, dtype).item() == -magic - zero  # it can be written
            inputs = [word(first, second, low, 0, at, draw)]
            if high:
                inputs.append(word(first, second, high, low, high_at, draw))
            inputs.append(minus | minus << 16)
            asm = text_of(decode.decode_asm(low, at, high, high_at, bf16))
            (out,) = ptx.run(asm, inputs, 1)
            for half, want in ((out & 0xFFFF, first), (out >> 16, second)):
                assert ptx.numbers(half, dtype).tolist() == (want - zero).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_e4m3_float_in_every_field_is_decoded(dtype):
    draw = np.random.default_rng(3)
    finite = [code for code in range(256) if code & 127 != 127]
    first, second = draw.permutation(finite), draw.permutation(finite)
    floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    for at in (0, 4, 8, 12):
        words = [word(first, second, 4, shift, at, draw) for shift in (0, 4)]
        (out,) = ptx.run(text_of(decode.e4m3_asm(at, at, dtype == torch.bfloat16)), words, 1)
        for half, want in ((out & 0xFFFF, first), (out >> 16, second)):
            assert half.tolist() == ptx.bits(floats[want]).tolist()


def word(first, second, width, shift, at, draw):
    """Registers with the bits of two codes in a field, and anything in the others."""
    mask = (1 << width) - 1
    other = draw.integers(0, 1 << 32, len(first)) & ~((mask << at) | (mask << at + 16))
    return other | (first >> shift & mask) << at | (second >> shift & mask) << at + 16


def test_every_code_is_looked_up():
    draw = np.random.default_rng(2)
    table = draw.integers(0, 1 << 16, 16)
    words = draw.integers(0, 1 << 32, 500)
    rows = [sum((table[4 * i + e] >> shift & 255) << 8 * e for e in range(4))
            for shift in (0, 8) for i in range(4)]  # fmt: skip
    operands = [np.int64(one) for one in rows for _ in range(2)]
    out = ptx.run(text_of(decode._LOOKUP_ASM), [words, *operands], 4)
    for slice_ in range(4):
        for at in (0, 16):
            got = out[slice_] >> at & 0xFFFF
            assert (got == table[words >> at + 4 * slice_ & 15]).all()
