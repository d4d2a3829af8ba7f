"""KV caches of 8 bits and products of bytes on the GPU: real shapes, and whole engines."""

import math
from itertools import product

import pytest
import torch

from quire.kernels import int8_linear
from quire.kernels.formats.kv_cache import allocate_blocks
from quire.kernels.kv_write import kv_write
from tests import tiers
from tests.cpu.engine_of import run
from tests.cpu.test_kv_formats import PATHS, REQUESTS, made
from tests.gpu.test_attention import (
    BF16,
    CHUNKS,
    CUDA,
    DECODES,
    FP16,
    FP32,
    LLAMA,
    MOE,
    NEAR,
    PROMPTS,
    Step,
)
from tests.gpu.test_invariance import CASES, engine_of

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


class CodedStep(Step):
    """The same over codes with a scale for each token and head, or for each layer."""

    def __init__(self, shape, rows, dtype, codes, *, per_token, block=16, **features):
        self.codes, self.per_token, self.token_scales = codes, per_token, None
        super().__init__(shape, rows, dtype, block, **features)

    def _fill(self, dtype):
        shape = self.cache.shape
        if self.per_token:
            self.cache, self.token_scales = allocate_blocks(shape, self.codes, torch.device(CUDA))
            self.features["scales"] = self.token_scales
        else:
            self.scales = (0.03, 0.03)
            self.cache = torch.zeros(shape, device=CUDA).to(self.codes)
        super()._fill(dtype)

    def _write(self, k, v, slots):
        kv_write(k, v, self.cache, slots, *self.scales, self.token_scales)

    def _exact(self, s, q):
        n, context = self.rows[s]
        slots = self._slots(s, 0, context)
        at = (slots // self.block, slice(None), slice(None), slots % self.block)
        both = self.cache[at].double()
        if self.token_scales is not None:
            both *= self.token_scales[at].double()[..., None]
        group = self.heads // self.kv_heads
        k, v = (both[:, i].repeat_interleave(group, 1) * self.scales[i] for i in (0, 1))
        scores = torch.einsum("nhd,chd->hnc", q.double(), k) * self.size**-0.5
        pos = torch.arange(context - n, context, device=CUDA)[:, None]
        seen = torch.arange(context, device=CUDA)[None] <= pos
        return torch.einsum("hnc,chd->nhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


SHAPES = [LLAMA, MOE, (12, 2, 64), (8, 2, 80)]
CODES = [(INT8, True), (E4M3, True), (INT8, False), (E5M2, False)]
"""(codes of the cache, whether each token and head has a scale)."""
DTYPES, BLOCKS = [BF16, FP16, FP32], [16, 1, 128, 8, 32]


def together():
    """Each format of codes with each dtype and most shapes: all are constants of the kernels."""
    for i, d in product(range(4), range(3)):
        yield CODES[i], SHAPES[(i + d) % 4], DTYPES[d], BLOCKS[(3 * i + d) % 5]


@pytest.mark.parametrize(
    ("codes", "shape", "dtype", "block"),
    [
        *together(),
        *tiers.long(*product(CODES, SHAPES, DTYPES, [16])),
        *tiers.long(*product(CODES[:1], SHAPES[:1], DTYPES[:1], [1, 8, 32, 128])),
    ],
)
def test_attention_over_codes(codes, shape, dtype, block):
    torch.manual_seed(0)
    for rows in (DECODES, CHUNKS, PROMPTS):
        step = CodedStep(shape, rows, dtype, codes[0], per_token=codes[1], block=block)
        got, want = step.run().double(), step.wanted()
        assert (got - want).norm() / want.norm() < NEAR[dtype]


@pytest.mark.parametrize(
    ("hf", "kv"),
    [
        ("full", "int8_per_token_head"),
        ("windows", "fp8_per_token_head"),
        ("full", "float8_e5m2"),
        *tiers.long(
            ("full", "fp8_per_token_head"),
            ("windows", "int8_per_token_head"),
            ("windows", "float8_e5m2"),
        ),
    ],
)
def test_answers_are_the_same_on_every_path(hf, kv):
    want, few = {}, {"kv": kv, "seqs": 8}  # each size of a batch is a graph
    for one in REQUESTS:
        engine = engine_of(CASES[hf], eager=True, prefix=False, **few)
        want |= run(engine, made([one]))[0]
    for name, setup in PATHS.items():
        block = {"block_size": 16, "num_blocks": 12} if "num_blocks" in setup else {}
        engine = engine_of(CASES[hf], **few | setup | block)
        assert run(engine, made(), stagger=2)[0] == want, name


BYTES = [
    ((4096, 4096), BF16),
    ((6144, 4096), FP16),
    ((4096, 14336), FP32),
    ((70, 101), BF16),
]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [*BYTES, *tiers.long(*product([sizes for sizes, _ in BYTES], DTYPES))],
)
def test_products_of_bytes_are_exact(sizes, dtype):
    torch.manual_seed(0)
    outputs, inputs = sizes
    for weight in int8_linear.random_weights(outputs, inputs, torch.device(CUDA)):
        for rows in (1, 2, 17, 64, 257, 2048):
            x = (torch.randn(rows, inputs, device=CUDA) + 0.3).to(dtype)
            how = (weight.symmetric, weight.input_scale, weight.input_zero_point)
            q, scale, zero = int8_linear.quantize_int8(x, *how)
            wide = (q.double() - zero[:, None]) * scale[:, None].double()
            want = wide @ (weight.data.double() * weight.scale[:, None].double()).t()
            got = int8_linear.int8_linear(x, weight)
            torch.testing.assert_close(got.double(), want.to(dtype).double(), atol=1e-5, rtol=1e-2)
            assert torch.equal(got[-1:], int8_linear.int8_linear(x[-1:], weight))
