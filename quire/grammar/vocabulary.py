"""Vocabulary of a model as plain data, made by quire.engine.startup.vocabulary from a tokenizer."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The text of each token id."""

    tokens: tuple[bytes, ...]
    """Bytes by id; b"" for ids without text: no mask allows those."""
    special_tokens: tuple[tuple[int, str], ...]
    """Ids of marks and their names: never part of free text, only where a form names them."""
    eos_token_ids: tuple[int, ...]
    """Any of them ends a text, where it may end."""
    size: int
    """Of the logits: a mask has as many bits. Ids past `tokens` have no text."""

    def __post_init__(self) -> None:
        if not self.eos_token_ids:
            raise ValueError("structured output needs at least one end token")
        if len(self.tokens) > self.size:
            raise ValueError(f"{len(self.tokens)} tokens have {self.size} logits")

    @property
    def mask_words(self) -> int:
        """32-bit words in a mask."""
        return (self.size + 31) // 32


class SpecialTokenNames:
    """Names of special tokens within texts. Where two begin at one place, the longer counts."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.ids = {name: i for i, name in vocabulary.special_tokens if name}
        self.of = {i: name for name, i in self.ids.items()}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def split(self, text: str) -> list[str | int]:
        """A text in pieces: ids for names, and the texts between."""
        found: list[str | int] = []
        start = 0
        for name in self._any.finditer(text):
            found += [text[start : name.start()], self.ids[name[0]]]
            start = name.end()
        return [piece for piece in (*found, text[start:]) if piece != ""]
