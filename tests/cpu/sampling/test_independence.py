"""A row's token and logprobs are the same bits in any batch."""

import random

import pytest
import torch

from quire.core.params import SamplingParams
from quire.core.types import StopConditions
from quire.sampling.slot_join import SlotJoin
from tests.cpu.sampling.cases import filled, normal, sequence

KINDS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_k": 40},
    {"top_k": 400},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 1.7},
    {"min_p": 0.05},
    {"min_p": 0.01, "top_k": 60, "top_p": 0.8},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"logit_bias": {5: 3.0, 9: -4.0}},
    {"allowed_token_ids": [1, 5, 77, 300]},
    {"temperature": 0.0, "presence_penalty": 1.0},
]


def company(rng, count):
    """Random sequences of all kinds, each with its own seed, prompt and wish for logprobs."""
    made = []
    for i in range(count):
        k = rng.choice([None, 0, 1, 5, 20])
        params = SamplingParams(**rng.choice(KINDS), logprobs=k)
        params.bad_words_token_ids = [[3, 4], [7]] if rng.random() < 0.2 else []
        stop = StopConditions(50, rng.choice([0, 0, 3]), frozenset({2}))
        prompt = [rng.randrange(300) for _ in range(rng.randrange(1, 40))]
        made.append(sequence(params, name=str(i), prompt=prompt, stop=stop, seed=rng.randrange(99)))
    return made


@pytest.mark.sampled(3)
@pytest.mark.parametrize("vocab", [333, 4096, 20_011])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_row_alone_gives_the_bits_it_gives_among_63_others(vocab, mode):
    rng = random.Random(vocab)
    seqs = company(rng, 64)
    together = filled(vocab, seqs, logprobs_mode=mode)
    alone = [filled(vocab, [seq], logprobs_mode=mode) for seq in seqs]
    for step in range(3):
        logits = normal(64, vocab, seed=step)
        order = rng.sample(range(64), 64)
        made = together.sample(logits[order].clone(), order, [step] * 64)
        logprobs = made.logprobs()
        for row, slot in enumerate(order):
            single = alone[slot].sample(logits[slot : slot + 1].clone(), [0], [step])
            assert single.token_ids[0] == made.token_ids[row]
            assert single.logprobs().get(0) == logprobs.get(row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_holds_for_half_precision_logits(dtype):
    seqs = company(random.Random(1), 16)
    logits = normal(16, 1003).to(dtype)
    made = filled(1003, seqs).sample(logits.clone(), range(16), [0] * 16)
    for row, seq in enumerate(seqs):
        single = filled(1003, [seq]).sample(logits[row : row + 1].clone(), [0], [0])
        assert single.token_ids[0] == made.token_ids[row]
        assert single.logprobs().get(0) == made.logprobs().get(row)


def generate(sampler, seq, slot, start, stop):
    """Tokens start..stop of one sequence; its logits depend on the position alone."""
    for position in range(start, stop):
        row = normal(1, 500, seed=900 + position)
        seq.tokens.append(sampler.sample(row, [slot], [position]).token_ids.item())


@pytest.mark.parametrize("kw", KINDS)
def test_a_preempted_sequence_continues_with_the_same_draws_in_any_slot(kw):
    straight, broken = (sequence(SamplingParams(**kw), seed=4, prompt=[1, 5, 9]) for _ in range(2))
    generate(filled(500, [straight]), straight, 0, 0, 80)
    sampler = filled(500, [sequence(), sequence(), broken])
    generate(sampler, broken, 2, 0, 30)
    sampler.leave(2)
    sampler.join(SlotJoin.from_sequence(broken, 0))
    generate(sampler, broken, 0, 30, 80)
    assert broken.tokens == straight.tokens


def test_siblings_and_seeds_draw_differently_and_sibling_i_draws_as_seed_plus_i():
    logits = normal(1, 5000, scale=0.1)
    ids = {}
    for seed, index in ((1, 0), (1, 1), (2, 0), (3, 0)):
        sampler = filled(5000, [sequence(seed=seed, index=index)])
        ids[seed, index] = sampler.sample(logits.clone(), [0], [0]).token_ids.item()
    assert ids[1, 1] == ids[2, 0]
    assert len(set(ids.values())) == 3


def test_threads_do_not_change_the_bits():
    seqs = company(random.Random(3), 32)
    logits = normal(32, 50_021)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            made = filled(50_021, seqs).sample(logits.clone(), range(32), [0] * 32)
            found.append((made.token_ids.tolist(), made.logprobs()))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]
