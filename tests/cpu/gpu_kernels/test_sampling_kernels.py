"""Sampling kernels beyond their ops' cases: rows for the long search, rows with NaN."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

from quire.kernels.formats.sampling_table_layout import pack_row
from quire.kernels.framework.op import OPS
from quire.kernels.gpu.sampling import logprob_ranks, vocab_groups
from quire.kernels.gpu.sampling import sample as kernels
from tests import tiers

pytestmark = pytest.mark.sampled(2)

LONG = [
    (1.0, 0, 0.9, 0.0),
    (1.5, 100, 0.7, 0.0),
    (1.0, 100, 1.0, 0.0),
    (1.0, 0, 0.8, 0.01),
    (0.9, 1500, 0.95, 0.001),
]


def drawn(logits, kinds):
    """What the kernels find and what the reference finds."""
    op, rows = OPS["sample"], torch.arange(len(kinds), dtype=torch.int32)
    table = torch.from_numpy(np.stack([pack_row(*k, seed=3 + i) for i, k in enumerate(kinds)]))
    given = {"logits": logits, "slots": rows, "outputs": rows + 2, "table": table}
    outs = op.gpu.outputs(**given)
    op.gpu.launch(outs, **given)
    return outs, op.reference(**given)


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LOOKED_FOR = [(BF16, True, 64), (FP16, False, 4096)]
LOOKED_FOR += tiers.long(
    (FP32, False, 64), (FP32, True, 64), (FP32, False, 4096), (BF16, False, 64)
)
LOOKED_FOR += tiers.long((BF16, False, 4096), (FP16, False, 64), (FP16, True, 64))


@pytest.mark.parametrize(("dtype", "ties", "most"), LOOKED_FOR)
def test_rows_with_many_candidates_are_cut_at_once_or_searched_whole(
    monkeypatch, dtype, ties, most
):
    monkeypatch.setattr(kernels, "MAX_PAIRWISE", tl.constexpr(4))
    for module in (vocab_groups, kernels):
        monkeypatch.setattr(module, "MAX_CANDIDATES", tl.constexpr(most))
    x = torch.randn(len(LONG), 2003, generator=torch.Generator().manual_seed(1)) * 1.5
    x = (x * 4).round() / 4 if ties else x
    x[:, ::5] = -torch.inf
    for got, want in zip(*drawn(x.to(dtype), LONG)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), -float("inf")])
def test_a_spoilt_row_shows_in_its_top_and_gets_an_id_in_range(spoil):
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.0), (1.0, 0, 0.5, 0.1)]
    x = torch.randn(4, 300)
    x[:, slice(None) if spoil < 0 else 70] = spoil
    found, _ = drawn(x, kinds)
    assert not found.max_logits.isfinite().any()
    assert ((found.ids >= 0) & (found.ids < 300)).all()


@pytest.mark.parametrize("k", [5, *tiers.long(1, 30)])
def test_lists_of_more_candidates_than_fit_go_on_by_id(monkeypatch, k):
    for module in (vocab_groups, logprob_ranks):
        monkeypatch.setattr(module, "MAX_CANDIDATES", tl.constexpr(64))
    x = (torch.randn(3, 4200, generator=torch.Generator().manual_seed(2)) * 2).round()
    x[1, 4:] = -torch.inf
    x[2] = 0.0
    op, given = OPS["logprob_ranks"], {"logits": x, "chosen": torch.tensor([7, 1, 3]), "k": k}
    outs = op.gpu.outputs(**given)
    op.gpu.launch(outs, **given)
    want = op.reference(**given)
    assert torch.equal(outs.top_ids, want.top_ids)
    assert torch.equal(outs.ranks, want.ranks)
    torch.testing.assert_close(outs.top_values, want.top_values, atol=2e-6, rtol=0)


@pytest.mark.parametrize("most", [4096, *tiers.long(64)])
def test_both_zeros_are_one_value(monkeypatch, most):
    monkeypatch.setattr(kernels, "MAX_PAIRWISE", tl.constexpr(4))
    for module in (vocab_groups, kernels):
        monkeypatch.setattr(module, "MAX_CANDIDATES", tl.constexpr(most))
    generator = torch.Generator().manual_seed(3)
    signs = torch.randint(0, 2, (len(LONG), 1001), generator=generator) * 2 - 1
    x = signs.float() * (torch.rand(len(LONG), 1001, generator=generator) < 0.2)
    for got, want in zip(*drawn(x, LONG)):
        assert torch.equal(got, want)
