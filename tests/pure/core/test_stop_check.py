"""The documented order of reasons to end a sequence, of one token and of several."""

from __future__ import annotations

import random

import pytest

from quire.core.scheduling.stop_check import StopResult, append_tokens, check_stop
from quire.core.types import UNKNOWN, StopConditions
from tests.pure.core.builders import sequence

EOS, STOP, OTHER = 7, 8, 1


def check(token, outputs, **stop):
    seq = sequence(prompt=(1, 2, 3), stop=StopConditions(eos_ids=frozenset({EOS}), **stop))
    return check_stop(seq, token, 3 + outputs)


@pytest.mark.parametrize(
    ("token", "outputs", "stop", "want"),
    [
        (OTHER, 1, {"max_tokens": 2}, None),
        (OTHER, 2, {"max_tokens": 2}, StopResult("length")),
        (EOS, 1, {"max_tokens": 2}, StopResult("stop")),
        (EOS, 2, {"max_tokens": 2}, StopResult("stop")),
        (STOP, 1, {"max_tokens": 2}, None),
        (STOP, 1, {"max_tokens": 2, "token_ids": frozenset({STOP})}, StopResult("stop", STOP)),
        (EOS, 1, {"max_tokens": 2, "token_ids": frozenset({EOS})}, StopResult("stop")),
        (EOS, 2, {"max_tokens": 9, "min_tokens": 3}, None),
        (EOS, 3, {"max_tokens": 9, "min_tokens": 3}, StopResult("stop")),
        (STOP, 2, {"max_tokens": 9, "min_tokens": 3, "token_ids": frozenset({STOP})}, None),
        (EOS, 3, {"max_tokens": 3, "min_tokens": 9}, StopResult("length")),
    ],
)
def test_check_stop_follows_the_documented_order(token, outputs, stop, want):
    assert check(token, outputs, **stop) == want


@pytest.mark.parametrize("seed", range(40))
def test_several_tokens_are_appended_up_to_the_one_that_ends_the_sequence(seed):
    rng = random.Random(seed)
    ids = tuple(rng.choice([EOS, STOP, OTHER, OTHER, OTHER]) for _ in range(rng.randint(1, 4)))
    stop = StopConditions(
        max_tokens=rng.randint(1, 5),
        min_tokens=rng.randint(0, 3),
        eos_ids=frozenset({EOS}),
        token_ids=frozenset({STOP}) if seed % 2 else frozenset(),
    )
    seq = sequence(prompt=(1, 2, 3), stop=stop)
    want, end = [], None
    while len(want) < len(ids) and end is None:
        want.append(ids[len(want)])
        end = check_stop(seq, want[-1], 3 + len(want))
    seq.tokens.append(UNKNOWN)
    assert append_tokens(seq, 3, ids) == (len(want), end)
    assert seq.tokens == [1, 2, 3, *want]
