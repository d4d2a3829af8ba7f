import torch

from quire.attention.base import AttentionMetadata
from quire.attention.paged import Backend
from quire.kernels.paged_attention import paged_attention


class Layer:
    scale, window, softcap = 0.2, 7, 3.0
    sinks, alibi, position_bias, k_scale, v_scale = None, None, None, 1.0, 1.0
    head_scales = None
    spans = True

    def __init__(self, group, place):
        self.group, self.place = group, place


def batch_of(starts, contexts, tables, slots):
    return AttentionMetadata(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
        tuple(torch.tensor(t, dtype=torch.int32) for t in tables),
        tuple(torch.tensor(s) for s in slots),
        max_query=2,
        max_context=6,
    )


def test_a_layer_writes_and_reads_its_own_place_by_its_groups_tables():
    torch.manual_seed(0)
    cache = [torch.randn(5, 2, 1, 4, 16) for _ in range(2)]
    before = [c.clone() for c in cache]
    tables = [[[0, 1], [2, -1]], [[3, 4], [1, -1]]]
    slots = [[4, 5, 8], [16, 17, 4]]
    batch = batch_of([0, 2, 3], [6, 1], tables, slots)
    q, k, v = torch.randn(3, 2, 16), torch.randn(3, 1, 16), torch.randn(3, 1, 16)
    got = Backend(cache).plan(batch).run(q, k, v, Layer(group=1, place=1))
    assert torch.equal(cache[0], before[0])
    assert torch.equal(cache[1][4, 0, 0, :2], k[:2, 0])
    assert torch.equal(cache[1][1, 1, 0, 0], v[2, 0])
    want = paged_attention(
        q, cache[1], batch.tables[1], batch.q_starts, batch.contexts, 0.2, 7, 3.0
    )
    assert torch.equal(got, want)


def test_the_batch_is_read_when_a_layer_runs_not_when_it_is_planned():
    torch.manual_seed(0)
    cache = [torch.randn(5, 2, 1, 4, 16)]
    batch = batch_of([0, 1], [3], [[[0, 1]]], [[2]])
    step = Backend(cache).plan(batch)
    q, k, v = torch.randn(1, 2, 16), torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    first = step.run(q, k, v, Layer(0, 0))
    batch.contexts.fill_(4)
    batch.slots[0].fill_(3)
    assert not torch.equal(step.run(q, k, v, Layer(0, 0)), first)
