"""Segments and subtitles of answers with time stamps, and where recordings are cut."""

import numpy as np
import pytest

from quire.media.audio_ops import split_at_quiet
from quire.text.languages import LANGUAGE_NAMES, language_code
from quire.text.speech import SpeechTokens
from quire.text.transcript import Piece, segments_of, subtitles

TOKENS = SpeechTokens(
    start=101, end=100, previous=105, no_times=107, no_speech=106, first_time=200,
    tasks={"translate": 103, "transcribe": 104}, languages={"en": 102},
)  # fmt: skip


def at(seconds):
    return 200 + round(seconds / 0.02)


def segments(*ids, start=30.0, end=42.0):
    piece = Piece(start, end, ids, -0.5, 0.0)
    found = segments_of(piece, TOKENS, lambda ids: " ".join(map(str, ids)))
    return [(one.start, one.end, one.text) for one in found]


def test_segments_lie_between_time_stamps():
    ids = (at(0), 1, 2, at(2.5), at(2.5), 3, at(7), at(8), 4, 100)
    assert segments(*ids) == [(30.0, 32.5, "1 2"), (32.5, 37.0, "3"), (38.0, 42.0, "4")]
    assert segments(1, 2, 100) == [(30.0, 42.0, "1 2")]
    assert segments(at(1), at(2), 100) == []
    assert segments(at(1), 5, at(29)) == [(31.0, 42.0, "5")]  # none ends behind its piece


def test_prompts_of_tasks():
    assert TOKENS.prompt("en", "translate", times=True) == (101, 102, 103)
    plain = TOKENS.prompt("en", "transcribe", times=False, previous=(7, 8))
    assert plain == (105, 7, 8, 101, 102, 104, 107)
    assert TOKENS.has_times((101, 102, 104))
    assert not TOKENS.has_times(plain)
    assert not TOKENS.has_times((101,))


def test_subtitles_have_clocks():
    piece = Piece(0.0, 4000.0, (at(0), 1, at(1.5), at(2), 2), -0.5, 0.0)
    found = segments_of(piece, TOKENS, lambda ids: f" a --> {ids[0]}")
    assert subtitles(found, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\na -> 1\n\n2\n00:00:02,000 --> 01:06:40,000\na -> 2\n\n"
    )
    assert subtitles(found, "vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\na -> 1\n")


def test_a_text_that_repeats_itself_compresses():
    piece = Piece(0.0, 1.0, (), -0.5, 0.0)
    assert piece.compression_ratio("the same words " * 20) > 2.4
    assert piece.compression_ratio("Each of these words occurs a single time.") < 2.4
    assert piece.compression_ratio("") == 0.0


@pytest.mark.parametrize(
    ("given", "code"), [("en", "en"), ("English", "en"), ("pt-BR", "pt"), ("Haitian Creole", "ht")]
)
def test_languages_have_names_and_codes(given, code):
    assert language_code(given) == code
    assert len(LANGUAGE_NAMES) == 100


def test_recordings_are_cut_where_they_are_quiet():
    rate = 1000
    audio = np.random.default_rng(0).standard_normal(70 * rate).astype(np.float32)
    audio[27_000:27_300] *= 0.01
    audio[53_000:53_150] = 0
    pieces = split_at_quiet(audio, rate, 30 * rate)
    assert [27_000 <= pieces[0].stop <= 27_300, 53_000 <= pieces[1].stop <= 53_150] == [True, True]
    assert [pieces[0].start, pieces[1].start, pieces[-1].stop] == [0, pieces[0].stop, 70_000]
    assert all(len(one) <= 30 * rate for one in pieces)
    assert split_at_quiet(audio[:30_000], rate, 30 * rate) == [range(30_000)]
    assert len(split_at_quiet(np.zeros(31_000, np.float32), rate, 30 * rate)) == 2
