"""Sequences, a sampler with its slots filled, and the exact distribution in plain float64."""

import torch

from quire.core.params import SamplingParams
from quire.core.types import Request, Sequence, StopConditions
from quire.sampling.sampler import Sampler
from quire.sampling.slot_join import SlotJoin


def sequence(params=None, *, name="r", prompt=(1, 2, 3), outputs=(), stop=None, seed=0, index=0):
    request = Request(
        name, tuple(prompt), stop or StopConditions(1000), params or SamplingParams(), seed=seed
    )
    return Sequence(request, index, [*prompt, *outputs], ([],))


def filled(vocab, sequences, **options):
    """A sampler whose slot i holds sequences[i]."""
    sampler = Sampler(vocab, max(1, len(sequences)), **options)
    for slot, seq in enumerate(sequences):
        sampler.join(SlotJoin.from_sequence(seq, slot))
    return sampler


def exact(logits, params):
    """Probabilities of one row [V] after temperature, min_p, top_k, top_p. float64."""
    p = (logits.double() / params.temperature).softmax(0)
    p[p < params.min_p * p.max()] = 0
    if params.top_k > 0:
        k = min(params.top_k, len(p))
        p[p < p.sort(descending=True).values[k - 1]] = 0
    p /= p.sum()
    values, order = p.sort(descending=True, stable=True)
    p[order[(values.cumsum(0) - values) >= params.top_p]] = 0
    return p / p.sum()


def chosen(sampler, logits, positions=None):
    """Sample all slots in order; ids as a list."""
    rows = len(logits)
    found = sampler.sample(logits.clone(), range(rows), positions or [0] * rows)
    assert found.all_errors == {}
    return found.token_ids.tolist()


def normal(rows, vocab, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
