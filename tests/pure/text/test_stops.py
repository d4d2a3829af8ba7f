"""Stop strings are found however the text is cut into pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.output.stop_strings import StopWindow

letters = st.text("ab ", max_size=24)
words = st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=4)


def run(pieces, stops, include=False):
    """(text given out, stop string, whether anything was given out and later found to be cut)"""
    window = StopWindow(stops, include)
    out = ""
    for piece in pieces:
        found = window.push(piece)
        out += found.text
        if found.stop is not None:
            return out, found.stop
    return out + window.finish(), None


def plainly(text, stops, include=False):
    """The same by looking at the whole text: earliest end, then longest."""
    ends = [
        (i, -len(s), s) for s in stops for i in range(len(s), len(text) + 1) if text[:i].endswith(s)
    ]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


@given(letters, words, st.lists(st.integers(0, 24), max_size=6), st.booleans())
def test_any_split_gives_the_result_of_the_whole(text, stops, cuts, include):
    at = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    assert run(pieces, stops, include) == plainly(text, stops, include)


@given(letters, words)
def test_nothing_given_out_is_part_of_a_stop_string(text, stops):
    window, out = StopWindow(stops), ""
    for char in text:
        piece = window.push(char)
        out += piece.text
        if piece.stop is not None:
            break
    assert plainly(text, stops)[0].startswith(out)


def test_the_match_that_ends_first_wins():
    assert run(["abcdef"], ["bcde", "cd"]) == ("ab", "cd")


def test_of_two_that_end_together_the_longer_is_cut():
    assert run(["xx</s>"], ["s>", "</s>"]) == ("xx", "</s>")


def test_the_stop_string_stays_if_requested_and_the_text_after_it_is_cut():
    assert run(["hello END more"], ["END"], include=True) == ("hello END", "END")


def test_only_what_may_begin_a_stop_string_is_held_back():
    window = StopWindow(["STOP"])
    assert window.push("hello").text == "he"
    assert window.push(" world").text == "llo wo"
    assert window.finish() == "rld"
    assert StopWindow(["STOP"], include=True).push("hello").text == "hello"


def test_no_match_may_end_in_text_that_is_not_searched():
    window = StopWindow(["ab"])
    assert window.push("abab", search=False).stop is None
    assert window.push("xx").stop is None
    window = StopWindow(["ab"])
    window.push("xa", search=False)
    assert window.push("b").stop == "ab"  # it ends in searched text


@pytest.mark.parametrize("stop", ["🦊", "e\u0301", "\n\n", "\x00"])
def test_a_stop_string_may_be_any_text(stop):
    assert run([*f"abc{stop}def"], [stop]) == ("abc", stop)


def test_many_stop_strings_cost_no_more_than_those_with_the_right_end():
    stops = [f"{i:05d}x" for i in range(10_000)]
    assert run([*"ab 00042x cd"], stops) == ("ab ", "00042x")
