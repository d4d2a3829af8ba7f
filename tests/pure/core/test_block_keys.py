"""Keys of blocks: the same whatever was hashed before, and in however many calls."""

from __future__ import annotations

from array import array
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.kv import block_keys
from quire.core.kv.block_keys import BlockKeys
from quire.core.kv.cross_blocks import source_digest
from tests.pure.core.builders import sequence


@pytest.fixture(autouse=True, scope="module")
def short_spans():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_keys, "SPAN", 3)
        patch.setattr(block_keys, "MAX_SPANS", 4)
        yield


def plain_keys(seq, n, size):
    """The definition, block by block."""
    keys, parent = [], source_digest(seq.request)
    for i in range(n):
        chunk = array("i", seq.tokens[i * size : (i + 1) * size]).tobytes()
        keys.append(parent := sha256(parent + chunk).digest())
    return keys


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=30).map(tuple)
cuts = st.lists(st.integers(0, 30), max_size=4).map(sorted)


@given(
    size=st.integers(1, 3),
    prompts=st.lists(st.tuples(tokens, cuts, st.sampled_from([b"", b"x"])), max_size=6),
)
def test_remembered_spans_change_no_key(size, prompts):
    keys = BlockKeys(size)
    for prompt, calls, salt in prompts:
        seq = sequence(prompt=prompt, salt=salt)
        most = len(prompt) // size
        for n in [min(one, most) for one in calls] + [most]:
            assert keys.first(seq, n) == plain_keys(seq, n, size)


def test_prompts_that_begin_alike_are_hashed_once(monkeypatch):
    hashed = []
    monkeypatch.setattr(block_keys, "sha256", lambda data: hashed.append(data) or sha256(data))
    keys = BlockKeys(2)
    keys.first(sequence(prompt=range(12)), 6)
    first = len(hashed)
    keys.first(sequence(prompt=[*range(12), 5, 6]), 7)
    assert (first, len(hashed)) == (6, 7)
