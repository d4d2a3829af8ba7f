"""check_stop: the documented order of reasons to end a sequence."""

from __future__ import annotations

import pytest

from quire.core.scheduling.stop_check import StopResult, check_stop
from quire.core.types import StopConditions
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
