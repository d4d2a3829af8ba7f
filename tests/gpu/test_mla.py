"""Latent attention at the shapes of DeepSeek-V2-Lite (16 heads) and V3 (128), against float32."""

import itertools
import math

import pytest
import torch

from quire.kernels.framework.op import OPS
from quire.kernels.mla_attention import mla_attention
from quire.kernels.mla_write import mla_write

LATENT, ROTATED, BLOCK = 512, 64, 16
PLAIN, VALUE = 128, 128
CLOSE = 8e-3  # of bfloat16 operands, relative


def step_of(rows, heads, dtype=torch.bfloat16, spare=3):
    """Arguments of mla_attention. rows: (queries, context), those of one query first."""
    device = torch.device("cuda")
    queries = [q for q, _ in rows]
    decodes = next((i for i, q in enumerate(queries) if q != 1), len(queries))
    held = [-(-c // BLOCK) for _, c in rows]
    pool = sum(held) + spare
    free, width = torch.randperm(pool).int(), max(held) + 1
    tables = torch.full((len(rows) + 2, width), -1, dtype=torch.int32)
    places = torch.randperm(len(rows) + 2)[: len(rows)].int()
    cache = torch.full((pool, 1, 1, BLOCK, LATENT + ROTATED), float("nan"))
    own, at = [], 0  # what no token has written yet may hold anything
    for place, used, (q, c) in zip(places.tolist(), held, rows, strict=True):
        tables[place, :used] = free[at : at + used]
        latents, spots = torch.randn(c, LATENT + ROTATED), torch.arange(c)
        cache[tables[place][spots // BLOCK].long(), 0, 0, spots % BLOCK] = latents
        own.append(latents[c - q :] if c else torch.zeros(q, LATENT + ROTATED))
        at += used
    both = torch.randn(sum(queries), heads, PLAIN + ROTATED, device=device).to(dtype)
    up = torch.randn(heads, PLAIN + VALUE, LATENT, device=device) / LATENT**0.5
    return {
        "q": both[..., :PLAIN],
        "q_rope": both[..., PLAIN:],
        "latents": torch.cat(own).to(device, dtype),
        "up": up.to(dtype),
        "cache": cache.to(device, dtype),
        "tables": tables.to(device),
        "q_starts": torch.tensor([0, *queries]).cumsum(0).int().to(device),
        "contexts": torch.tensor([c for _, c in rows], dtype=torch.int32, device=device),
        "scale": (PLAIN + ROTATED) ** -0.5,
        "rows": places.to(device),
        "decodes": decodes,
        "past": max((c - q for q, c in rows[decodes:]), default=0),
    }


def exact(case):
    """The same in float32."""
    wide = {k: case[k].float() for k in ("q", "q_rope", "latents", "up", "cache")}
    return OPS["mla_attention"].reference(**{**case, **wide})


def error(got, want):
    return ((got.float() - want).norm() / want.norm()).item()


DECODES = [(1, c) for c in (1, 15, 16, 17, 127, 128, 129, 1000, 4096, 4097)]
FRESH = [(1, 700), (1, 33), (300, 300), (5, 5), (128, 128), (129, 129), (1000, 1000), (2, 2)]
CHUNKS = [(1, 700), (300, 300), (5, 1029), (64, 2000), (130, 131), (700, 900), (1, 1)]
LONG = [(1, 99), (900, 6000), (300, 301)]
FEW = [(1, 50), (3, 90), (17, 17), (60, 2000), (2, 3000)]


@pytest.mark.parametrize("heads", [16, 128, 20])
@pytest.mark.parametrize("rows", [DECODES, [(1, 9000)], [(1, 0), (1, 300), (1, 0)]])
def test_decoding_agrees_with_float32(heads, rows):
    torch.manual_seed(1)
    case = step_of(rows, heads)
    got = mla_attention(**case)
    assert error(got, exact(case)) < CLOSE
    for s, (_, context) in enumerate(rows):
        assert context or (got[s] == 0).all()


@pytest.mark.parametrize("heads", [16, 128, 20, 2])
@pytest.mark.parametrize("rows", [FRESH, sorted(CHUNKS), FEW, LONG, FRESH[2:], [(1500, 1500)]])
def test_prompts_and_chunks_mixed_with_decoding_agree_with_float32(heads, rows):
    torch.manual_seed(2)
    case = step_of(rows, heads)
    got, want = mla_attention(**case), exact(case)
    assert error(got, want) < CLOSE
    starts = case["q_starts"].tolist()
    for start, stop in itertools.pairwise(starts):
        assert error(got[start:stop], want[start:stop]) < 2 * CLOSE, (start, stop)


@pytest.mark.parametrize("rows", [FRESH, LONG])
def test_an_unknown_or_overestimated_past_gives_the_same(rows):
    torch.manual_seed(7)
    case = step_of(rows, 16)
    want = exact(case)
    for past in (None, case["past"] + 1000):
        assert error(mla_attention(**{**case, "past": past}), want) < CLOSE


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("splits", [1, 2, 7, 64])
def test_any_number_of_splits_gives_the_same(heads, splits):
    from quire.kernels.gpu.mla.mla_attention import absorb_query, up_project_output
    from quire.kernels.gpu.mla.mla_decode import decode

    torch.manual_seed(3)
    case = step_of(DECODES, heads)
    scale = case["scale"] * math.log2(math.e)
    mixed = absorb_query(case["q"], case["up"][:, :PLAIN])
    tensors = (case[k] for k in ("q_rope", "cache", "tables", "contexts"))
    decode(mixed, mixed, *tensors, scale, case["rows"], len(DECODES), splits=splits)
    out = torch.full((len(DECODES), heads * VALUE), float("nan"), device="cuda").bfloat16()
    up_project_output(out, mixed, case["up"][:, PLAIN:])
    assert error(out, exact(case)) < CLOSE


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("rows", [[(1, 300), (1, 5), (40, 90)], [(1, 9), (300, 300), (3, 70)]])
def test_float32_stays_float32(heads, rows):
    torch.manual_seed(4)
    case = step_of(rows, heads, torch.float32)
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
        assert (out.float() - want).norm() <= CLOSE * want.norm()
        for s, context in enumerate(contexts):
            assert context or (out[s] == 0).all()


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("tokens", [1, 3, 64, 1000])
@pytest.mark.parametrize("interleaved", [True, False])
def test_writing_agrees_with_the_reference(heads, tokens, interleaved):
    torch.manual_seed(6)
    device, dtype = torch.device("cuda"), torch.bfloat16
    q = torch.randn(tokens, heads, PLAIN + ROTATED, device=device).to(dtype)
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
        "interleaved": interleaved,
    }
    empty = torch.full((100, 1, 1, BLOCK, LATENT + ROTATED), 7.0, device=device).to(dtype)
    got_cache, want_cache = empty.clone(), empty.clone()
    got = mla_write(**shared, cache=got_cache)
    want = OPS["mla_write"].reference(**shared, cache=want_cache)
    for g, w in zip((*got, got_cache), (*want, want_cache), strict=True):
        torch.testing.assert_close(g, w, atol=2e-2, rtol=2e-2)
