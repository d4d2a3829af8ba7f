"""Times of words: which moment of a recording each token of an answer was written at.

A speech model's alignment heads look at the moment of the token that they write. Dynamic time
warping finds the path through their weights on which tokens and moments both go forward.

Axes: k tokens, F positions of the encoder
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.text.speech import TIME_STEP, SpeechTokens
from quire.text.transcript import Decode, Piece

UNSPACED_LANGUAGES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Their words have no spaces between them: every character is taken as one."""
OPENING = "\"'“¡¿([{-"
CLOSING = "\"'.。,，!！?？:：”)]}、"
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

DIAGONAL, DOWN, RIGHT = range(3)
"""Steps of a path to a cell: from the token and the moment before, from the token, the moment."""


@dataclass(frozen=True, slots=True)
class Word:
    """Seconds of the recording."""

    text: str
    start: float
    end: float


def token_times(weights: npt.NDArray[np.float32]) -> list[float]:
    """Return the seconds at which each token begins, from the beginning of the source.

    weights: [k, F], larger where a token is likelier at a position.
    """
    steps = _cheapest_steps(-weights.astype(np.float64))
    i, j = weights.shape
    first = [0] * i  # of each token: the first position of its path
    while i > 0 and j > 0:
        first[i - 1] = j - 1
        step = steps[i, j]
        i -= step in (DIAGONAL, DOWN)
        j -= step in (DIAGONAL, RIGHT)
    return [place * TIME_STEP for place in first]


def _cheapest_steps(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int8]:
    """Return the last step of the cheapest path to each cell: [k + 1, F + 1].

    Cells of an anti-diagonal depend on those before it alone, and are computed at once.
    """
    rows, columns = costs.shape
    steps = np.full((rows + 1, columns + 1), RIGHT, np.int8)
    before = np.full(rows + 1, np.inf, np.float32)  # of the last diagonal, by row
    last = before.copy()  # of the one before that
    last[0] = 0.0
    for total in range(2, rows + columns + 1):
        i = np.arange(max(1, total - columns), min(rows, total - 1) + 1)
        diagonal, down, right = last[i - 1], before[i - 1], before[i]
        best = np.where((diagonal < down) & (diagonal < right), DIAGONAL, RIGHT)
        best = np.where((down < diagonal) & (down < right), DOWN, best)
        least = np.choose(best, (diagonal, down, right))
        steps[i, total - i] = best
        last, before = before, np.full(rows + 1, np.inf, np.float32)
        before[i] = costs[i - 1, total - i - 1] + least
    return steps


def words_of(
    piece: Piece,
    times: Sequence[float],
    tokens: SpeechTokens,
    decode: Decode,
    language: str | None,
) -> list[Word]:
    """Return the words of a piece. times: of its tokens. language: a code; None: English."""
    found = []
    begins = (0.0, *times)
    for run in _runs_of_text(piece.token_ids, tokens):
        ids = [piece.token_ids[i] for i in run]
        for text, numbers in _split_words(ids, decode, spaced=language not in UNSPACED_LANGUAGES):
            start = piece.start + begins[run[numbers[0]]]
            end = piece.start + times[run[numbers[-1]]]
            found.append(Word(text, min(start, piece.end), min(end, piece.end)))
    return found


def _runs_of_text(ids: Sequence[int], tokens: SpeechTokens) -> Iterator[list[int]]:
    """Indexes of the tokens between time stamps."""
    run: list[int] = []
    for i, token in enumerate(ids):
        if token < tokens.end:
            run.append(i)
        elif token >= tokens.first_time and run:
            yield run
            run = []
    if run:
        yield run


def _split_words(
    ids: Sequence[int], decode: Decode, *, spaced: bool
) -> list[tuple[str, list[int]]]:
    """Return words, with the indexes of their tokens. Punctuation is part of its neighbour."""
    parts = list(_characters(ids, decode))
    if spaced:
        words: list[tuple[str, list[int]]] = []
        for text, numbers in parts:
            if not words or text.startswith(" ") or text.strip() in PUNCTUATION:
                words.append((text, numbers))
            else:
                words[-1] = words[-1][0] + text, words[-1][1] + numbers
        parts = words
    return [one for one in _join_punctuation(parts) if one[0].strip()]


def _characters(ids: Sequence[int], decode: Decode) -> Iterator[tuple[str, list[int]]]:
    """The shortest runs of tokens that are whole characters."""
    whole, offset = decode(list(ids)), 0
    first = 0
    for i in range(len(ids)):
        text = decode(list(ids[first : i + 1]))
        at = text.find(REPLACEMENT)
        if at < 0 or offset + at >= len(whole) or whole[offset + at] == REPLACEMENT:
            yield text, list(range(first, i + 1))
            first, offset = i + 1, offset + len(text)
    if first < len(ids):  # bytes that end within a character
        yield decode(list(ids[first:])), list(range(first, len(ids)))


def _join_punctuation(parts: Sequence[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    made: list[tuple[str, list[int]]] = []
    for text, numbers in reversed(parts):  # opening marks go to the word behind them
        if made and text.startswith(" ") and text.strip() in OPENING:
            made[-1] = text + made[-1][0], numbers + made[-1][1]
        else:
            made.append((text, numbers))
    made.reverse()
    joined: list[tuple[str, list[int]]] = []
    for text, numbers in made:
        if joined and not joined[-1][0].endswith(" ") and text in CLOSING:
            joined[-1] = joined[-1][0] + text, joined[-1][1] + numbers
        else:
            joined.append((text, numbers))
    return joined
