"""What is drawn follows the exact distribution, computed plainly in float64."""

import numpy as np
import pytest
import torch

from quire.core.params import SamplingParams
from quire.sampling.numpy_ops import SORT_LIMIT
from quire.sampling.row_ops import ScratchBuffers
from quire.sampling.steps.top_k_top_p import processed_logits
from quire.sampling.top_k_top_p_batch import TopKTopPParams, build_top_k_top_p_batch
from tests import tiers
from tests.cpu.sampling.cases import exact, filled, normal, sequence
from tests.cpu.sampling.p_values import chi_square

ROWS, STEPS = 256, tiers.amount(40, 400)

CASES = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.9},
    "top_k": {"top_k": 7},
    "top_k of one": {"top_k": 1},
    "large top_k": {"top_k": 90},
    "top_p": {"top_p": 0.8},
    "small top_p": {"top_p": 0.05},
    "min_p": {"min_p": 0.05},
    "top_k and top_p": {"top_k": 12, "top_p": 0.7},
    "all": {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
}


def counts(logits, params, seed=11):
    """How often each token is drawn: one row of logits [V], ROWS seeds, STEPS positions."""
    sampler = filled(
        len(logits), [sequence(params, name=str(i), seed=seed + i) for i in range(ROWS)]
    )
    total = np.zeros(len(logits))
    for position in range(STEPS):
        rows = logits.expand(ROWS, -1).clone()
        ids = sampler.sample(rows, range(ROWS), [position] * ROWS).token_ids
        total += np.bincount(ids.numpy(), minlength=len(logits))
    return total


def assert_follows(total, p):
    p = p.numpy()
    assert total[p == 0].sum() == 0
    want = p * total.sum()
    rare = want < 8
    got = np.append(total[~rare], total[rare].sum())
    want = np.append(want[~rare], want[rare].sum())
    if want[-1] == 0:
        got, want = got[:-1], want[:-1]
    if len(want) > 1:
        assert chi_square(got, want * got.sum() / want.sum()) > 1e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_each_sampler_draws_the_exact_distribution(case):
    params = SamplingParams(**CASES[case])
    logits = normal(1, 100, seed=3, scale=2.0)[0]
    assert_follows(counts(logits, params), exact(logits, params))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kw", [{}, {"top_p": 0.95}, {"top_k": 40, "min_p": 0.01}])
def test_vocabularies_of_many_chunks_are_drawn_exactly(kw):
    params = SamplingParams(**kw)
    logits = normal(1, 3001, seed=4, scale=3.5)[0]
    assert_follows(counts(logits, params), exact(logits, params))


def test_allowed_ids_and_bias_change_the_distribution_exactly():
    logits = normal(1, 60, seed=5, scale=1.5)[0]
    params = SamplingParams(allowed_token_ids=[3, 50, 7, 21], logit_bias={7: 1.5, 50: -2.0, 9: 30})
    shifted = torch.full((60,), -torch.inf)
    shifted[[3, 50, 7, 21]] = logits[[3, 50, 7, 21]]
    shifted[7] += 1.5
    shifted[50] -= 2.0
    assert_follows(counts(logits, params), exact(shifted, SamplingParams()))


def test_equal_logits_are_drawn_equally():
    logits = torch.zeros(37)
    assert_follows(counts(logits, SamplingParams()), torch.full((37,), 1 / 37, dtype=torch.double))


@pytest.mark.parametrize(
    "kw", [{"top_p": 0.9}, {"top_p": 0.3}, {"top_k": 5000, "top_p": 0.8}, {"top_k": 0}]
)
def test_flat_rows_too_long_to_sort_keep_exactly_the_same_tokens(kw):
    vocab = 12 * SORT_LIMIT
    logits = (normal(2, vocab, seed=6, scale=0.5) * 64).round() / 64  # many ties
    params = SamplingParams(**kw)
    values = [TopKTopPParams(params.temperature, params.min_p, params.top_k, params.top_p)] * 2
    cuts = build_top_k_top_p_batch([0, 1], 2, values, logits.device)
    kept = processed_logits(logits, cuts, ScratchBuffers(vocab, 2)) > -torch.inf
    for row in range(2):
        assert torch.equal(kept[row], exact(logits[row], params) > 0)


def test_of_equal_tokens_top_p_keeps_the_lowest_ids_and_top_k_keeps_all():
    logits = torch.zeros(1, 10)
    assert (counts(logits[0], SamplingParams(top_p=0.25)) > 0).nonzero()[0].tolist() == [0, 1, 2]
    assert (counts(logits[0], SamplingParams(top_k=2)) > 0).all()


def test_top_p_stops_at_the_token_that_reaches_it_exactly():
    found = counts(torch.zeros(8), SamplingParams(top_p=0.5))
    assert (found > 0).nonzero()[0].tolist() == [0, 1, 2, 3]


def test_a_temperature_near_zero_draws_what_greedy_takes():
    logits = normal(32, 500, seed=8, scale=30.0)
    cold = filled(500, [sequence(SamplingParams(temperature=0.01), seed=i) for i in range(32)])
    greedy = filled(500, [sequence(SamplingParams(temperature=0.0))] * 32)
    ids = [s.sample(logits.clone(), range(32), [0] * 32).token_ids for s in (cold, greedy)]
    assert torch.equal(*ids)
    assert torch.equal(ids[0], logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equal_ids(dtype):
    logits = torch.zeros(3, 700, dtype=dtype)
    logits[0, [600, 650]] = 4.0
    logits[1, [0, 699]] = 1.0
    found = filled(700, [sequence(SamplingParams(temperature=0.0))] * 3)
    assert found.sample(logits, range(3), [0] * 3).token_ids.tolist() == [600, 0, 0]
