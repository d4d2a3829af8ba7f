"""Masks, bias and penalties against a plain row-by-row reference, over whole generations."""

import random

import pytest
import torch

from quire.core.params import SamplingParams
from quire.core.types import UNKNOWN, StopConditions
from quire.sampling.slot_join import SlotJoin
from tests.cpu.sampling.cases import filled, normal, sequence

VOCAB = 40


def reference(logits, params, stop, prompt, outputs):
    """One row [V] by the parameters, in plain Python."""
    x = logits.double().tolist()
    if params.allowed_token_ids:
        x = [v if i in params.allowed_token_ids else -float("inf") for i, v in enumerate(x)]
    for word in params.bad_words_token_ids:
        begin = word[:-1]
        if len(begin) <= len(outputs) and outputs[len(outputs) - len(begin) :] == begin:
            x[word[-1]] = -float("inf")
    if len(outputs) < stop.min_tokens:
        for i in stop.eos_ids | stop.token_ids:
            x[i] = -float("inf")
    for i, b in (params.logit_bias or {}).items():
        x[i] += b
    for i in set(prompt) | set(outputs):
        r = params.repetition_penalty
        x[i] = x[i] / r if x[i] > 0 else x[i] * r
    for i in set(outputs):
        x[i] -= params.frequency_penalty * outputs.count(i) + params.presence_penalty
    return torch.tensor(x)


def random_params(rng):
    """Params in which each of the steps is on with chance one half."""
    on = lambda: rng.random() < 0.5  # noqa: E731
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=rng.uniform(0.5, 2.0) if on() else 1.0,
        frequency_penalty=rng.uniform(-2, 2) if on() else 0.0,
        presence_penalty=rng.uniform(-2, 2) if on() else 0.0,
        logit_bias={rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(3)} if on() else None,
        allowed_token_ids=rng.sample(range(VOCAB), 12) if on() else None,
    )
    if on():
        sizes = [1, 1, 2, 2, 2, 3, 4]
        params.bad_words_token_ids = [[rng.randrange(VOCAB) for _ in range(n)] for n in sizes]
    stop = StopConditions(100, 6 if on() else 0, frozenset({1, 2}), frozenset({3}))
    return params, stop


def run(seqs, steps, *, slots, sampler, forced):
    """Generate, appending to each sequence; check each choice against the reference."""
    for step in range(steps):
        logits = normal(len(seqs), VOCAB, seed=forced + step, scale=3.0)
        want = []
        for row, seq in enumerate(seqs):
            outputs = seq.tokens[seq.prompt_len :]
            r = seq.request
            want.append(reference(logits[row], r.params, r.stop, r.prompt, outputs))
        positions = [len(s.tokens) - s.prompt_len for s in seqs]
        found = sampler.sample(logits.clone(), slots, positions).token_ids.tolist()
        for row, seq in enumerate(seqs):
            assert found[row] == int(want[row].argmax()), f"step {step} row {row}"
            seq.tokens.append(found[row])


@pytest.mark.parametrize("seed", range(6))
def test_random_parameters_choose_what_the_plain_reference_chooses(seed):
    rng = random.Random(seed)
    seqs = []
    for i in range(24):
        params, stop = random_params(rng)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        seqs.append(sequence(params, stop=stop, prompt=prompt, name=str(i)))
    sampler = filled(VOCAB, seqs)
    run(seqs, 14, slots=range(24), sampler=sampler, forced=100 * seed)


def penalised(name="p", **more):
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3, **more
    )
    params.bad_words_token_ids = [[4, 5], [6, 7, 8]]
    return sequence(params, name=name, prompt=[1, 2, 2, 9])


def test_a_preempted_sequence_rejoins_in_another_slot_with_its_history():
    seqs = [penalised("a"), penalised("b"), penalised("c")]
    sampler = filled(VOCAB, seqs)
    run(seqs, 5, slots=[0, 1, 2], sampler=sampler, forced=7)
    sampler.leave(0)
    sampler.leave(1)
    run(seqs[2:], 3, slots=[2], sampler=sampler, forced=20)
    sampler.join(SlotJoin.from_sequence(seqs[0], 1))
    run([seqs[2], seqs[0]], 6, slots=[2, 1], sampler=sampler, forced=30)


def counting(name="count", vocab=30):
    """Logits fall with the id and a drawn token falls below all: token n is drawn at step n."""
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    return sequence(params, name=name, prompt=[vocab - 1]), torch.linspace(1, 0, vocab)[None]


def test_a_draw_that_a_preemption_undid_is_made_again_and_counted_once():
    """A row in flight dies with the preemption: its token never was, and is UNKNOWN once more."""
    seq, logits = counting()
    sampler = filled(30, [seq])
    for step in range(12):
        if step == 6:
            assert sampler.sample(logits.clone(), [0], [step]).token_ids.tolist() == [step]
            sampler.leave(0)
            seq.tokens.append(UNKNOWN)  # the plan that lets it in again counts on a token
            sampler.join(SlotJoin.from_sequence(seq, 0))
            seq.tokens.pop()
        assert sampler.sample(logits.clone(), [0], [step]).token_ids.tolist() == [step]
        seq.tokens.append(step)


def test_a_bad_word_that_began_before_a_preemption_is_still_excluded():
    params = SamplingParams(temperature=0.0)
    params.bad_words_token_ids = [[7, 8, 9], [5, 6]]
    for outputs, banned in (([3, 7, 8], 9), ([3, 7, 5], 6), ([8], None), ([7, 8, 3], None)):
        sampler = filled(VOCAB, [sequence(params, prompt=[7, 8, 5], outputs=outputs)])
        for best in (9, 6):
            logits = torch.zeros(1, VOCAB)
            logits[0, best] = 5.0
            found = sampler.sample(logits, [0], [len(outputs)]).token_ids.item()
            assert (found == best) == (best != banned)
            sampler.leave(0)
            sampler.join(
                SlotJoin.from_sequence(sequence(params, prompt=[7, 8, 5], outputs=outputs), 0)
            )


def test_a_token_of_the_step_in_progress_is_not_counted_before_it_is_drawn():
    """The scheduler writes UNKNOWN into `tokens` when it plans, which may be before the join."""
    early, late = penalised("e"), penalised("l")
    early.tokens.append(UNKNOWN)
    row = normal(2, VOCAB, seed=1)
    row[1] = row[0]
    sampler = filled(VOCAB, [early, late])
    a, b = sampler.sample(row, [0, 1], [0, 0]).token_ids.tolist()
    assert a == b


def test_a_slot_s_next_sequence_inherits_nothing():
    first, second = penalised("first"), sequence(SamplingParams(temperature=0.0), name="second")
    sampler = filled(VOCAB, [first])
    run([first], 4, slots=[0], sampler=sampler, forced=3)
    sampler.leave(0)
    sampler.join(SlotJoin.from_sequence(second, 0))
    run([second], 3, slots=[0], sampler=sampler, forced=9)


def test_long_histories_outgrow_their_first_lists():
    vocab = 2000
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    seq = sequence(params, prompt=range(250))
    sampler = filled(vocab, [seq])
    logits = torch.linspace(1, 0, vocab)[None]  # only what was chosen is pushed below the next
    for step in range(300):
        assert sampler.sample(logits.clone(), [0], [step]).token_ids.tolist() == [step]


def test_prompt_ids_outside_the_vocabulary_are_unchanged():
    seq = sequence(SamplingParams(temperature=0.0, repetition_penalty=2.0), prompt=[5, 900])
    other = sequence(SamplingParams(temperature=0.0))
    logits = torch.zeros(2, 50)
    logits[0, 5], logits[0, 6] = 1.0, 0.9
    logits[1, 10] = 1.0
    assert filled(50, [seq, other]).sample(logits, [0, 1], [0, 0]).token_ids.tolist() == [6, 10]


def test_ids_the_model_has_no_logit_for_do_not_reach_into_the_next_row():
    params = SamplingParams(
        temperature=0.0, allowed_token_ids=[5, 6, 50, 51], logit_bias={52: 90.0, 53: -90.0}
    )
    params.bad_words_token_ids = [[54], [5, 55]]
    stop = StopConditions(9, 5, frozenset({56}), frozenset({57}))
    seqs = [sequence(params, stop=stop), sequence(SamplingParams(temperature=0.0))]
    logits = normal(2, 50, seed=2)
    found = filled(50, seqs).sample(logits.clone(), [0, 1], [0, 0])
    assert found.token_ids.tolist() == [5 + int(logits[0, 5:7].argmax()), int(logits[1].argmax())]


@pytest.mark.parametrize(
    "kw",
    [
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
        {"top_k": -1, "logit_bias": {}, "bad_words": []},
        {"top_k": 5000, "logit_bias": {3: 0.0}},
        {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logits_processors": []},
    ],
)
def test_neutral_parameters_change_nothing_and_make_no_edit(kw):
    rows = normal(8, VOCAB)
    plain = filled(VOCAB, [sequence(seed=i) for i in range(8)])
    neutral = filled(VOCAB, [sequence(SamplingParams(**kw), seed=i) for i in range(8)])
    before = rows.clone()
    ids = [s.sample(rows, range(8), [4] * 8).token_ids for s in (plain, neutral)]
    assert torch.equal(*ids)
    assert torch.equal(rows, before)
    (plan,) = neutral._plans.values()
    assert plan.edits == []
    assert plan.chooser_rows.random[0].is_unfiltered


def test_min_tokens_end_for_each_row_at_its_own_count():
    kinds = [
        StopConditions(9, 2, frozenset({1})),
        StopConditions(9, 4, frozenset(), frozenset({1})),
    ]
    sampler = filled(VOCAB, [sequence(SamplingParams(temperature=0.0), stop=s) for s in kinds])
    logits = torch.zeros(2, VOCAB)
    logits[:, 1] = 5.0
    rows = [sampler.sample(logits.clone(), [0, 1], [p] * 2).token_ids.tolist() for p in range(5)]
    assert rows == [[0, 0], [0, 0], [1, 0], [1, 0], [1, 1]]


def test_min_tokens_is_no_work_any_more_once_enough_exist():
    seq = sequence(SamplingParams(temperature=0.0), stop=StopConditions(9, 2, frozenset({1})))
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = 5.0
    sampler = filled(VOCAB, [seq])
    chosen = [sampler.sample(logits.clone(), [0], [p]).token_ids.item() for p in range(4)]
    assert chosen == [0, 0, 1, 1]
