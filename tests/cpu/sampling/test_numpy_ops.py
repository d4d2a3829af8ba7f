"""The numpy arithmetic of the CPU is that of plain torch operations."""

import random

import pytest
import torch

from quire.sampling import numpy_ops
from quire.sampling.top_k_top_p_batch import TopKTopPParams
from tests.cpu.sampling import in_torch
from tests.cpu.sampling.cases import normal

ROWS = 13


def exact_exp(monkeypatch):
    """Let both take exp from the same library: its last digit is the one allowed difference."""
    monkeypatch.setattr(in_torch, "exp_", numpy_ops.exp_)
    monkeypatch.setattr(torch.Tensor, "exp_", numpy_ops.exp_)


def padded(weights):
    rows, vocab = weights.shape
    out = torch.zeros(rows, -(-vocab // in_torch.CHUNK) * in_torch.CHUNK)
    out[:, :vocab] = weights
    return out


def random_cut(rng):
    return TopKTopPParams(
        1.0,
        rng.choice([0.0, 0.0, 0.001, 0.3]),
        rng.choice([0, 0, 1, 5, 50, 2000]),
        rng.choice([1.0, 0.1, 0.7, 0.95, 0.999]),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("vocab", [40, 512, 5000])
@pytest.mark.parametrize("steps", [0.0, 0.25])
def test_cuts_and_draws_agree_with_and_without_ties(monkeypatch, vocab, steps):
    exact_exp(monkeypatch)
    rng = random.Random(vocab)
    for seed in range(6):
        z = normal(ROWS, vocab, seed=seed, scale=rng.choice([0.3, 3.0]))
        z[:, ::7] = -torch.inf
        if steps:
            z = (z / steps).round() * steps
        z -= z.amax(-1, keepdim=True)
        asked = [random_cut(rng) for _ in range(ROWS)]
        found = []
        for lane in (numpy_ops, in_torch):
            columns, weights = lane.filter_rows(z, padded(torch.zeros_like(z)), asked)
            dense = torch.zeros_like(z)
            for row in range(ROWS):
                live = weights[row] > 0
                dense[row, columns[row, live]] = weights[row, live]
            found.append(dense)
        assert torch.equal(*found)
        for share in (0.0, 0.5, 1 - 2**-53, rng.random()):
            shares = torch.full((ROWS,), share, dtype=torch.float64)
            ids = [
                lane.draw_filtered(z, padded(torch.zeros_like(z)), asked, shares)
                for lane in (numpy_ops, in_torch)
            ]
            assert torch.equal(*ids)
            assert (found[0].gather(1, ids[0][:, None]) > 0).all()
            plain = padded(found[0])
            assert torch.equal(numpy_ops.draw(plain, shares), in_torch.draw(plain, shares))


@pytest.mark.parametrize("k", [1, 3, 60, 299])
def test_the_k_best_counts_and_argmax_agree(k):
    x = (normal(ROWS, 300, seed=k) * 4).round() / 4
    x[3] = 0.0
    x[4, 2:] = -torch.inf
    assert torch.equal(numpy_ops.top_k_columns(x, k), in_torch.top_k_columns(x, k))
    value = x[:, :1].clone()
    assert torch.equal(numpy_ops.count_greater(x, value), in_torch.count_greater(x, value))
    for ours, theirs in zip(numpy_ops.argmax(x), in_torch.argmax(x)):
        assert torch.equal(ours, theirs)


def test_argmax_of_a_row_with_nan_reports_it():
    x = normal(3, 50)
    x[1, 30] = torch.nan
    for lane in (numpy_ops, in_torch):
        ids, tops = lane.argmax(x)
        assert tops.isnan().tolist() == [False, True, False]
        assert ((ids >= 0) & (ids < 50)).all()


@pytest.mark.parametrize("lane", [numpy_ops, in_torch])
def test_a_draw_never_lands_on_weight_zero(lane):
    weights = torch.zeros(4, 2 * in_torch.CHUNK)
    weights[0, 700] = 1e-30
    weights[1, [3, 1000]] = 1.0
    weights[2, [511, 512]] = torch.tensor([1.0, 1e-12])
    weights[3, 0] = 3.0
    for share in (0.0, 0.5, 1 - 2**-53):
        ids = lane.draw(weights, torch.full((4,), share, dtype=torch.float64))
        assert (weights.gather(1, ids[:, None]) > 0).all()
