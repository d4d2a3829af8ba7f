"""Rows of data-parallel ranks, gathered for the ranks with their experts, and sums that come back."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from quire.distributed.collectives import _create_group
from quire.distributed.dp_exchange import DataParallelExchange
from quire.kernels.row_exchange import sum_rows

CASES = [(2, 1, (3, 0)), (2, 2, (0, 5)), (3, 1, (1, 0, 4)), (2, 1, (2, 2))]


def ranks_of(dp, tp, main):
    """Return the results of main(exchange, dp rank, tp rank, group of all) in threads."""
    store, cpu = dist.HashStore(), torch.device("cpu")

    def join(name, rank, size):
        store_of = dist.PrefixStore(name, store)
        return _create_group(store_of, rank, size, cpu, "127.0.0.1", timedelta(seconds=60))

    def run(rank):
        d, t = divmod(rank, tp)
        groups = join(f"dp{t}", d, dp), join("ep", rank, dp * tp)
        return main(DataParallelExchange(*groups, lambda name: None), d, rank, groups[1])

    with ThreadPoolExecutor(dp * tp) as pool:
        return [one.result() for one in [pool.submit(run, rank) for rank in range(dp * tp)]]


@pytest.mark.parametrize(("dp", "tp", "counts"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_in_rank_order_and_each_sum_to_its_rank(dp, tp, counts, dtype):
    torch.manual_seed(0)
    xs = [torch.randn(n, 6).to(dtype) for n in counts]
    ids = [torch.randint(0, 9, (n, 3), dtype=torch.int32) for n in counts]
    weights = [torch.randn(n, 3) for n in counts]
    partials = [torch.randn(sum(counts), 6).to(dtype) for _ in range(dp * tp)]

    def main(exchange, d, rank, group):
        exchange.begin_step(counts)
        assert exchange.tokens == counts[d]
        rows = exchange.gather(xs[d], ids[d], weights[d])
        assert exchange.is_open
        own = exchange.combine(partials[rank])
        assert (exchange.done, exchange.is_open) == (1, False)
        return rows, own

    total = partials[0].float()
    for one in partials[1:]:
        total = total + one
    sums = total.to(dtype).split(list(counts))
    for rank, (rows, own) in enumerate(ranks_of(dp, tp, main)):
        for found, want in zip(rows, (xs, ids, weights), strict=True):
            assert torch.equal(found, torch.cat(want))
        assert torch.equal(own, sums[rank // tp])


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("in_graph", [False, True])
def test_equal_rows_have_padding_that_chooses_no_expert(dp, tp, in_graph):
    """Rows that a rank lacks; in a graph those without a slot."""
    torch.manual_seed(0)
    size, held = 3, (2, 0)
    own = [size if in_graph else count for count in held]
    xs = [torch.randn(n, 6) for n in own]
    ids = [torch.randint(0, 9, (n, 3), dtype=torch.int32) for n in own]
    partials = [torch.randn(dp * size, 6) for _ in range(dp * tp)]

    def main(exchange, d, rank, group):
        exchange.begin_step([size] * dp)
        slots = torch.tensor([4 if i < held[d] else -1 for i in range(size)], dtype=torch.int32)
        with exchange.equal_rows(slots) if in_graph else nullcontext():
            rows = exchange.gather(xs[d], ids[d], torch.ones(own[d], 3))
            return *rows, exchange.combine(partials[rank])

    total = sum(partials[1:], partials[0]).split(size)
    for rank, (x, chosen, weights, mine) in enumerate(ranks_of(dp, tp, main)):
        assert len(x) == len(chosen) == len(weights) == dp * size
        for d, count in enumerate(held):
            at = slice(d * size, d * size + count)
            assert torch.equal(x[at], xs[d][:count])
            assert torch.equal(chosen[at], ids[d][:count])
            assert (chosen[at.stop : (d + 1) * size] == -1).all()
        d = rank // tp
        torch.testing.assert_close(mine, total[d][: own[d]])


def test_a_sum_does_not_depend_on_the_rows_beside_it():
    torch.manual_seed(0)
    partials = [torch.randn(7, 6).to(torch.bfloat16) for _ in range(3)]

    def main(exchange, d, rank, group):
        whole = sum_rows(partials[rank], (3, 2, 2), group)
        alone = [sum_rows(partials[rank][at : at + 1], (1, 0, 0), group) for at in (0, 1, 2)]
        return whole, alone

    found = ranks_of(3, 1, main)
    assert torch.equal(torch.cat(found[0][1]), found[0][0])
