"""Latent attention's kernels in the interpreter, where the op's own cases do not reach."""

import math

import pytest
import torch

from quire.kernels.framework.op import OPS
from quire.kernels.mla_attention import _case
from tests import tiers

pytest.importorskip("triton", reason="triton is not installed")
SHAPE = (3, 16, 16, 32, 16, 16)  # heads, P, R, L, V, B


def want_of(case):
    return OPS["mla_attention"].reference(**case)


@pytest.mark.parametrize("splits", [1, 5, *tiers.long(2, 64)])
def test_any_number_of_splits_gives_the_same(splits):
    from quire.kernels.gpu.mla.mla_attention import absorb_query, up_project_output
    from quire.kernels.gpu.mla.mla_decode import decode

    torch.manual_seed(1)
    rows = [(1, 700), (1, 130), (1, 0), (1, 128)]
    case = _case(torch.device("cpu"), SHAPE, rows, torch.float32, shuffled=True)
    keys, values = case["up"][:, :16], case["up"][:, 16:]
    mixed = absorb_query(case["q"], keys)
    tensors = (case[name] for name in ("q_rope", "cache", "tables", "contexts"))
    scale = case["scale"] * math.log2(math.e)
    decode(mixed, mixed, *tensors, scale, case["rows"], len(rows), splits=splits)
    out = torch.full((len(rows), 3 * 16), float("nan"))
    up_project_output(out, mixed, values)
    torch.testing.assert_close(out, want_of(case), atol=1e-5, rtol=1e-5)
    done = torch.full((len(rows), 3 * 16), float("nan"))
    mixed = absorb_query(case["q"], keys)
    tensors = (case[name] for name in ("q_rope", "cache", "tables", "contexts"))
    finish = (done, values)
    where = (scale, case["rows"], len(rows))
    assert decode(mixed, mixed, *tensors, *where, splits=splits, finish=finish) == (splits > 1)
    if splits > 1:
        torch.testing.assert_close(done, want_of(case), atol=1e-5, rtol=1e-5)


@pytest.mark.slow("attention kernels in the interpreter")
@pytest.mark.parametrize("tiled", [0, 1 << 30])
def test_an_unknown_or_overestimated_past_gives_the_same(tiled, monkeypatch):
    from quire.kernels.gpu.mla import mla_attention as gpu

    torch.manual_seed(2)
    monkeypatch.setattr(gpu, "MIN_TILED_ROWS", tiled)
    everyday = [(1, 9), (8, 40), (7, 7), (2, 30)]
    rows = tiers.amount(everyday, [(1, 9), (140, 440), (103, 103), (2, 30)])
    case = _case(torch.device("cpu"), SHAPE, rows, torch.float32, shuffled=True)
    want = want_of(case)
    known = rows[1][1] - rows[1][0]
    for past in tiers.amount((None, known + 700), (None, known, known + 700)):
        given = {**case, "past": past}
        out = gpu.outputs(**given).fill_(float("nan"))
        gpu.launch(out, **given)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_splits_fill_the_multiprocessors_and_no_more():
    from quire.kernels.gpu.mla.mla_decode import MAX_SPLITS, num_splits

    assert num_splits(128, 64, 132) == 1
    assert num_splits(66, 64, 132) == 2
    assert num_splits(64, 16, 132) == 4
    assert 32 <= num_splits(1, 16, 132) <= MAX_SPLITS
    assert all(1 <= num_splits(n, 64, 132) <= MAX_SPLITS for n in range(1, 2000, 37))


def test_sizes_the_kernels_do_not_take_are_left_to_the_reference():
    from quire.kernels.gpu.mla import mla_attention as gpu

    case = _case(torch.device("cpu"), (3, 16, 16, 24, 16, 16), [(1, 9)], torch.float32)
    assert gpu.outputs(**case) is NotImplemented
