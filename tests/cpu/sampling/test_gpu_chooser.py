"""The chooser of a GPU, run on the CPU through the ops' references: it agrees with the CPU's."""

import random

import pytest
import torch

from quire.core.params import SamplingParams
from quire.sampling.slot_join import SlotJoin
from tests import tiers
from tests.cpu.sampling.cases import filled, normal, sequence
from tests.cpu.sampling.test_independence import KINDS, company

MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


def assert_same_logprobs(found, want):
    assert sorted(found) == sorted(want)
    for row, one in want.items():
        assert found[row].ids == one.ids
        assert found[row].ranks == one.ranks
        assert found[row].values == pytest.approx(one.values, abs=2e-5)


LARGE = [(20_011, mode) for mode in MODES]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("vocab", "mode"), [*((333, mode) for mode in MODES), LARGE[0], *tiers.long(*LARGE[1:])]
)
def test_any_company_gets_the_tokens_and_logprobs_of_the_host(vocab, mode):
    seqs = company(random.Random(vocab), 48)
    host = filled(vocab, seqs, logprobs_mode=mode)
    device = filled(vocab, seqs, logprobs_mode=mode, asynchronous=True)
    for step in range(3):
        logits = normal(48, vocab, seed=step)
        want = host.sample(logits.clone(), range(48), [step] * 48)
        found = device.sample(logits.clone(), range(48), [step] * 48).copy_to_host()
        assert found.token_ids() == want.token_ids.tolist()
        assert_same_logprobs(found.logprobs(), want.logprobs())
        assert found.all_errors == {}


def test_given_ids_and_whole_vocabularies_are_listed_as_on_the_host():
    params = [{"logprob_token_ids": [9, 120, 3]}, {"logprobs": -1}, {"logprob_token_ids": [5]}]
    seqs = [sequence(SamplingParams(**p), seed=i) for i, p in enumerate(params)]
    logits = normal(3, 200)
    made = [
        filled(200, seqs, asynchronous=flag).sample(logits.clone(), range(3), [0] * 3).logprobs()
        for flag in (True, False)
    ]
    assert_same_logprobs(*made)


def test_kind_states_which_rows_choose_supports():
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=4),
        SamplingParams(logprobs=0),
        SamplingParams(presence_penalty=1.0),
    ]
    sampler = filled(60, [sequence(p) for p in params], asynchronous=True)
    assert sampler.kind([0]) == "greedy"
    assert sampler.kind([1]) == sampler.kind([0, 1]) == "random"
    assert sampler.kind([0, 2]) is None
    assert sampler.kind([1, 3]) == "penalised"
    assert sampler.kind([1, 2, 3]) is None
    sampler.leave(3)
    sampler.join(SlotJoin.from_sequence(sequence(params[0]), 3))
    assert sampler.kind([0, 3]) == "greedy"


SERVED = [kw for kw in KINDS if not {"logit_bias", "allowed_token_ids"} & set(kw)]
SERVED = [kw for kw in SERVED if not any("penalty" in name for name in kw)]


def test_choose_gives_the_tokens_of_sample_in_any_order_and_with_padding():
    seqs = [sequence(SamplingParams(**kw), seed=i) for i, kw in enumerate(SERVED)]
    sampler, rng = filled(5003, seqs, asynchronous=True), random.Random(1)
    for step in range(4):
        order = rng.sample(range(len(seqs)), len(seqs))
        logits = normal(len(seqs) + 2, 5003, seed=step)
        logits[-1] = torch.nan
        want = sampler.sample(logits[:-2].clone(), order, [step] * len(order))
        assert sampler.kind(order) == "random"
        slots = torch.tensor([*order, -1, -1], dtype=torch.int32)
        outputs = torch.full((len(slots),), step, dtype=torch.int32)
        ids, tops = sampler.choose(logits, slots, outputs, "random")
        assert ids[:-2].tolist() == want.token_ids.tolist()
        assert torch.equal(tops[:-2], want.top_logits)
        assert ((ids >= 0) & (ids < 5003)).all()


def test_a_slot_that_changes_hands_is_served_as_its_new_sequence_asks():
    logits = normal(1, 500, scale=0.1)
    seqs = [
        sequence(SamplingParams(temperature=t), seed=s) for t, s in ((0.0, 1), (1.0, 2), (1.0, 3))
    ]
    sampler, ids = filled(500, seqs[:1], asynchronous=True), []
    for seq in [*seqs, seqs[0]]:
        sampler.leave(0)
        sampler.join(SlotJoin.from_sequence(seq, 0))
        kind = sampler.kind([0])
        slots, outputs = torch.zeros(2, 1, dtype=torch.int32)
        ids.append(sampler.choose(logits, slots, outputs, "random")[0].item())
        assert ids[-1] == filled(500, [seq]).sample(logits.clone(), [0], [0]).token_ids.item()
        assert kind == ("greedy" if seq.request.params.greedy else "random")
    assert len(set(ids)) == 3


def test_penalised_rows_learn_what_they_draw_on_either_path():
    """Graphs choose most steps; steps with logprobs take the general path."""
    params = [
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.7},
        {"frequency_penalty": 0.4, "repetition_penalty": 0.8, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 0.9},
    ]
    vocab, rng = 50, random.Random(3)

    def joined(**options):
        seqs = [
            sequence(SamplingParams(**p), seed=i, prompt=[i, 7, 99]) for i, p in enumerate(params)
        ]
        return filled(vocab, [*seqs, sequence(SamplingParams(logprobs=1))], **options), seqs

    (host, seqs), (device, _) = joined(), joined(asynchronous=True)
    for step in range(40):
        if step == 20:  # preempted: back in with what it has put out
            for sampler in (host, device):
                sampler.leave(2)
                sampler.join(SlotJoin.from_sequence(seqs[2], 2))
        logits = normal(6, vocab, seed=step, scale=1.0)
        asks = rng.random() < 0.3
        slots = [0, 1, 2, 3, 4, 5][: 5 + asks]
        want = host.sample(logits[: len(slots)].clone(), slots, [step] * len(slots)).token_ids
        kind = device.kind(slots)
        assert kind == (None if asks else "penalised")
        if asks:
            found = device.sample(logits.clone(), slots, [step] * 6).token_ids
        else:
            rows = torch.tensor([*slots, -1], dtype=torch.int32)
            outputs = torch.full((6,), step, dtype=torch.int32)
            found = device.choose(logits, rows, outputs, kind)[0][:5]
        assert found.tolist() == want.tolist()
        for seq, token in zip(seqs, want.tolist()):
            seq.tokens.append(token)
