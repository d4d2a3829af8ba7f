"""Codes of a KV cache: attention reads each of the 256 exactly, whatever the CPU."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from quire.kernels.paged_attention import paged_attention
from quire.platform.native_build import KERNELS

BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
BYTES = torch.arange(256).to(torch.uint8)


def attend(q, codes):
    """Attention of a query a sequence over blocks [N, 2, 1, B, D], one for each sequence."""
    count, _, _, tokens, size = codes.shape
    return paged_attention(
        q=q.view(count, 1, size),
        cache=codes,
        tables=torch.arange(count, dtype=torch.int32)[:, None],
        q_starts=torch.arange(count + 1, dtype=torch.int32),
        contexts=torch.full((count,), tokens, dtype=torch.int32),
        scale=1.0,
        v_scale=0.5,
    )[:, 0]


def values_read(code, dtype, size):
    """The values [256, D] that the one token of each sequence yields, and those of its codes."""
    codes = torch.zeros(256, 2, 1, 1, size, dtype=torch.uint8)
    codes[:, 1, 0, 0] = BYTES.roll(1)[(torch.arange(256)[:, None] + torch.arange(size)) % 256]
    codes = codes.view(code)
    return attend(torch.ones(256, size).to(dtype), codes), codes[:, 1, 0, 0].to(dtype) * 0.5


def key_weights(code, dtype, size):
    """The weight of a key with each code in one channel, the query its reciprocal, beside a key of
    zeros."""
    codes, q = torch.zeros(256, 2, 1, 2, size, dtype=torch.uint8), torch.zeros(256, size)
    channel = torch.arange(256) % size
    codes[BYTES.long(), 0, 0, 1, channel] = BYTES
    codes[:, 1, 0, 1] = torch.tensor([1.0]).to(code).view(torch.uint8)
    number = BYTES.view(code).float()
    q[BYTES.long(), channel] = torch.where(number == 0, 1.0, 1 / number)
    q = q.to(dtype)
    score = (number * q.float()[BYTES.long(), channel]).nan_to_num(torch.nan, torch.nan, torch.nan)
    return attend(q, codes.view(code))[:, 0].float(), score.sigmoid() * 0.5


def check(code, dtype, size):
    torch.testing.assert_close(*values_read(code, dtype, size), rtol=0, atol=0, equal_nan=True)
    bound = 1e-6 if dtype == FP32 else 2**-8
    torch.testing.assert_close(*key_weights(code, dtype, size), rtol=0, atol=bound, equal_nan=True)


@pytest.mark.usefixtures("native_one")
@pytest.mark.parametrize("code", [INT8, E4M3, E5M2])
@pytest.mark.parametrize(("dtype", "size"), [(FP32, 64), (FP32, 19), (BF16, 128), (BF16, 18)])
def test_attention_reads_every_code_exactly(code, dtype, size):
    check(code, dtype, size)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.long("compiles the library for lesser CPUs: `make isa` runs it")
@pytest.mark.parametrize("narrow", ["sse2", "avx2", "avx512"], indirect=True)
def test_lesser_cpus_read_every_code_exactly(narrow):
    for code in (INT8, E4M3, E5M2):
        check(code, FP32, 19)
        check(code, BF16, 64)


WIDEN = """
#include "kv_codes.h"
template <int CODE> void widen(const uint8_t* from, uint32_t* to) {
  for (int i = 0; i < 256; i += 4 * W) {
    vu raw, low, high;
    memcpy(&raw, from + i, sizeof raw);
    widen_four<CODE>(raw, low, high);
    for (int j = 0; j < W; j++) *to++ = low[j], *to++ = high[j];
  }
}
extern "C" void widen_all(const uint8_t* from, uint32_t* to) {
  widen<INT8>(from, to), widen<E4M3>(from, to + 128), widen<E5M2>(from, to + 256);
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
def test_a_cpu_with_tables_of_bytes_but_without_avx2_reads_every_code(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None or "ssse3" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no compiler, or a CPU before SSSE3")
    source, library = tmp_path / "widen.cpp", tmp_path / "widen.so"
    source.write_text(WIDEN)
    flags = ["-std=c++17", "-O1", "-march=x86-64", "-mssse3", "-fPIC", "-shared"]
    subprocess.run([compiler, *flags, f"-I{KERNELS.folder}", "-o", library, source], check=True)
    numbers = torch.empty(3, 256, dtype=BF16)
    ctypes.CDLL(str(library)).widen_all(
        ctypes.c_void_p(BYTES.data_ptr()), ctypes.c_void_p(numbers.data_ptr())
    )
    for got, code in zip(numbers, (INT8, E4M3, E5M2), strict=True):
        torch.testing.assert_close(got, BYTES.view(code).to(BF16), rtol=0, atol=0, equal_nan=True)
