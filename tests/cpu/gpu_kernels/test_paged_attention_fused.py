"""Decoding from the raw qkv product in one kernel, against the ops it replaces."""

import pytest
import torch

from quire.kernels.framework import lazy_fusion
from quire.kernels.kv_write import kv_write
from quire.kernels.paged_attention import _case, paged_attention
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import rope
from tests import tiers
from tests.fused import call
from tests.op_cases import copied

body = pytest.importorskip("quire.kernels.gpu.attention.paged_attention_fused", reason="no triton")
from quire.kernels.gpu.attention.norm_rope_write import QKNorm  # noqa: E402
from quire.kernels.gpu.attention.split_plan import AttentionExtras  # noqa: E402

pytestmark = pytest.mark.sampled(2)


def one_by_one(q, k, v, positions, table, interleaved, norms, slots, case, scales):
    if norms:
        q, k = (
            rms_norm(x, n.weight, n.eps, offset=n.offset)[0]
            for x, n in zip((q, k), norms, strict=True)
        )
    q, k = rope(q, k, positions, table, interleaved)
    kv_write(k, v, case["cache"], slots, *scales)
    given = {n: x for n, x in case.items() if n not in ("q", "scales", "k_scale", "v_scale")}
    own = case.get("scales")
    return paged_attention(q, **given, k_scale=scales[0], v_scale=scales[1], scales=own)


KINDS = [
    (True, False, None, "rows", 32),
    (False, True, None, "sinks", 32),
    (True, True, 40, "rows sinks", 32),
    (True, False, None, "rows fp8", 32),
    (True, False, None, "", 12),
    (False, True, 40, "int8_token", 12),
    (False, False, None, "", 16),
    (True, True, None, "", 12),
    (True, False, None, "rows fp8_token", 32),
    (True, False, None, "int8_head sinks", 32),
]
DTYPES = torch.float32, torch.bfloat16
EVERYDAY = [(DTYPES[1], *KINDS[1]), (DTYPES[0], *KINDS[2]), (DTYPES[1], *KINDS[3])]
EVERYDAY += [(DTYPES[0], *KINDS[4]), (DTYPES[0], *KINDS[5])]


@pytest.mark.parametrize(
    ("dtype", "normed", "interleaved", "window", "features", "dims"),
    [
        *EVERYDAY,
        *tiers.long(
            *(one for d in DTYPES for kind in KINDS if (one := (d, *kind)) not in EVERYDAY)
        ),
    ],
)
def test_one_kernel_does_what_four_ops_do(dtype, normed, interleaved, window, features, dims):
    torch.manual_seed(0)
    contexts = [1, 0, 17, 64, 65, 200]
    case = _case(
        torch.device("cpu"), (4, 2, 32, 16), [(1, c) for c in contexts], dtype, window,
        features=features,
    )  # fmt: skip
    rows = len(contexts)
    q, k, v = torch.randn(rows, 8, 32).to(dtype).split([4, 2, 2], 1)
    norms = tuple(QKNorm(torch.randn(32).to(dtype), 1e-5, o) for o in (0.0, 1.0))
    norms = norms if normed else None
    positions = torch.tensor([max(c - 1, 0) for c in contexts], dtype=torch.int32)
    angles = torch.outer(torch.arange(200.0), 0.7 ** torch.arange(dims // 2))
    table = torch.cat([angles.cos(), angles.sin()], -1)
    place = torch.arange(rows) if case.get("rows") is None else case["rows"].long()
    block = case["tables"][place, positions.long() // 16].long()
    slots = torch.where(torch.tensor(contexts) > 0, block * 16 + positions % 16, -1)
    mine, coded = copied(case), case["cache"].element_size() == 1
    heads = case["scales"][0, :, :, 0].clone() if "head" in features else None
    measured = None if heads is not None else case.get("scales")
    scales = (0.02, 0.03, measured, heads) if coded else ()
    want = one_by_one(
        q, k, v, positions, table, interleaved, norms, slots, case, scales or (1.0, 1.0)
    )
    got = torch.full((rows, 4, 32), float("nan"), dtype=dtype)
    extras = AttentionExtras(
        case["scale"], window, None, case.get("sinks"), None, case.get("rows"),
        k_scale=0.02, v_scale=0.03, scales=mine.get("scales"),
    )  # fmt: skip
    body.launch(
        got, q, k, v, positions, table, interleaved, norms, slots, mine["cache"], case["tables"],
        case["contexts"], extras, measured is not None,
    )  # fmt: skip
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, atol=near, rtol=near)
    written = slots[slots >= 0]
    for side in (0, 1):
        at = (written // 16, side, slice(None), written % 16)
        a, b = mine["cache"][at].float(), case["cache"][at].float()
        step = 1.01 if case["cache"].dtype == torch.int8 else near
        torch.testing.assert_close(a, b, atol=step, rtol=0.13 if coded else near)
        if measured is not None:
            torch.testing.assert_close(mine["scales"][at], case["scales"][at], atol=0, rtol=near)


@pytest.mark.parametrize("spoiled", ["", "alibi", "a prompt among them", "another cache"])
def test_a_layers_ops_become_one_launch_if_all_rows_decode(monkeypatch, spoiled):
    torch.manual_seed(1)
    contexts, queries = [3, 20, 70], [1, 1, 2 if "prompt" in spoiled else 1]
    case = _case(
        torch.device("cpu"), (4, 2, 16, 16), list(zip(queries, contexts, strict=True)),
        torch.float32, features="decodes alibi" if spoiled == "alibi" else "decodes",
    )  # fmt: skip
    if "prompt" not in spoiled:
        case["decodes"] = 3
    tokens = sum(queries)
    q, k, v = torch.randn(tokens, 8, 16).split([4, 2, 2], 1)
    positions = torch.tensor([2, 19, 68, 69] if tokens == 4 else [2, 19, 69], dtype=torch.int32)
    angles = torch.outer(torch.arange(99.0), 0.7 ** torch.arange(8))
    table = torch.cat([angles.cos(), angles.sin()], -1)
    row = torch.tensor([0, 1, 2, 2])[:tokens]
    slots = case["tables"][row, positions.long() // 16].long() * 16 + positions % 16
    started = []
    real = body.launch
    monkeypatch.setattr(body, "launch", lambda *a: started.append("fused") or real(*a))

    def run(cache):
        q1, k1 = call("rope", q, k, positions, table)
        call("kv_write", k1, v, cache, slots)
        given = {n: x for n, x in case.items() if n not in ("q", "cache")}
        other = cache.clone() if spoiled == "another cache" else cache
        y = call("paged_attention", q1, other, **given)
        lazy_fusion.flush()
        return y

    first, second = case["cache"].clone(), case["cache"].clone()
    with lazy_fusion.disabled():
        want = run(first)
    assert not started
    got = run(second)
    assert started == ([] if spoiled else ["fused"])
    if spoiled != "another cache":
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(second, first, atol=1e-5, rtol=1e-5, equal_nan=True)
