"""Adapters on the device: sums against float64, the same bits in any company, graphs of any mix."""

import pytest
import torch

from quire.kernels.act import act_mul
from quire.kernels.formats.lora_bank import LoraRows, lora_part
from quire.kernels.framework import lazy_fusion
from quire.kernels.gpu.lora import few_rows
from quire.kernels.gpu.lora.lora_linear import MAX_SPLIT_ROWS
from quire.kernels.lora import lora_embedding, lora_linear, lora_pairs, random_bank, sort_rows
from tests.cpu.kernels.test_lora import check

CUDA = torch.device("cuda", 0)
RANKS = [[16, 16], [8, 0], [64, 33], [1, 16]]
PARTS = (2048, 512)
MANY = [few_rows.MAX_ROWS + 1, 200, MAX_SPLIT_ROWS, MAX_SPLIT_ROWS + 1, 3000]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def rows_of(slots, count):
    rows = LoraRows.allocate(len(slots), count, CUDA)
    rows.slots.copy_(torch.as_tensor(slots, dtype=torch.int32))
    sort_rows(rows)
    return rows


def inputs(count, size, outputs, dtype):
    x, y = torch.randn(count, size, device=CUDA), torch.randn(count, outputs, device=CUDA)
    return x.to(dtype), y.to(dtype)


def run(y, x, bank, rows):
    out = lora_linear(y.clone(), x, bank, rows)
    lazy_fusion.flush()
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dora", [False, True])
def test_products_are_near_float64(dtype, dora):
    bank = random_bank(RANKS, 1024, PARTS, dtype, CUDA, dora=dora)
    for count in (1, 40, 600):
        rows = rows_of(torch.randint(-1, 4, (count,)), 4)
        x, y = inputs(count, 1024, sum(PARTS), dtype)
        check(run(y, x, bank, rows), y, x, bank, rows)


@pytest.mark.parametrize("size", [1024, 14336])
def test_a_row_has_the_same_bits_in_any_company(size):
    bank = random_bank(RANKS, size, PARTS, torch.bfloat16, CUDA)
    slots = torch.randint(-1, 4, (max(MANY),), dtype=torch.int32)
    x, y = inputs(max(MANY), size, sum(PARTS), torch.bfloat16)
    for counts in [2, 3, 16, few_rows.most_rows(bank)], MANY:  # few have kernels of their own
        most = max(counts)
        whole = run(y[:most], x[:most], bank, rows_of(slots[:most], 4))
        for count in counts:
            part = rows_of(slots[:count], 4)
            for _ in range(2):
                assert torch.equal(run(y[:count], x[:count], bank, part), whole[:count]), count
        one = rows_of(torch.where(slots == 2, 2, -1)[:most], 4)
        theirs = (slots[:most] == 2).to(CUDA)
        assert torch.equal(run(y[:most], x[:most], bank, one)[theirs], whole[theirs])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("count", [5, 700])
def test_what_is_not_finite_stays_in_its_row(bad, count):
    bank = random_bank([[16], [64]], 512, (1024,), torch.bfloat16, CUDA)
    rows = rows_of(torch.arange(count) % 3 - 1, 2)
    x, y = inputs(count, 512, 1024, torch.bfloat16)
    want = run(y, x, bank, rows)
    x[4, 100] = bad
    got, others = run(y, x, bank, rows), torch.arange(count, device=CUDA) != 4
    assert not got[4].isfinite().any()
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("count", [1, 8, 64, 1000])
def test_one_graph_serves_any_mix_of_adapters(count):
    bank = random_bank([[16], [0], [0]], 1024, (2048,), torch.bfloat16, CUDA)
    x, y = inputs(count, 1024, 2048, torch.bfloat16)
    kept, rows = y.clone(), rows_of(torch.full((count,), -1), 3)
    run(y, x, bank, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora_linear(y, x, bank, rows)
        lazy_fusion.flush()
    for mix in range(4):
        if mix == 2:
            part = lora_part(torch.randn(7, 1024) / 32, torch.randn(2048, 7), torch.bfloat16)
            bank.write(1, [part])
        rows.slots.copy_(torch.randint(-1, 3, (count,), dtype=torch.int32))
        sort_rows(rows)
        y.copy_(kept)
        graph.replay()
        assert torch.equal(y, run(kept, x, bank, rows))
        check(y, kept, x, bank, rows)


def test_embeddings_are_products_of_one_hot_rows():
    bank = random_bank([[16], [40]], 3000, (1024,), torch.bfloat16, CUDA)
    rows = rows_of(torch.arange(70) % 3 - 1, 2)
    ids = torch.randint(0, 3000, (70,), device=CUDA, dtype=torch.int32)
    _, y = inputs(70, 1, 1024, torch.bfloat16)
    got = lora_embedding(y.clone(), ids, bank, rows)
    check(got, y, torch.nn.functional.one_hot(ids.long(), 3000), bank, rows)


@pytest.mark.parametrize("tokens", [1, 64, 900])
def test_pairs_of_experts_are_rows_of_their_own(tokens):
    experts, top = 32, 4
    bank = random_bank([[8, 8]] * (2 * experts), 256, (128, 128), torch.bfloat16, CUDA)
    rows = rows_of(torch.randint(-1, 2, (tokens,)), 2)
    ids = torch.rand(tokens, experts, device=CUDA).argsort(-1)[:, :top].int().contiguous()
    pairs = lora_pairs(rows, ids, experts)
    x, y = inputs(tokens, 256, 256, torch.bfloat16)
    y = y.repeat_interleave(top, 0)
    got = run(y, x, bank, pairs)
    check(got, y, x.repeat_interleave(top, 0), bank, pairs)


@pytest.mark.parametrize("tokens", [1, 60, 1500])
def test_an_activation_is_computed_with_the_sums(tokens):
    bank = random_bank([[16, 16], [8, 0]], 512, (1024, 1024), torch.bfloat16, CUDA)
    rows = rows_of(torch.randint(-1, 2, (tokens,)), 2)
    x, y = inputs(tokens, 512, 2048, torch.bfloat16)
    want = run(y, x, bank, rows)
    fused = y.clone()
    got = act_mul(lora_linear(fused, x, bank, rows), "silu")
    with lazy_fusion.disabled():
        acted = act_mul(want, "silu")
    assert torch.equal(fused, want)
    assert torch.equal(got, acted)
