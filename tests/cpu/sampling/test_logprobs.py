"""Logprobs and ranks against log_softmax, in all modes, for rows with logprobs."""

import pytest
import torch

from quire.core.params import SamplingParams
from quire.sampling.logprobs import prompt_scores
from tests.cpu.sampling.cases import exact, filled, normal, sequence

VOCAB = 1500


def ask(k, **more):
    return sequence(SamplingParams(**{"temperature": 0.0, **more}, logprobs=k))


def assert_scores(found, row, k, chosen):
    """`found` lists the chosen token and the k best of the values in `row` [V]."""
    order = row.sort(descending=True, stable=True).indices[:k].tolist()
    assert found.ids == [chosen, *order]
    assert found.values == pytest.approx(row[found.ids].tolist(), abs=2e-6)
    assert found.ranks == [1 + int((row > row[i]).sum()) for i in found.ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 1, 5, 50, 1400])
def test_raw_logprobs_are_log_softmax_of_what_the_model_gave(dtype, k):
    logits = normal(9, VOCAB).to(dtype)
    made = filled(VOCAB, [ask(k)] * 9).sample(logits.clone(), range(9), [0] * 9)
    want = logits.double().log_softmax(-1)
    for row, found in made.logprobs().items():
        assert_scores(found, want[row], k, int(made.token_ids[row]))


def test_minus_one_lists_the_whole_vocabulary():
    logits = normal(2, VOCAB)
    made = filled(VOCAB, [ask(-1), ask(2)]).sample(logits.clone(), range(2), [0] * 2)
    want = logits.double().log_softmax(-1)
    assert_scores(made.logprobs()[0], want[0], VOCAB, int(made.token_ids[0]))
    assert_scores(made.logprobs()[1], want[1], 2, int(made.token_ids[1]))


def test_only_rows_with_logprobs_are_scored():
    logits = normal(4, VOCAB)
    made = filled(VOCAB, [ask(None), ask(3), ask(None), ask(0)]).sample(logits, range(4), [0] * 4)
    assert sorted(made.logprobs()) == [1, 3]


def test_equal_tokens_share_a_rank_and_the_lower_id_is_listed_first():
    logits = torch.zeros(1, 200)
    logits[0, [150, 20, 90]] = torch.tensor([2.0, 2.0, 1.0])
    found = filled(200, [ask(5)]).sample(logits, [0], [0]).logprobs()[0]
    assert found.ids == [20, 20, 150, 90, 0, 1]
    assert found.ranks == [1, 1, 1, 3, 4, 4]


def test_raw_logprobs_do_not_see_bias_penalties_masks_or_temperature():
    logits = normal(3, VOCAB)
    kw = {"logit_bias": {7: 80.0}, "repetition_penalty": 1.9, "allowed_token_ids": [7, 8, 9]}
    seqs = [ask(4, **kw), ask(4, temperature=0.4, top_k=3, **kw), ask(None)]
    made = filled(VOCAB, seqs).sample(logits.clone(), range(3), [0] * 3)
    want = logits.double().log_softmax(-1)
    assert made.token_ids[:2].tolist() == [7, 7]
    for row in range(2):
        assert_scores(made.logprobs()[row], want[row], 4, 7)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_the_other_modes_score_what_they_name(mode):
    logits = normal(3, VOCAB)
    params = {"temperature": 0.7, "top_p": 0.6, "logit_bias": {11: 9.0}}
    seqs = [ask(3, **params), ask(3, logit_bias={11: 9.0}), ask(3, temperature=2.0)]
    sampler = filled(VOCAB, seqs, logprobs_mode=mode)
    made = sampler.sample(logits.clone(), range(3), [0] * 3)
    changed = logits.double()
    if mode.startswith("processed"):
        changed[:2, 11] += 9.0
        kept = exact(changed[0], SamplingParams(temperature=0.7, top_p=0.6)) > 0
        changed[0] = torch.where(kept, changed[0] / 0.7, -torch.inf)
        changed[2] /= 2.0
    want = changed.log_softmax(-1) if mode.endswith("logprobs") else changed
    for row, found in made.logprobs().items():
        assert_scores(found, want[row], 3, int(made.token_ids[row]))


def test_a_list_longer_than_the_kept_tokens_continues_with_minus_infinity():
    seqs = [ask(4, temperature=1.0, top_k=2)]
    sampler = filled(50, seqs, logprobs_mode="processed_logprobs")
    found = sampler.sample(normal(1, 50), [0], [0]).logprobs()[0]
    assert found.values[3:] == [-torch.inf] * 2
    assert found.ranks[3:] == [3, 3]


def test_given_token_ids_are_scored_in_their_order():
    logits = normal(2, VOCAB)
    params = SamplingParams(temperature=0.0, logprob_token_ids=[9, 1200, 3])
    made = filled(VOCAB, [ask(1), sequence(params)]).sample(logits.clone(), [0, 1], [0, 0])
    found, want = made.logprobs()[1], logits.double().log_softmax(-1)[1]
    assert found.ids == [int(made.token_ids[1]), 9, 1200, 3]
    assert found.values == pytest.approx(want[found.ids].tolist(), abs=2e-6)
    assert found.ranks == [1 + int((want > want[i]).sum()) for i in found.ids]


def scores(logits, targets, k):
    return prompt_scores(logits, targets, k).to_lists([k] * len(targets))


@pytest.mark.parametrize("k", [0, 2, -1])
def test_prompt_logprobs_score_each_target(k):
    logits = normal(70, 900).bfloat16()
    targets = torch.arange(70) * 11
    found = scores(logits, targets, k)
    want = logits.double().log_softmax(-1)
    assert len(found) == 70
    for row in range(70):
        assert_scores(found[row], want[row], 900 if k == -1 else k, 11 * row)


def test_prompt_logprobs_do_not_depend_on_how_the_prompt_is_cut():
    logits = normal(40, 6000)
    targets = torch.arange(40)
    whole = scores(logits, targets, 3)
    cut = [
        one
        for at in range(0, 40, 7)
        for one in scores(logits[at : at + 7], targets[at : at + 7], 3)
    ]
    assert whole == cut
