"""What the MoE kernels promise beyond agreeing with their references case by case."""

import pytest
import torch

from quire.kernels.framework import lazy_fusion
from quire.kernels.framework.op import OPS
from quire.kernels.moe_experts import ExpertActivation
from quire.kernels.moe_router import RoutingMethod
from tests import tiers
from tests.fused import call

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("pairs", [1, 3, 200])
def test_pairs_are_sorted_by_expert_and_stably(pairs):
    from quire.kernels.gpu.moe.moe_sort import sort_by_expert

    torch.manual_seed(pairs)
    ids = torch.randint(0, 7, (pairs, 1), dtype=torch.int32)
    ids[ids == 4] = 5  # nobody chose it
    order, starts = sort_by_expert(ids, 7)
    want = ids.flatten().sort(stable=True)
    assert order.tolist() == want.indices.tolist()
    assert starts.tolist() == [int((want.values < i).sum()) for i in range(8)]


def test_many_chunks_of_pairs_are_sorted_as_one(monkeypatch):
    from quire.kernels.gpu.moe import moe_sort

    monkeypatch.setattr(moe_sort, "CHUNK", 128)
    ids = torch.randint(0, 5, (1000, 1), dtype=torch.int32)
    order, _ = moe_sort.sort_by_expert(ids, 5)
    assert order.tolist() == ids.flatten().sort(stable=True).indices.tolist()


def test_very_many_pairs_are_sorted_in_any_order_within_an_expert(monkeypatch):
    from quire.kernels.gpu.moe import moe_sort

    monkeypatch.setattr(moe_sort, "MAX_ONE_LAUNCH", 0)
    monkeypatch.setattr(moe_sort, "NUM_SHARDS", 4)
    ids = torch.randint(0, 5, (1500, 2), dtype=torch.int32)
    ids[ids == 2] = 3  # nobody chose it
    order, starts = moe_sort.sort_by_expert(ids, 5)
    assert sorted(order.tolist()) == list(range(3000))
    assert torch.equal(ids.flatten()[order.long()], ids.flatten().sort().values)
    assert starts.tolist() == [int((ids < i).sum()) for i in range(6)]


@pytest.mark.parametrize("sizes", [(1, 1, 16), (9, 4, 16), (100, 3, 16), (64, 1, 16), (5, 90, 32)])
def test_there_are_never_more_tiles_than_the_grid_has(sizes):
    from quire.kernels.gpu.moe.grouped_gemm import GroupedGemmTile, max_row_tiles

    pairs, experts, m = sizes
    bound = max_row_tiles(pairs, experts, GroupedGemmTile(m, 16, 16, 1, 4, 1))
    for _ in range(50):
        counts = torch.randint(0, experts, (pairs,)).bincount(minlength=experts)
        assert int((-(-counts // m)).sum()) <= bound


def bank(t, e=64, f=48, x=6, k=3):
    ids = torch.rand(t, x).argsort(-1)[:, :k].int().contiguous()
    return (
        torch.randn(t, e),
        ids,
        torch.rand(t, k),
        torch.randn(x, 2 * f, e) / e**0.5,
        torch.randn(x, e, f) / f**0.5,
        ExpertActivation(),
        None,
        None,
    )


def test_few_rows_and_sorted_rows_are_equal():
    from quire.kernels.gpu.moe.moe_experts import experts_sorted
    from quire.kernels.gpu.moe.moe_small_m import experts_small_m

    torch.manual_seed(0)
    args = bank(5, e=32, f=24)
    one, other = torch.empty_like(args[0]), torch.empty_like(args[0])
    experts_small_m(one, *args)
    experts_sorted(other, *args)
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_what_is_fetched_ahead_changes_nothing():
    from quire.kernels.gpu.moe.moe_small_m import PLAN_FEW_ROWS, experts_small_m

    torch.manual_seed(0)
    args = bank(2, f=tiers.amount(24, 600))
    outs = []
    for ahead in (0, 512, 1 << 20):
        outs.append(torch.empty_like(args[0]))
        experts_small_m(outs[-1], *args, cut=PLAN_FEW_ROWS._replace(prefetch=ahead))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("residual", [True, False])
def test_the_norm_before_a_router_is_part_of_it_for_one_row(residual, monkeypatch):
    from quire.kernels.gpu.moe import moe_router

    torch.manual_seed(0)
    routing = RoutingMethod(3, renormalise=True)
    x, weight = torch.randn(1, 96).bfloat16(), torch.randn(10, 96).bfloat16()
    norm = (torch.randn(96).bfloat16(), 1e-5, torch.randn(1, 96).bfloat16() if residual else None)
    want_y, want_r = OPS["rms_norm"].reference(x, *norm)
    want_ids, want = OPS["moe_router"].reference(want_y, weight, routing)
    calls, real = [], moe_router.launch_normed
    monkeypatch.setattr(moe_router, "launch_normed", lambda *a: calls.append(1) or real(*a))
    y, r = call("rms_norm", x, *norm)
    ids, weights = call("moe_router", y, weight, routing)
    lazy_fusion.flush()
    assert calls == [1]
    assert torch.equal(ids, want_ids)
    for got, wanted in ((y, want_y), (r, want_r), (weights, want)):
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


def test_a_router_of_another_row_waits_for_no_norm():
    torch.manual_seed(0)
    x, other = torch.randn(1, 32), torch.randn(1, 32)
    weight, routing = torch.randn(6, 32), RoutingMethod(2)
    y, _ = call("rms_norm", x, torch.ones(32), 1e-5)
    ids, _ = call("moe_router", other, weight, routing)
    lazy_fusion.flush()
    torch.testing.assert_close(y, OPS["rms_norm"].reference(x, torch.ones(32), 1e-5)[0])
    assert torch.equal(ids, OPS["moe_router"].reference(other, weight, routing)[0])


def test_the_lower_expert_wins_a_tie():
    x, weight = torch.ones(20, 32), torch.zeros(8, 32)
    weight[3] = weight[5] = 1.0
    for rows in (1, 20):
        ids, weights = call("moe_router", x[:rows], weight, RoutingMethod(3, renormalise=True))
        lazy_fusion.flush()
        assert ids.tolist() == [[3, 5, 0]] * rows
        assert (weights[:, 0] == weights[:, 1]).all()
