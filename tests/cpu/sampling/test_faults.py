"""Spoilt logits and failing processors end their own rows."""

import pytest
import torch

from quire.core.params import SamplingParams
from tests.cpu.sampling.cases import filled, normal, sequence

KINDS = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9},
    {"top_k": 3},
    {"min_p": 0.2},
    {"temperature": 0.0, "logprobs": 3},
    {"presence_penalty": 1.0, "top_k": 9, "top_p": 0.5, "logprobs": 2},
]
SPOILS = {"nan": "nan", "inf": "inf", "-inf": "every logit is -inf"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("kw", KINDS)
def test_a_row_that_is_not_finite_is_reported_and_the_others_are_as_without_it(kw, spoil, dtype):
    seqs = [sequence(SamplingParams(**kw), seed=i, name=str(i)) for i in range(5)]
    good = normal(5, 800).to(dtype)
    bad = good.clone()
    if spoil == "-inf":
        bad[2] = -torch.inf
    else:
        bad[2, 500] = float(spoil)
    clean = filled(800, seqs).sample(good.clone(), range(5), [0] * 5)
    found = filled(800, seqs).sample(bad, range(5), [0] * 5)
    assert list(found.errors) == [2]
    assert SPOILS[spoil] in found.errors[2]
    assert 0 <= int(found.token_ids[2]) < 800
    others = [0, 1, 3, 4]
    assert found.token_ids[others].tolist() == clean.token_ids[others].tolist()
    for row in others:
        assert found.logprobs().get(row) == clean.logprobs().get(row)


def test_masks_that_leave_nothing_are_an_error_of_that_row():
    params = SamplingParams(temperature=0.0, allowed_token_ids=[4])
    params.bad_words_token_ids = [[4]]
    seqs = [sequence(params), sequence(SamplingParams(temperature=0.0))]
    found = filled(30, seqs).sample(normal(2, 30), [0, 1], [0, 0])
    assert "no token is allowed" in found.errors[0]
    assert list(found.errors) == [0]
