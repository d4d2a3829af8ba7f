"""EosMatcher adds the end of the text to a backend's matcher.

The raw matcher of a backend follows the form. A model may have several end tokens and a form may
name some of them; EosMatcher counts those that end the text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from quire.errors import RequestError
from quire.grammar.backends.base import MaskWords
from quire.grammar.vocabulary import Vocabulary


class RawMatcher(Protocol):
    """A backend's matcher, without an idea of the end."""

    fault: str | None

    @property
    def stop_tokens(self) -> frozenset[int]:
        """End tokens that the form does not name."""
        ...

    def accept(self, token: int) -> bool:
        """Take a token that the form allows here. False: nothing changed."""
        ...

    def rollback(self, tokens: int) -> None: ...

    def fill_mask(self, words: MaskWords) -> None:
        """Bits of what the form allows here. An end token that the form does not name may be set
        too, but only where the text is whole."""
        ...

    def count_accepted(self, tokens: Sequence[int]) -> int:
        """How many of them could be taken, up to and with the first of `stops`, which counts
        where the text is whole by then. Nothing changes."""
        ...

    def is_complete(self) -> bool: ...

    def is_terminated(self) -> bool:
        """Nothing that the form allows can follow."""
        ...

    def copy(self) -> RawMatcher: ...


class EosMask:
    """The end tokens of a vocabulary, as bits."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.ids = frozenset(vocabulary.eos_token_ids)
        mask = np.zeros(vocabulary.mask_words, np.uint32)
        for i in vocabulary.eos_token_ids:
            mask[i // 32] |= np.uint32(1 << (i % 32))
        self.mask: MaskWords = mask.view(np.int32)
        """The mask that allows nothing else."""
        self.word_indices = np.flatnonzero(self.mask)
        self.bits: MaskWords = self.mask[self.word_indices]


class EosMatcher:
    """A base.Matcher over a backend's own."""

    __slots__ = ("eos", "num_eos", "raw")

    def __init__(self, raw: RawMatcher, ends: EosMask, ended: int = 0) -> None:
        self.raw = raw
        self.eos = ends
        self.num_eos = ended
        """End tokens that were accepted."""

    def accept(self, token: int) -> bool:
        if not self.num_eos and self.raw.accept(token):
            return True
        if token in self.eos.ids and (self.num_eos or self.is_complete):
            self.num_eos += 1
            return True
        return False

    def rollback(self, tokens: int) -> None:
        of_ends = min(self.num_eos, tokens)
        self.num_eos -= of_ends
        if tokens > of_ends:
            self.raw.rollback(tokens - of_ends)

    def validate(self, tokens: Sequence[int]) -> int:
        taken = 0 if self.num_eos else self.raw.count_accepted(tokens)
        if taken == len(tokens):
            return taken
        is_over = bool(self.num_eos) or (taken > 0 and tokens[taken - 1] in self.raw.stop_tokens)
        if not is_over:
            next_one = tokens[taken]
            if next_one in self.raw.stop_tokens or next_one not in self.eos.ids:
                return taken
            if not self._is_complete_after(tokens[:taken]):  # an end that the form names elsewhere
                return taken
        rest = tokens[taken:]
        return taken + next((n for n, t in enumerate(rest) if t not in self.eos.ids), len(rest))

    def _is_complete_after(self, tokens: Sequence[int]) -> bool:
        if self.num_eos or not tokens:
            return bool(self.num_eos) or self.is_complete
        for token in tokens:
            assert self.raw.accept(token)
        try:
            return self.is_complete
        finally:
            self.raw.rollback(len(tokens))

    def fill_bitmask(self, words: MaskWords) -> None:
        if self.num_eos or self.raw.fault is not None:
            words[:] = self.eos.mask
            return
        self.raw.fill_mask(words)
        self.add_eos_bits(words)

    def add_eos_bits(self, words: MaskWords) -> None:
        """Set the end tokens' bits in what the form allows."""
        if self.raw.fault is not None:
            words[:] = self.eos.mask
        elif self.raw.is_complete():
            words[self.eos.word_indices] |= self.eos.bits

    @property
    def is_complete(self) -> bool:
        return self.raw.fault is None and (self.num_eos > 0 or self.raw.is_complete())

    @property
    def is_terminated(self) -> bool:
        return self.num_eos > 0 or self.raw.fault is not None or self.raw.is_terminated()

    @property
    def fault(self) -> str | None:
        return self.raw.fault

    def copy(self) -> EosMatcher:
        return EosMatcher(self.raw.copy(), self.eos, self.num_eos)


def stop_tokens_of(
    vocabulary: Vocabulary, named: Collection[int]
) -> tuple[frozenset[int], int | None]:
    """(what a backend may take for the end, what of it is none).

    End tokens that a form names are ordinary ones to its backend. Where it names all of them the
    backend, which must have one, gets another special token that no form comes to.
    """
    ends = frozenset(vocabulary.eos_token_ids) - set(named)
    if ends:
        return ends, None
    for i, _ in vocabulary.special_tokens:
        if i not in vocabulary.eos_token_ids and i not in named:
            return frozenset({i}), i
    raise RequestError("the form names every special token of the model; it must leave one")


def clear_bit(words: MaskWords, token: int | None) -> None:
    """Take a token out of a mask."""
    if token is not None:
        words.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
