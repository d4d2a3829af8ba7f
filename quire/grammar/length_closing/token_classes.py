"""Classes of the tokens of a vocabulary, looked up when a text has to be completed.

One object for each vocabulary and process, built once (a second for 150,000 tokens) and never
changed. A class is a row of bits, like a mask (quire.grammar.backends.base).
"""

from __future__ import annotations

import re
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache, partial

import numpy as np

from quire.grammar.backends.base import MaskWords
from quire.grammar.vocabulary import SpecialTokenNames, Vocabulary

_UTF8 = (
    rb"[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}"
    rb"|\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}"
    rb"|\xf4[\x80-\x8f][\x80-\xbf]{2}"
)
_WITHIN = re.compile(rb'(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\/bfnrt]|' + _UTF8 + rb")+", re.DOTALL)
_TEXT = re.compile(rb"(?:[\x09\x0a\x0d\x20-\x7e]|" + _UTF8 + rb")+", re.DOTALL)
_FILLER = re.compile(rb"[a-z]+")
OPENERS = (b"{", b"[", b",")
"""Each may begin one value more."""
MAX_PIECE_BYTES = 32
"""Bytes of the longest token that a closing is written with."""


class TokenClasses:
    """Tokens by their bytes, and classes of them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        pieces = self.pieces = vocabulary.tokens
        self.eos_tokens = vocabulary.eos_token_ids
        self.special = frozenset(i for i, _ in vocabulary.special_tokens) | frozenset(
            self.eos_tokens
        )
        self._new_mask = vocabulary.mask_words
        self.names = SpecialTokenNames(vocabulary)
        self.ids: dict[bytes, int] = {}
        for token, piece in enumerate(pieces):
            if piece and token not in self.special:
                self.ids.setdefault(piece, token)
        self.longest = min(max(map(len, self.ids), default=1), MAX_PIECE_BYTES)
        self.weights = bytes(min(sum(map(piece.count, OPENERS)), 255) for piece in pieces)
        self.heaviest = max((self.weights[token] for token in self.ids.values()), default=1)
        self._classify()
        self.fillers = self._fillers()
        self.fewest = lru_cache(maxsize=4096)(partial(_fewest, weakref.proxy(self)))
        self._sorted = sorted(self.ids)
        self._joined = b"\n".join(self._sorted)
        lengths = np.fromiter(map(len, self._sorted), np.int64, len(self._sorted))
        self._starts = np.cumsum(lengths + 1) - lengths - 1

    def _classify(self) -> None:
        pieces, ordinary = self.pieces, self.ids.values()
        self.light = self.mask_of(t for t in range(len(pieces)) if self.weights[t] < 2)
        self.within = self.mask_of(t for t in ordinary if _WITHIN.fullmatch(pieces[t]))
        self.quoted = self.mask_of(
            t for t in ordinary if pieces[t][-1:] == b'"' and _WITHIN.fullmatch(pieces[t][:-1])
        )
        self.text = self.mask_of(t for t in ordinary if _TEXT.fullmatch(pieces[t]))
        self.short = self.mask_of([*self._shortest(), *(self.special - set(self.eos_tokens))])
        self.eos_mask = self.mask_of(self.eos_tokens)

    def mask_of(self, tokens: Iterable[int]) -> MaskWords:
        """A row of bits that is set for these tokens."""
        bits = np.zeros(self._new_mask * 32, np.uint8)
        bits[list(tokens)] = 1
        row: MaskWords = np.packbits(bits, bitorder="little").view(np.int32)
        return row

    def _shortest(self) -> list[int]:
        """For each byte the shortest tokens that begin with it."""
        lengths: dict[int, int] = {}
        for piece in self.ids:
            lengths[piece[0]] = min(len(piece), lengths.get(piece[0], len(piece)))
        return [token for piece, token in self.ids.items() if len(piece) == lengths[piece[0]]]

    def _fillers(self) -> list[int]:
        """Tokens of letters only, of many lengths, the longest first."""
        found: dict[int, int] = {}
        for piece, token in self.ids.items():
            if len(piece) <= MAX_PIECE_BYTES and _FILLER.fullmatch(piece):
                found.setdefault(len(piece), token)
        return [found[length] for length in sorted(found, reverse=True)]

    def min_tokens_by_offset(self, text: bytes) -> list[tuple[int, int] | None]:
        """For each place: fewest tokens from there to the end, and the bytes of the first."""
        best: list[tuple[int, int] | None] = [None] * len(text) + [(0, 0)]
        for at in range(len(text) - 1, -1, -1):
            for end in range(min(len(text), at + self.longest), at, -1):
                rest = best[end]
                known = best[at]
                if rest is None or (known is not None and known[0] <= rest[0] + 1):
                    continue
                if text[at:end] in self.ids:
                    best[at] = (rest[0] + 1, end - at)
        return best

    def tokens_of(self, words: MaskWords) -> list[int]:
        """Which tokens a row of bits is set for."""
        places = words.nonzero()[0]
        bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, 32)
        rows, columns = bits.nonzero()
        found: list[int] = (places[rows] * 32 + columns).tolist()
        return found

    def tokens_with_prefix(self, text: bytes) -> list[int]:
        """Tokens that begin with this, or are this."""
        first = bisect_left(self._sorted, text)
        last = bisect_right(self._sorted, text + b"\xff" * 8)
        return [self.ids[piece] for piece in self._sorted[first:last]]

    def tokens_containing(self, text: bytes) -> list[int]:
        """Tokens that contain this, and perhaps a few more."""
        found = []
        at = self._joined.find(text)
        while at >= 0:
            place = int(np.searchsorted(self._starts, at, side="right")) - 1
            found.append(self.ids[self._sorted[place]])
            at = self._joined.find(text, at + 1)
        return found


def _fewest(classes: TokenClasses, text: bytes) -> tuple[int, ...] | None:
    """The text in as few tokens as can be. None: no tokens write it."""
    best = classes.min_tokens_by_offset(text)
    if best[0] is None:
        return None
    tokens_of, at = [], 0
    while at < len(text):
        step = best[at]
        assert step is not None
        tokens_of.append(classes.ids[text[at : at + step[1]]])
        at += step[1]
    return tuple(tokens_of)
