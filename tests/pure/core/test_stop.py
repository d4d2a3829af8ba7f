"""When a sequence ends, in the documented order."""

from __future__ import annotations

import pytest

from quire.core.stop import Finish, finish
from quire.core.types import Stop
from tests.pure.core.made import sequence

EOS, STOP, OTHER = 7, 8, 1


def judge(token, outputs, **stop):
    seq = sequence(prompt=(1, 2, 3), stop=Stop(eos_ids=frozenset({EOS}), **stop))
    return finish(seq, token, 3 + outputs)


@pytest.mark.parametrize(
    ("token", "outputs", "stop", "want"),
    [
        (OTHER, 1, {"max_tokens": 2}, None),
        (OTHER, 2, {"max_tokens": 2}, Finish("length")),
        (EOS, 1, {"max_tokens": 2}, Finish("stop")),
        (EOS, 2, {"max_tokens": 2}, Finish("stop")),
        (STOP, 1, {"max_tokens": 2}, None),
        (STOP, 1, {"max_tokens": 2, "token_ids": frozenset({STOP})}, Finish("stop", STOP)),
        (EOS, 1, {"max_tokens": 2, "token_ids": frozenset({EOS})}, Finish("stop")),
        (EOS, 2, {"max_tokens": 9, "min_tokens": 3}, None),
        (EOS, 3, {"max_tokens": 9, "min_tokens": 3}, Finish("stop")),
        (STOP, 2, {"max_tokens": 9, "min_tokens": 3, "token_ids": frozenset({STOP})}, None),
        (EOS, 3, {"max_tokens": 3, "min_tokens": 9}, Finish("length")),
    ],
)
def test_a_token_ends_a_sequence_as_documented(token, outputs, stop, want):
    assert judge(token, outputs, **stop) == want
