"""Non-finite logits and failing processors end their own rows."""

import numpy as np
import pytest
import torch

from quire.core.params import SamplingParams
from quire.core.types import Sequence
from quire.sampling import sampler as sampling
from quire.sampling.constrained_sequence import ConstrainedSequence
from quire.sampling.slot_join import SlotJoin
from quire.sampling.steps import grammar_masks
from tests.cpu.engine_of import request
from tests.cpu.made_grammars import DIGITS, END, VOCAB, Grammars, Ready, bits, bound_to
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
    assert list(found.row_errors.non_finite) == list(found.all_errors) == [2]
    assert SPOILS[spoil] in found.all_errors[2]
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
    assert "no token is allowed" in found.row_errors.refusals[0]
    assert list(found.all_errors) == [0]


def test_a_spoilt_row_of_a_request_that_bans_some_is_spoilt_all_the_same():
    seqs = [sequence(SamplingParams(temperature=0.0, logit_bias={3: 1.0}))] * 2
    logits = normal(2, 30)
    logits[1, 4] = torch.nan
    found = filled(30, seqs).sample(logits, [0, 1], [0, 0])
    assert list(found.row_errors.non_finite) == list(found.all_errors) == [1]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "step", ["MinTokens", "BadWords", "LogitBias", "RequestLogitsProcessors", "ConstrainedSlots"]
)
def test_a_sequence_that_cannot_be_joined_is_reported_and_the_others_are_as_without_it(
    step, asynchronous, monkeypatch, caplog
):
    kinds = [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3, "logprobs": 2}]
    seqs = [sequence(SamplingParams(**kinds[i % 3]), seed=i, name=str(i)) for i in range(6)]
    clean = filled(800, seqs, asynchronous=asynchronous)
    clean = clean.sample(normal(6, 800), range(6), [0] * 6)
    (kind,) = [k for k in vars(sampling).values() if getattr(k, "__name__", "") == step]
    join = kind.join

    def breaks(self, joined):
        if joined.request_id == "4":
            raise IndexError("no such id")
        join(self, joined)

    monkeypatch.setattr(kind, "join", breaks)
    sampler = filled(800, seqs, asynchronous=asynchronous)
    assert sampler.kind([4]) is None
    found = sampler.sample(normal(6, 800), range(6), [0] * 6)
    assert found.row_errors.errors == {4: "IndexError: no such id"}
    assert list(found.all_errors) == [4]
    others = [0, 1, 2, 3, 5]
    assert found.token_ids[others].tolist() == clean.token_ids[others].tolist()
    for row in others:
        assert found.logprobs().get(row) == clean.logprobs().get(row)
    monkeypatch.undo()
    sampler.join(SlotJoin.from_sequence(seqs[4], 4))
    again = sampler.sample(normal(6, 800), range(6), [0] * 6)
    assert again.all_errors == {}
    assert again.token_ids.tolist() == clean.token_ids.tolist()


def test_masks_that_cannot_be_filled_together_are_filled_one_by_one():
    class Compiler:
        def fill_all(self, matchers, words):
            raise ValueError("together they cannot be")

    compiler, work = Compiler(), []
    for slot in range(3):
        ready = Ready(Grammars(), "digits")
        ready.fill_all = compiler.fill_all  # an object of its own, as each grammar has
        one = request(str(slot), [1, 2], 9, constraint=bound_to("digits"), eos=[END])
        seq = Sequence(one, 0, [1, 2], (), max_len=11)
        work.append((ConstrainedSequence.from_join(SlotJoin.from_sequence(seq), ready), 0))
    words = np.full((3, -(-VOCAB // 32)), 5, np.int32)
    grammar_masks.fill_masks(work, words)
    assert (words == bits(DIGITS, words.shape[1])).all()
