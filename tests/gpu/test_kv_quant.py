"""KV caches of 8 bits and products of bytes on the GPU: real shapes, and whole engines."""

import math

import pytest
import torch

from quire.kernels import int8_linear
from quire.kernels.formats.kv_cache import allocate_blocks
from quire.kernels.kv_write import kv_write
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


@pytest.mark.parametrize("rows", [DECODES, CHUNKS, PROMPTS], ids=["decodes", "chunks", "prompts"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [LLAMA, MOE, (12, 2, 64), (8, 2, 80)])
@pytest.mark.parametrize(
    ("codes", "per_token"), [(INT8, True), (E4M3, True), (INT8, False), (E5M2, False)]
)
def test_attention_over_codes(codes, per_token, shape, dtype, rows):
    torch.manual_seed(0)
    step = CodedStep(shape, rows, dtype, codes, per_token=per_token)
    got, want = step.run().double(), step.wanted()
    assert (got - want).norm() / want.norm() < NEAR[dtype]


@pytest.mark.parametrize("block", [1, 8, 32, 128])
def test_block_sizes_of_a_cache_with_scales(block):
    torch.manual_seed(3)
    step = CodedStep(LLAMA, CHUNKS, BF16, INT8, per_token=True, block=block)
    got, want = step.run().double(), step.wanted()
    assert (got - want).norm() / want.norm() < NEAR[BF16]


@pytest.mark.parametrize("kv", ["int8_per_token_head", "fp8_per_token_head", "float8_e5m2"])
@pytest.mark.parametrize("hf", CASES)
def test_answers_are_the_same_on_every_path(hf, kv):
    want = {}
    for one in REQUESTS:
        engine = engine_of(CASES[hf], kv=kv, eager=True, prefix=False)
        want |= run(engine, made([one]))[0]
    for name, setup in PATHS.items():
        block = {"block_size": 16, "num_blocks": 12} if "num_blocks" in setup else {}
        engine = engine_of(CASES[hf], kv=kv, **setup | block)
        assert run(engine, made(), stagger=2)[0] == want, name


@pytest.mark.parametrize("rows", [1, 2, 16, 33, 64, 100, 257, 2048])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("sizes", [(4096, 4096), (6144, 4096), (4096, 14336), (70, 101)])
def test_products_of_bytes_are_exact(sizes, dtype, rows):
    torch.manual_seed(0)
    outputs, inputs = sizes
    x = (torch.randn(rows, inputs, device=CUDA) + 0.3).to(dtype)
    for weight in int8_linear.random_weights(outputs, inputs, torch.device(CUDA)):
        how = (weight.symmetric, weight.input_scale, weight.input_zero_point)
        q, scale, zero = int8_linear.quantize_int8(x, *how)
        wide = (q.double() - zero[:, None]) * scale[:, None].double()
        want = wide @ (weight.data.double() * weight.scale[:, None].double()).t()
        got = int8_linear.int8_linear(x, weight)
        torch.testing.assert_close(got.double(), want.to(dtype).double(), atol=1e-5, rtol=1e-2)
        assert torch.equal(got[-1:], int8_linear.int8_linear(x[-1:], weight))
