"""Rows of one sequence decoded from the raw qkv product in one kernel, against the ops it replaces."""

import pytest
import torch

from quire.kernels.paged_attention import _case
from tests import tiers
from tests.cpu.gpu_kernels.test_paged_attention_fused import one_by_one
from tests.op_cases import copied

body = pytest.importorskip(
    "quire.kernels.gpu.attention.paged_attention_drafts_fused", reason="no triton"
)
from quire.kernels.gpu.attention.norm_rope_write import QKNorm  # noqa: E402
from quire.kernels.gpu.attention.split_plan import AttentionExtras  # noqa: E402

CHAINS = [33, 34, 35, 0, 128, 129, 130, 131, 132, 7, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("contexts", "splits", "normed", "interleaved", "window", "more", "dims"),
    [
        (CHAINS, 3, True, False, None, "", 32),
        (CHAINS, 1, False, True, 3, "sinks", 12),
        (range(40, 60), 2, False, False, 20, "", 32),
        *tiers.long(
            (CHAINS, 1, True, True, None, "sinks", 32),
            (CHAINS, 3, False, False, 1, "", 16),
            (range(1, 65), 3, True, False, None, "", 32),
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, *tiers.long(torch.bfloat16)])
def test_one_kernel_does_what_four_ops_do(
    contexts, splits, normed, interleaved, window, more, dims, dtype, monkeypatch
):
    torch.manual_seed(0)
    contexts, rows = list(contexts), len(contexts)
    case = _case(
        torch.device("cpu"), (4, 2, 32, 16), [(1, c) for c in contexts], dtype, window,
        features=f"decodes rows drafts {more}",
    )  # fmt: skip
    q, k, v = torch.randn(rows, 8, 32).to(dtype).split([4, 2, 2], 1)
    norms = tuple(QKNorm(torch.randn(32).to(dtype), 1e-5, o) for o in (0.0, 1.0))
    norms = norms if normed else None
    positions = torch.tensor([max(c - 1, 0) for c in contexts], dtype=torch.int32)
    angles = torch.outer(torch.arange(200.0), 0.7 ** torch.arange(dims // 2))
    table = torch.cat([angles.cos(), angles.sin()], -1)
    block = case["tables"][case["rows"].long(), positions.long() // 16].long()
    slots = torch.where(torch.tensor(contexts) > 0, block * 16 + positions % 16, -1)
    for slot in slots[slots >= 0].tolist():  # until this step any number
        case["cache"][slot // 16, :, :, slot % 16] = float("nan")
    mine = copied(case)
    want = one_by_one(q, k, v, positions, table, interleaved, norms, slots, case, (1.0, 1.0))
    got = torch.full((rows, 4, 32), float("nan"), dtype=dtype)
    counters = torch.zeros(64 * 2, dtype=torch.int32)
    extras = AttentionExtras(
        case["scale"], window, None, case.get("sinks"), None, case["rows"], counters=counters
    )
    plan = body.plan_decode
    monkeypatch.setattr(
        body, "plan_decode", lambda *a: plan(*a)._replace(splits=splits, max_splits=splits)
    )
    assert body.supports(q, k, v, positions, table, interleaved, norms, slots, mine["cache"])
    body.launch(
        got, q, k, v, positions, table, interleaved, norms, slots, mine["cache"], case["tables"],
        case["contexts"], extras,
    )  # fmt: skip
    assert not counters.any()
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, atol=near, rtol=near)
    torch.testing.assert_close(mine["cache"], case["cache"], atol=near, rtol=near, equal_nan=True)
