"""Latent attention at the shapes of DeepSeek-V2-Lite (16 heads) and V3 (128), against float32."""

import pytest
import torch

from quire.kernels.mla_attention import mla_attention
from quire.kernels.mla_queries import mla_queries
from quire.kernels.mla_values import mla_values
from quire.kernels.mla_write import mla_write

LATENT, ROTATED, BLOCK = 512, 64, 16
PLAIN, VALUE = 128, 128


def step_of(rows, heads, dtype=torch.bfloat16, spare=3):
    """Arguments of mla_attention. rows: (queries, context), those of one query first."""
    device = torch.device("cuda")
    queries = [q for q, _ in rows]
    held = [-(-c // BLOCK) for _, c in rows]
    pool = sum(held) + spare
    free, width = torch.randperm(pool).int(), max(held) + 1
    tables = torch.full((len(rows) + 2, width), -1, dtype=torch.int32)
    places = torch.randperm(len(rows) + 2)[: len(rows)].int()
    at = 0
    for place, used in zip(places.tolist(), held, strict=True):
        tables[place, :used] = free[at : at + used]
        at += used
    cache = torch.randn(pool, 1, 1, BLOCK, LATENT + ROTATED, device=device).to(dtype)
    for place, (_, c) in zip(places.tolist(), rows, strict=True):
        if c % BLOCK:  # what no token has written yet may hold anything
            cache[tables[place, c // BLOCK], :, :, c % BLOCK :] = float("nan")
    cache[free[at:].long()] = float("nan")
    q = torch.randn(sum(queries), heads, LATENT + ROTATED, device=device).to(dtype)
    return {
        "q": q[..., :LATENT].contiguous(),
        "q_rope": q[..., LATENT:],
        "cache": cache,
        "tables": tables.to(device),
        "q_starts": torch.tensor([0, *queries]).cumsum(0).int().to(device),
        "contexts": torch.tensor([c for _, c in rows], dtype=torch.int32, device=device),
        "scale": 192**-0.5,
        "rows": places.to(device),
        "decodes": next((i for i, q in enumerate(queries) if q != 1), len(queries)),
    }


def exact(case):
    """The same in float32."""
    wide = {k: case[k].float() for k in ("q", "q_rope", "cache")}
    from quire.kernels.op import OPS

    return OPS["mla_attention"].reference(**{**case, **wide})


def error(got, want):
    return ((got.float() - want).norm() / want.norm()).item()


DECODES = [(1, c) for c in (1, 15, 16, 17, 127, 128, 129, 1000, 4096, 4097)]


@pytest.mark.parametrize("heads", [16, 128, 20])
@pytest.mark.parametrize("rows", [DECODES, [(1, 9000)], [(1, 0), (1, 300), (1, 0)]])
def test_decoding_agrees_with_float32(heads, rows):
    torch.manual_seed(1)
    case = step_of(rows, heads)
    got = mla_attention(**case)
    assert error(got, exact(case)) < 5e-3
    for s, (_, context) in enumerate(rows):
        if context == 0:
            assert (got[s] == 0).all()


@pytest.mark.parametrize("heads", [16, 128, 20])
def test_prompts_and_chunks_mixed_with_decoding_agree_with_float32(heads):
    torch.manual_seed(2)
    rows = [(1, 700), (1, 33), (300, 300), (1, 1), (5, 1029), (64, 2000), (130, 131)]
    case = step_of(rows, heads)
    assert error(mla_attention(**case), exact(case)) < 5e-3


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("splits", [1, 2, 7, 64])
def test_any_number_of_splits_gives_the_same(heads, splits):
    from quire.kernels.gpu import mla_attention as gpu

    torch.manual_seed(3)
    case = step_of(DECODES, heads)
    want = exact(case)
    scale = case["scale"] * 1.4426950408889634
    out = torch.full_like(case["q"], float("nan"))
    tensors = (case[k] for k in ("q", "q_rope", "cache", "tables", "contexts"))
    gpu.decode(out, *tensors, scale, case["rows"], len(DECODES), splits=splits)
    assert error(out, want) < 5e-3


@pytest.mark.parametrize("heads", [16, 128])
def test_float32_stays_float32(heads):
    torch.manual_seed(4)
    case = step_of([(1, 300), (1, 5), (40, 90)], heads, torch.float32)
    assert error(mla_attention(**case), exact(case)) < 1e-5


@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_step_follows_its_inputs(heads):
    """Replayed with other contexts, padding rows among them: nothing of the capture's stays."""
    torch.manual_seed(5)
    rows = [(1, c) for c in (4000, 100, 900, 37)]
    case = step_of(rows, heads)
    mla_attention(**case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla_attention(**case)
    for contexts in ([4000, 100, 900, 37], [3, 0, 512, 0], [0, 0, 0, 0], [2048, 99, 1, 36]):
        case["contexts"].copy_(torch.tensor(contexts, dtype=torch.int32))
        case["q"].copy_(torch.randn_like(case["q"]))
        out.fill_(float("nan"))
        graph.replay()
        want = exact(case)
        assert (out.float() - want).norm() <= 5e-3 * want.norm()
        for s, context in enumerate(contexts):
            assert context or (out[s] == 0).all()


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("tokens", [1, 3, 64, 1000])
def test_projections_and_writing_agree_with_float32(heads, tokens):
    torch.manual_seed(6)
    device, dtype = torch.device("cuda"), torch.bfloat16
    up = torch.randn(heads, PLAIN + VALUE, LATENT, device=device).to(dtype) / 16
    q = torch.randn(tokens, heads, PLAIN + ROTATED, device=device).to(dtype)
    got = mla_queries(q[..., :PLAIN], up[:, :PLAIN])
    want = torch.einsum("thp,hpl->thl", q[..., :PLAIN].float(), up[:, :PLAIN].float())
    assert got.is_contiguous()
    assert error(got, want) < 5e-3
    mixed = torch.randn(tokens, heads, LATENT, device=device).to(dtype)
    want = torch.einsum("thl,hvl->thv", mixed.float(), up[:, PLAIN:].float()).flatten(1)
    assert error(mla_values(mixed, up[:, PLAIN:]), want) < 5e-3
    check_writing(q, tokens, dtype)


def check_writing(q, tokens, dtype):
    from quire.kernels.op import OPS

    device = q.device
    kv = torch.randn(tokens, 1536 + LATENT + ROTATED, device=device).to(dtype)[:, 1536:]
    angles = torch.outer(torch.arange(5000.0), 0.8 ** torch.arange(ROTATED // 2))
    slots = torch.randperm(100 * BLOCK, device=device)[:tokens].contiguous()
    slots[tokens // 2] = -1
    shared = {
        "q": q[..., PLAIN:],
        "kv": kv,
        "weight": torch.randn(LATENT, device=device).to(dtype),
        "eps": 1e-6,
        "positions": torch.randint(0, 5000, (tokens,), device=device, dtype=torch.int32),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], -1).to(device),
        "slots": slots,
    }
    empty = torch.full((100, 1, 1, BLOCK, LATENT + ROTATED), 7.0, device=device).to(dtype)
    got_cache, want_cache = empty.clone(), empty.clone()
    got = mla_write(**shared, cache=got_cache)
    want = OPS["mla_write"].reference(**shared, cache=want_cache)
    for g, w in zip((*got, got_cache), (*want, want_cache), strict=True):
        torch.testing.assert_close(g, w, atol=2e-2, rtol=2e-2)
