"""Prediction drafter: proposes the tokens that a request predicts for its output.

The output is followed through the prediction: as long as its tokens are the predicted ones, those
behind them are proposed. Where one differs, it is taken for a replaced token, or for one that skips
a few predicted ones. What cannot be followed is found again by its last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.config.engine_config import SpeculationSection
from quire.core.drafters.base import HostDrafter
from quire.core.types import Sequence

NGRAM = 3
"""Tokens by which a lost place is found again."""
MAX_SKIP = 16
"""Predicted tokens that one other token skips at most."""
MAX_OTHERS = 4
"""Other tokens in a row after which the place is lost."""


class _Follower:
    """The place of one output in its prediction. at: index of the predicted token behind
    seq.tokens[:known]; -1: lost."""

    __slots__ = ("_others", "_places", "at", "known")

    def __init__(self, known: int) -> None:
        self.at, self.known = 0, known
        self._others = 0  # tokens in a row that were not predicted
        self._places: dict[int, int] | None = None  # hash of an n-gram -> latest place behind it

    def follow(self, prediction: tuple[int, ...], tokens: list[int], known: int) -> int:
        """Follow the output to `known`. Returns the place, or -1."""
        new = tuple(tokens[self.known : known])
        at, self.known = self.at, known
        if at >= 0 and prediction[at : at + len(new)] == new:
            self.at, self._others = at + len(new), 0
            return self.at
        follows = at >= 0 and prediction[at : at + len(new) - 1] == new[:-1]
        self._others = 1 if follows and len(new) > 1 else self._others + 1
        self.at = self._find(prediction, tokens, known)
        if self.at < 0 and follows and self._others <= MAX_OTHERS:
            self.at = _behind_other_token(prediction, at + len(new) - 1, new[-1])
        return self.at

    def _find(self, prediction: tuple[int, ...], tokens: list[int], known: int) -> int:
        if self._places is None:
            grams = zip(*(prediction[i:] for i in range(NGRAM)))
            self._places = dict(zip(map(hash, grams), range(NGRAM, len(prediction) + 1)))
        last = tuple(tokens[known - NGRAM : known])
        at = self._places.get(hash(last), -1)
        return at if prediction[max(at - NGRAM, 0) : max(at, 0)] == last else -1


def _behind_other_token(prediction: tuple[int, ...], at: int, token: int) -> int:
    """Return the place behind a token that is not the predicted one at `at`."""
    for begin in (at, max(at - MAX_OTHERS, 0)):
        around = prediction[begin : at + MAX_SKIP]
        if token in around:
            return begin + around.index(token) + 1
    return at + 1


class PredictionDrafter(HostDrafter):
    """For sequences whose request has a prediction; others get no proposals."""

    def __init__(self) -> None:
        self._followers: dict[Sequence, _Follower] = {}

    def propose(self, seq: Sequence, known: int, most: int) -> Seq[int]:
        prediction = seq.request.prediction
        follower = self._followers.get(seq)
        if follower is None:
            follower = self._followers[seq] = _Follower(seq.prompt_len)
        at = follower.follow(prediction, seq.tokens, known)
        return prediction[at : at + most] if at >= 0 else ()

    def remove(self, seq: Sequence) -> None:
        self._followers.pop(seq, None)


def build(section: SpeculationSection) -> HostDrafter:
    return PredictionDrafter()
