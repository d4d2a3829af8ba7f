"""Constrained rows sampled before their mask: each token is as likely as under a mask."""

import numpy as np
import pytest
import torch

from quire.core.types import Sequence
from quire.sampling.philox import uniforms
from quire.sampling.sampler import Sampler
from quire.sampling.slot_join import SlotJoin
from tests.cpu.engine_of import request
from tests.cpu.made_grammars import DIGITS, END, Grammars, bound_to
from tests.cpu.sampling.p_values import chi_square

VOCAB, ROWS = 97, 6000
ALLOWED = sorted(DIGITS)


def sampled(logits, rows=ROWS, **params):
    """One token of each of so many sequences constrained to digits, and its outcome."""
    sampler = Sampler(VOCAB, rows, grammars=Grammars())
    for slot in range(rows):
        one = request(
            str(slot), [1, 2], 400, constraint=bound_to("digits"), eos=[END], seed=slot, **params
        )
        sampler.join(SlotJoin.from_sequence(Sequence(one, 0, [1, 2], (), max_len=402), slot))
    slots, positions = tuple(range(rows)), [0] * rows
    binding = sampler.prepare_masks(slots, np.zeros(rows, np.int32))
    made = sampler.sample(logits.expand(rows, -1).clone(), slots, positions, binding)
    return made, binding


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_are_as_likely_as_under_a_mask_from_the_start(temperature):
    logits = torch.linspace(-1.0, 2.0, VOCAB)[torch.randperm(VOCAB)][None]
    made, _ = sampled(logits, temperature=temperature)
    shares = (logits[0, ALLOWED] / temperature).softmax(-1).double().numpy()
    counts = np.bincount(made.token_ids.numpy(), minlength=VOCAB)
    assert counts[ALLOWED].sum() == ROWS
    assert chi_square(counts[ALLOWED], shares / shares.sum() * ROWS) > 1e-3


def test_what_is_barred_spoils_no_row():
    logits = torch.zeros(1, VOCAB)
    logits[0, [i for i in range(VOCAB) if i not in ALLOWED]] = torch.nan
    made, _ = sampled(logits, rows=50, temperature=1.0)
    assert not made.all_errors
    assert {*made.token_ids.tolist()} <= {*ALLOWED}


def test_greedy_rows_take_the_best_of_what_is_allowed():
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    logits[0, ALLOWED[3]] = 50.5
    made, _ = sampled(logits, rows=3)
    best = max(ALLOWED, key=lambda one: logits[0, one].item())
    assert made.token_ids.tolist() == [best] * 3
    assert made.top_logits.tolist() == [logits[0, best].item()] * 3


def test_a_second_draw_has_nothing_of_the_first():
    seeds, at = np.arange(4000, dtype=np.uint64), np.zeros(4000, np.uint64)
    one, two = uniforms(seeds, at), uniforms(seeds, at, draw=1)
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.06
