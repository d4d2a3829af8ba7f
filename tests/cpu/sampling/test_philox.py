"""Philox against published vectors, and the window of draws against single ones."""

import numpy as np
import pytest

from quire.sampling.philox import WINDOW, Uniforms, philox, uniforms
from tests.cpu.sampling.p_values import uniform_distance

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_the_words_are_those_of_the_authors_known_answers(counter, key, words):
    found = philox(np.array(counter, np.uint64), np.array(key, np.uint64))
    assert tuple(found.tolist()) == words


def test_draws_look_uniform_along_positions_and_along_seeds():
    many = np.arange(20_000, dtype=np.uint64)
    one = np.full_like(many, 7)
    assert uniform_distance(uniforms(one, many)) < 1.95
    assert uniform_distance(uniforms(many, one)) < 1.95


def test_positions_beyond_32_bits_and_negative_seeds_are_their_own():
    draws = Uniforms(3)
    for slot, seed in enumerate((5, -5, 5)):
        draws.join(slot, seed)
    found = draws.draw(np.array([0, 1, 2]), [3, 3, 3 + 2**32])
    assert len(set(found.tolist())) == 3


def test_the_window_gives_the_same_draws_as_single_calls_in_any_order():
    draws = Uniforms(4)
    draws.join(2, 99)
    positions = [0, 1, WINDOW - 1, WINDOW, 3 * WINDOW + 5, 2]
    found = [draws.draw(np.array([2]), [p])[0] for p in positions]
    seeds = np.full(len(positions), 99, np.uint64)
    assert found == uniforms(seeds, np.array(positions, np.uint64)).tolist()


def test_a_new_sequence_in_a_slot_does_not_see_the_old_ones_draws():
    draws = Uniforms(1)
    draws.join(0, 1)
    before = draws.draw(np.array([0]), [0])[0]
    draws.join(0, 2)
    assert draws.draw(np.array([0]), [0])[0] != before
