"""Attention's kernels at real shapes against float64, over a cache that holds NaN elsewhere."""

import math

import pytest
import torch

from quire.kernels.kv_write import kv_write
from quire.kernels.paged_attention import paged_attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LLAMA, QWEN, MOE = (32, 8, 128), (16, 8, 128), (32, 4, 128)
NEAR = {FP32: 3e-6, FP16: 2e-3, BF16: 6e-3}
DECODES = [(1, c) for c in (1, 2, 15, 16, 17, 63, 64, 65, 128, 500, 1000, 1501, 4100)]
CHUNKS = [(1, 1), (1, 77), (1, 1000), (300, 300), (17, 17), (128, 1000), (5, 2049), (33, 65)]
PROMPTS = [(1000, 1000), (513, 513), (64, 64), (1, 1), (2, 2)]
CUDA = "cuda"


class Step:
    """Sequences of (queries, context) in a paged cache whose unused parts are NaN."""

    def __init__(self, shape, rows, dtype, block=16, fp8=False, **features):
        self.heads, self.kv_heads, self.size = shape
        self.rows, self.block = rows, block
        self.scales = (0.02, 0.03) if fp8 else (1.0, 1.0)
        self.features = features
        blocks = [-(-c // block) for _, c in rows]
        cache = torch.full(
            (sum(blocks) + 7, 2, self.kv_heads, block, self.size), math.nan, device=CUDA
        )
        self.cache = cache.to(torch.float8_e4m3fn if fp8 else dtype)
        self.tables = torch.full((len(rows) + 5, max(blocks) + 3), 1 << 30, dtype=torch.int32)
        self.place = torch.randperm(len(rows) + 5)[: len(rows)]
        for place, mine in zip(self.place, torch.randperm(sum(blocks)).split(blocks), strict=True):
            self.tables[place, : len(mine)] = mine.int()
        tokens = sum(n for n, _ in rows)
        qkv = torch.randn(tokens, self.heads + 2 * self.kv_heads, self.size, device=CUDA).to(dtype)
        self.q, self.k, self.v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        self._fill(dtype)

    def _fill(self, dtype):
        at = 0
        for s, (n, context) in enumerate(self.rows):
            past = torch.randn(2, context - n, self.kv_heads, self.size, device=CUDA).to(dtype)
            self._write(*past, self._slots(s, 0, context - n))
            mine = slice(at, at + n)
            self._write(self.k[mine], self.v[mine], self._slots(s, context - n, context))
            at += n

    def _write(self, k, v, slots):
        kv_write(k, v, self.cache, slots, *self.scales)

    def _slots(self, s, start, stop):
        at = torch.arange(start, stop)
        blocks = self.tables[self.place[s]][at // self.block].long()
        return (blocks * self.block + at % self.block).to(CUDA)

    def run(self):
        counts = [n for n, _ in self.rows]
        decodes = next((i for i, n in enumerate(counts) if n > 1), len(counts))
        contexts = torch.tensor([c for _, c in self.rows], dtype=torch.int32, device=CUDA)
        return paged_attention(
            self.q,
            self.cache,
            self.tables.to(CUDA),
            torch.tensor([0, *counts]).cumsum(0).int().to(CUDA),
            contexts,
            self.size**-0.5,
            rows=self.place.int().to(CUDA),
            decodes=decodes,
            k=self.k,
            v=self.v,
            k_scale=self.scales[0],
            v_scale=self.scales[1],
            **self.features,
        )

    def wanted(self):
        queries = self.q.split([n for n, _ in self.rows])
        return torch.cat([self._exact(s, q) for s, q in enumerate(queries)])

    def _exact(self, s, q):
        """One sequence in float64."""
        n, context = self.rows[s]
        slots = self._slots(s, 0, context)
        both = self.cache[slots // self.block, :, :, slots % self.block].double()
        group = self.heads // self.kv_heads
        k, v = (both[:, i].repeat_interleave(group, 1) * self.scales[i] for i in (0, 1))
        scores = torch.einsum("nhd,chd->hnc", q.double(), k) * self.size**-0.5
        if (cap := self.features.get("softcap")) is not None:
            scores = cap * torch.tanh(scores / cap)
        pos = torch.arange(context - n, context, device=CUDA)[:, None]
        key = torch.arange(context, device=CUDA)[None]
        if (slopes := self.features.get("alibi")) is not None:
            scores = scores + slopes.double()[:, None, None] * (key - pos)
        seen = key <= pos
        if (window := self.features.get("window")) is not None:
            seen &= key > pos - window
        scores = scores.masked_fill(~seen, -math.inf)
        if (sinks := self.features.get("sinks")) is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
        return torch.einsum("hnc,chd->nhd", scores.softmax(-1)[..., :context], v)


def agrees(step, dtype):
    got, want = step.run().double(), step.wanted()
    assert (got - want).norm() / want.norm() < NEAR[dtype]


@pytest.mark.parametrize("rows", [DECODES, CHUNKS, PROMPTS], ids=["decodes", "chunks", "prompts"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [LLAMA, QWEN, MOE, (8, 8, 128), (12, 2, 64), (8, 2, 256)])
def test_shapes_and_dtypes(shape, dtype, rows):
    torch.manual_seed(0)
    agrees(Step(shape, rows, dtype), dtype)


@pytest.mark.parametrize("kind", ["", "sinks", "fp8"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [LLAMA, MOE, (12, 2, 64), (8, 2, 256)])
def test_programs_that_share_a_prefix(shape, dtype, kind):
    torch.manual_seed(6)
    features = {"sinks": torch.randn(shape[0], device=CUDA)} if kind == "sinks" else {}
    rows = [(1, 77), (5, 30_001), (32, 9000), (3, 5001), (20, 20), (2, 4097)]
    counters = torch.zeros(4096, dtype=torch.int32, device=CUDA)
    step = Step(shape, rows, dtype, fp8=kind == "fp8", counters=counters, **features)
    agrees(step, dtype)
    assert not counters.any()
    first = step.run()
    for _ in range(20):  # whoever comes last, the sum is the same
        assert torch.equal(step.run(), first)


@pytest.mark.parametrize("rows", [DECODES, CHUNKS], ids=["decodes", "chunks"])
@pytest.mark.parametrize("size", [16, 20, 32, 80, 96, 112, 192])
def test_other_head_sizes(size, rows):
    torch.manual_seed(1)
    agrees(Step((8, 2, size), rows, BF16), BF16)


@pytest.mark.parametrize("rows", [DECODES, CHUNKS, PROMPTS], ids=["decodes", "chunks", "prompts"])
@pytest.mark.parametrize(
    "kind", ["window", "softcap", "sinks", "alibi", "window sinks", "window softcap"]
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_features(dtype, kind, rows):
    torch.manual_seed(2)
    features = {
        "window": 100,
        "softcap": 20.0,
        "sinks": torch.randn(16, device=CUDA),
        "alibi": 0.5 ** torch.arange(1, 17, device=CUDA),
    }
    features = {name: x for name, x in features.items() if name in kind}
    agrees(Step((16, 2, 64), rows, dtype, **features), dtype)


@pytest.mark.parametrize("rows", [DECODES, CHUNKS], ids=["decodes", "chunks"])
@pytest.mark.parametrize("block", [16, 32, 128, 256])
@pytest.mark.parametrize("fp8", [False, True])
def test_block_sizes_and_an_fp8_cache(fp8, block, rows):
    torch.manual_seed(3)
    agrees(Step(LLAMA, rows, BF16, block=block, fp8=fp8), BF16)


def test_many_decodes_before_prompts():
    torch.manual_seed(4)
    rows = [(1, 1 + 37 * i % 900) for i in range(300)] + CHUNKS
    agrees(Step(LLAMA, rows, BF16), BF16)


def test_in_float32_a_row_does_not_depend_on_the_others():
    torch.manual_seed(5)
    rows, blocks = 200, 2000
    cache = torch.randn(blocks, 2, 8, 16, 128, device=CUDA)
    tables = torch.randint(0, blocks, (rows, 300), device=CUDA, dtype=torch.int32)
    q = torch.randn(rows, 16, 128, device=CUDA)
    contexts = torch.randint(1, 4700, (rows,), device=CUDA, dtype=torch.int32)
    starts = torch.arange(rows + 1, device=CUDA, dtype=torch.int32)
    whole = paged_attention(q, cache, tables, starts, contexts, 0.1, decodes=rows)
    for s in (0, 7, 100):
        one = slice(s, s + 1)
        alone = paged_attention(
            q[one], cache, tables[one], starts[:2], contexts[one], 0.1, decodes=1
        )
        assert torch.equal(alone, whole[one])


def test_a_captured_step_follows_its_contexts():
    torch.manual_seed(6)
    cache = torch.randn(600, 2, 8, 16, 128, device=CUDA, dtype=BF16)
    tables = torch.randint(0, 600, (5, 300), device=CUDA, dtype=torch.int32)
    q = torch.randn(5, 16, 128, device=CUDA, dtype=BF16)
    contexts = torch.tensor([3, 64, 500, 1, 70], device=CUDA, dtype=torch.int32)
    starts = torch.arange(6, device=CUDA, dtype=torch.int32)
    counters = torch.zeros(1024, device=CUDA, dtype=torch.int32)

    def step():
        return paged_attention(
            q, cache, tables, starts, contexts, 0.1, decodes=5, counters=counters
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([3, 64, 500, 1, 70], [4000, 1, 0, 2222, 16], [0, 0, 5, 0, 0]):
        contexts.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, step())
        assert not out[contexts == 0].any()
        assert not counters.any()
