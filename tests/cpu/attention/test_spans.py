"""Tokens of a span see each other in both directions, in every body of paged attention."""

import pytest
import torch

from quire.attention.base import AttentionMetadata
from quire.attention.paged import Backend
from quire.kernels.framework.op import OPS
from quire.kernels.paged_attention import _case

OP = OPS["paged_attention"]
CPU = torch.device("cpu")
ROWS = [(1, 40), (9, 9), (30, 100), (1, 1), (150, 1200)]


def dense(case, window):
    """The contract, a query at a time, in float64."""
    out = torch.zeros(case["q"].shape, dtype=torch.float64)
    starts, contexts = case["q_starts"].tolist(), case["contexts"].tolist()
    group = case["q"].shape[1] // case["cache"].shape[2]
    size = case["cache"].shape[3]
    for s, context in enumerate(contexts):
        at = torch.arange(context)
        blocks = case["tables"][s][at // size].long().clamp(min=0)
        kv = case["cache"][blocks, :, :, at % size].double()  # [context, 2, K, D]
        for t in range(starts[s], starts[s + 1]):
            own, (low, high) = context - (starts[s + 1] - t), case["spans"][t].tolist()
            seen = (at <= own) & (at > own - (window or context + 1))
            seen |= (at >= low) & (at < high)
            keys, values = kv[seen].repeat_interleave(group, 2).unbind(1)
            scores = torch.einsum("hd,khd->hk", case["q"][t].double(), keys) * case["scale"]
            out[t] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return out


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("body", [OP.reference, OP.native])
def test_a_token_sees_its_span_and_what_is_before(body, window):
    torch.manual_seed(1)
    case = _case(CPU, (4, 2, 16, 16), ROWS, torch.float32, window, features="spans")
    torch.testing.assert_close(body(**case).double(), dense(case, window), atol=2e-5, rtol=2e-5)
    none = torch.zeros_like(case["spans"])
    assert torch.equal(body(**case | {"spans": none}), body(**case | {"spans": None}))


def test_a_step_is_given_spans_after_it_is_planned():
    torch.manual_seed(2)
    case = _case(CPU, (2, 1, 16, 16), [(6, 6)], torch.float32, features="spans")
    metadata = AttentionMetadata(
        case["q_starts"], case["contexts"], (case["tables"],), (torch.arange(6),), 6, 6
    )

    class Layer:
        scale, window, softcap, group, place = case["scale"], None, None, 0, 0
        sinks, alibi, position_bias, k_scale, v_scale = None, None, None, 1.0, 1.0
        head_scales = None
        spans = True

    step = Backend([case["cache"]]).plan(metadata).with_spans(case["spans"])
    assert torch.equal(step.run(case["q"], None, None, Layer), OP.native(**case))
