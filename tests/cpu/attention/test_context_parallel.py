"""Attention of ranks that hold a part of the tokens each equals that of one rank. Ranks are
threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from quire.attention import context_parallel, paged
from quire.attention.base import AttentionMetadata
from quire.errors import ConfigError
from quire.kernels.formats.kv_cache import allocate_blocks

BLOCK, SIZE, HEADS = 4, 16, 2  # of a rank
ROWS = [(1, 33), (1, 1), (1, 0), (1, 70), (7, 7), (5, 41), (9, 90)]
"""Queries and context of each sequence."""


class Exchange:
    """A ContextExchange of threads."""

    def __init__(self, rank, shared):
        self.rank, self.ranks, self._shared = rank, len(shared.given), shared

    def _swap(self, x):
        self._shared.given[self.rank] = x
        self._shared.barrier.wait(20)
        found = list(self._shared.given)
        self._shared.barrier.wait(20)
        return found

    def gather_queries(self, x):
        return torch.cat(self._swap(x), 1)

    def scatter_parts(self, parts):
        cut = parts.view(self.ranks, -1, *parts.shape[1:])
        return torch.stack([each[self.rank] for each in self._swap(cut)])

    def gather_blocks(self, blocks):
        raw = torch.stack([each.view(torch.uint8) for each in self._swap(blocks.contiguous())])
        parts = raw.view(blocks.dtype)
        _, n, planes, heads, size, *rest = parts.shape
        in_order = parts.permute(1, 2, 3, 4, 0, *range(5, parts.dim()))
        return in_order.reshape(n, planes, heads, size * self.ranks, *rest)


def layer_of(**more):
    plain = {"scale": SIZE**-0.5, "window": None, "softcap": None, "sinks": None, "alibi": None,
             "position_bias": None, "spans": True, "k_scale": 1.0, "v_scale": 1.0,
             "head_scales": None, "group": 0, "place": 0}  # fmt: skip
    return SimpleNamespace(**(plain | more))


def metadata_of(block, tables, order, **more):
    """The step of ROWS, whose tables have blocks of so many tokens."""
    queries = torch.tensor([n for n, _ in ROWS])
    starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
    slots = []
    for (n, context), table in zip(ROWS, tables[order.long()]):
        at = torch.arange(context - n, context)
        slots.append(table[at // block] * block + at % block if context else torch.tensor([-1]))
    return AttentionMetadata(
        q_starts=starts,
        contexts=torch.tensor([c for _, c in ROWS], dtype=torch.int32),
        tables=(tables,),
        slots=(torch.cat(slots).long(),),
        max_query=9,
        max_context=90,
        rows=order,
        decodes=4,
        past=81,
        **more,
    )


def cache_of(blocks, block, code):
    if code == "token":
        codes, scales = allocate_blocks((blocks, 2, 1, block, SIZE), torch.int8, "cpu")
        return codes, [scales]
    dtype = {"": torch.float32, "fp8": torch.float8_e4m3fn}[code]
    return torch.zeros(blocks, 2, 1, block, SIZE).to(dtype), ()


CASES = {
    "plain": {},
    "window": {"window": 12},
    "soft cap, sinks": {"softcap": 3.0, "sinks": "random"},
    "fp8": {"code": "fp8", "k_scale": 0.1, "v_scale": 0.2},
    "scales of tokens": {"code": "token"},
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_ranks_attend_as_one_does(case, ranks):
    torch.manual_seed(1)
    more = dict(CASES[case])
    code = more.pop("code", "")
    heads, tokens, block = HEADS * ranks, sum(n for n, _ in ROWS), BLOCK * ranks
    q = torch.randn(tokens, heads, SIZE)
    sinks = torch.randn(heads) if "sinks" in more else None
    width = -(-90 // block) + 1
    blocks = len(ROWS) * width
    tables = torch.randperm(blocks).int().view(len(ROWS), width)
    order = torch.randperm(len(ROWS)).int()
    step = metadata_of(block, tables, order)
    old = [torch.randn(90, 1, SIZE) for _ in range(2)]  # of every sequence, before the step
    new = [torch.randn(tokens, 1, SIZE) for _ in range(2)]

    def fill(backend, heads, sinks):
        """Steps that cache what each sequence has before this one, then this one."""
        layer = layer_of(**(more | {"sinks": sinks}))
        for s, (n, context) in enumerate(ROWS):
            before = context - n
            if before > 0:
                at = torch.arange(before)
                row = tables[order[s].long()]
                slots = (row[at // block] * block + at % block).long()
                one = AttentionMetadata(
                    torch.tensor([0, before], dtype=torch.int32),
                    torch.tensor([before], dtype=torch.int32),
                    (row[None],),
                    (slots,),
                    before,
                    before,
                )
                queries = torch.zeros(before, heads, SIZE)
                backend.plan(one).run(queries, *(x[:before] for x in old), layer)
        return layer

    cache, scales = cache_of(blocks, block, code)
    whole = paged.Backend([cache], scales)
    want = whole.plan(step).run(q, *new, fill(whole, heads, sinks))
    shared = SimpleNamespace(given=[None] * ranks, barrier=threading.Barrier(ranks))

    def run(rank):
        own, own_scales = cache_of(blocks, BLOCK, code)
        backend = context_parallel.Backend(paged.Backend([own], own_scales), Exchange(rank, shared))
        mine = slice(rank * HEADS, (rank + 1) * HEADS)
        layer = fill(backend, HEADS, None if sinks is None else sinks[mine])
        return backend.plan(step).run(q[:, mine], *new, layer)

    with ThreadPoolExecutor(ranks) as pool:
        found = torch.cat(list(pool.map(run, range(ranks))), 1)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


def test_blocks_of_at_most_one_longest_sequence_are_gathered_at_a_time():
    cache = cache_of(4, BLOCK, "")[0]
    batch = metadata_of(2 * BLOCK, torch.zeros(7, 12, dtype=torch.int32), torch.arange(7).int())
    step = context_parallel.ContextStep(batch, SimpleNamespace(ranks=2, rank=0))
    runs = step.prompts(cache)  # contexts of 7, 41 and 90 tokens, in blocks of 8
    assert [run.places for run in runs] == [(1, 6), (12,)]
    assert [run.tokens for run in runs] == [slice(4, 16), slice(16, 25)]
    assert runs[0].tables.shape == (2, 12)


def test_a_bias_by_distance_is_refused():
    backend = context_parallel.Backend(paged.Backend([cache_of(4, BLOCK, "")[0]]), None)
    step = backend.plan(
        metadata_of(4, torch.zeros(7, 30, dtype=torch.int32), torch.arange(7).int())
    )
    with pytest.raises(ConfigError, match="bias by distance"):
        step.run(torch.zeros(25, 2, SIZE), None, None, layer_of(alibi=torch.ones(2)))
