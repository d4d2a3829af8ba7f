"""Routing and experts at the sizes of real models, against fp32 arithmetic on the same values."""

import pytest
import torch

from quire.kernels.framework import lazy_fusion
from quire.kernels.framework.op import OPS
from quire.kernels.moe_experts import ExpertActivation, moe_experts
from quire.kernels.moe_router import RoutingMethod, moe_router
from quire.kernels.rms_norm import rms_norm

SIZES = {  # experts, top k, hidden, width
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen1.5-moe": (60, 4, 2048, 1408),
    "mixtral": (8, 2, 4096, 14336),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "deepseek-v2-lite": (64, 6, 2048, 1408),
}
ROWS = (1, 3, 8, 9, 33, 130, 1024, 5000)


def experts_of(name):
    experts, top, size, width = SIZES[name]
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    case = {
        "gate_up": torch.randn(experts, 2 * width, size, **bf16).mul_(size**-0.5),
        "down": torch.randn(experts, size, width, **bf16).mul_(width**-0.5),
        "gate": ExpertActivation(),
    }
    if name.startswith("gpt-oss"):
        case["gate"] = ExpertActivation("clamped", limit=1.5)
        case["gate_up_bias"] = torch.randn(experts, 2 * width, **bf16)
        case["down_bias"] = torch.randn(experts, size, **bf16)
    return case, top


def chosen(rows, experts, top, skew):
    """Routing with some experts far more popular than others, some not chosen at all."""
    scores = torch.randn(rows, experts, device="cuda") + skew * torch.randn(experts, device="cuda")
    weights, ids = scores.softmax(-1).topk(top, -1)
    return ids.int(), weights


def wide(case):
    return {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in case.items()}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_experts_agree_with_fp32_at_real_sizes(name):
    torch.manual_seed(0)
    case, top = experts_of(name)
    exact = wide(case)
    for rows in ROWS:
        for skew in (0.0, 3.0):
            x = torch.randn(rows, case["down"].shape[1], device="cuda", dtype=torch.bfloat16)
            ids, weights = chosen(rows, len(case["down"]), top, skew)
            got = moe_experts(x, ids, weights, **case).float()
            want = OPS["moe_experts"].reference(x.float(), ids, weights, **exact)
            error = ((got - want).norm() / want.norm()).item()
            assert error < 6e-3, f"{rows} rows, skew {skew}: {error}"
            again = moe_experts(x, ids, weights, **case).float()
            assert torch.equal(got, again), "not deterministic"
            ids = ids.masked_fill(torch.rand(ids.shape, device="cuda") < 0.5, -1)
            got = moe_experts(x, ids, weights, **case, absent=True).float()
            want = OPS["moe_experts"].reference(x.float(), ids, weights, **exact)
            error = (got - want).norm().item()
            assert error < 6e-3 * want.norm().item() + 1e-3, f"{rows} rows, half are absent"


ROUTES = {
    "qwen3-30b-a3b": (128, 2048, RoutingMethod(8, renormalise=True)),
    "qwen1.5-moe": (60, 2048, RoutingMethod(4)),
    "mixtral": (8, 4096, RoutingMethod(2, renormalise=True)),
    "gpt-oss-120b": (128, 2880, RoutingMethod(4, renormalise=True)),
    "deepseek-v2": (160, 5120, RoutingMethod(6, scale=16.0, groups=8, top_groups=3)),
    "deepseek-v3": (256, 7168, RoutingMethod(8, "sigmoid", True, 2.5, 8, 4, "top2")),
}


@pytest.mark.parametrize("name", ROUTES)
def test_routers_choose_as_in_float64(name):
    torch.manual_seed(0)
    experts, size, routing = ROUTES[name]
    weight = (torch.randn(experts, size, device="cuda") * size**-0.5).bfloat16()
    bias = torch.randn(experts, device="cuda").bfloat16() if "gpt" in name else None
    correction = torch.randn(experts, device="cuda") if name == "deepseek-v3" else None
    for rows in (1, 2, 7, 16, 17, 100, 5000):
        x = torch.randn(rows, size, device="cuda").bfloat16()
        ids, weights = moe_router(x, weight, routing, bias, correction)
        want_ids, want = OPS["moe_router"].reference(x, weight, routing, bias, correction)
        same = (ids == want_ids).all(-1)
        assert same.float().mean() > 0.995, f"{rows} rows"  # near ties may fall otherwise
        torch.testing.assert_close(weights[same], want[same], atol=1e-4, rtol=1e-3)


def test_a_captured_graph_follows_its_inputs():
    torch.manual_seed(0)
    case, top = experts_of("qwen3-30b-a3b")
    router = (torch.randn(128, 2048, device="cuda") * 2048**-0.5).bfloat16()
    routing = RoutingMethod(top, renormalise=True)
    for rows in (1, 8, 64, 256):
        x = torch.randn(rows, 2048, device="cuda").bfloat16()
        moe_experts(x, *moe_router(x, router, routing), **case)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = moe_experts(x, *moe_router(x, router, routing), **case)
        for _ in range(3):
            x.copy_(torch.randn(rows, 2048, device="cuda"))
            graph.replay()
            want = moe_experts(x, *moe_router(x, router, routing), **case)
            assert torch.equal(y, want)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
def test_a_router_that_normalises_its_row_is_norm_and_router(name):
    torch.manual_seed(0)
    experts, size, routing = ROUTES[name]
    weight = (torch.randn(experts, size, device="cuda") * size**-0.5).bfloat16()
    scale = 1 + torch.randn(size, device="cuda").bfloat16() / 8
    for _ in range(50):  # a race would show now and then
        x, residual = torch.randn(2, 1, size, device="cuda").bfloat16()
        with lazy_fusion.disabled():
            want_y, want_r = rms_norm(x, scale, 1e-6, residual)
            want_ids, want = moe_router(want_y, weight, routing)
        y, r = rms_norm(x, scale, 1e-6, residual)
        ids, weights = moe_router(y, weight, routing)
        lazy_fusion.flush()
        assert torch.equal(r, want_r)
        torch.testing.assert_close(y, want_y, atol=1e-2, rtol=1e-2)
        assert (ids == want_ids).float().mean() > 0.7  # a rounding of y may turn near ties
        torch.testing.assert_close(weights, want, atol=1e-2, rtol=5e-2)


HOPPER = {  # tokens, experts, top k, hidden, width, dtype, skew
    "qwen3-30b-a3b": (4096, 128, 8, 2048, 768, torch.bfloat16, 3.0),
    "gpt-oss-20b": (5000, 32, 4, 2880, 2880, torch.bfloat16, 1.0),
    "odd": (3000, 16, 4, 320, 576, torch.bfloat16, 0.0),
    "half": (700, 8, 2, 256, 256, torch.float16, 0.0),
}


@pytest.mark.parametrize("name", HOPPER)
def test_warp_specialised_products_are_the_plain_ones(name):
    from quire.kernels.gpu.moe import grouped_gemm as plain
    from quire.kernels.gpu.moe import grouped_gemm_hopper as hopper
    from quire.kernels.gpu.moe.moe_sort import sort_by_expert

    tokens, experts, top, size, width, dtype, skew = HOPPER[name]
    torch.manual_seed(0)
    as_made = {"device": "cuda", "dtype": dtype}
    first = torch.randn(experts, 2 * width, size, **as_made) * size**-0.5
    second = torch.randn(experts, size, width, **as_made) * width**-0.5
    gate, biases = ExpertActivation(), (None, None)
    if name != "qwen3-30b-a3b":
        gate = ExpertActivation("clamped", limit=1.5)
        biases = tuple(torch.randn(experts, n, **as_made) for n in (2 * width, size))
    x = torch.randn(tokens, size, **as_made)
    if not hopper.supports(x, second, gate):
        pytest.skip("needs a Hopper GPU")
    ids, _ = chosen(tokens, experts, top, skew)
    order, starts = sort_by_expert(ids, experts)
    tiles, tile = (
        hopper.build_tile_table(starts, tokens * top),
        plain.GroupedGemmTile(64, 64, 64, 8, 4, 3),
    )
    want_h, want = x.new_empty(tokens * top, width), x.new_empty(tokens * top, size)
    plain.gate_up(want_h, x, order, starts, first, biases[0], gate, top, tile)
    plain.down(want, want_h, order, starts, second, biases[1], tile)
    for _ in range(5):
        h, y = torch.full_like(want_h, torch.nan), torch.full_like(want, torch.nan)
        hopper.gate_up(h, x, order, tiles, first, biases[0], gate, top)
        hopper.down(y, want_h, order, tiles, second, biases[1])
        for got, wanted in ((h, want_h), (y, want)):
            assert ((got - wanted).float().norm() / wanted.float().norm()).item() < 4e-3
