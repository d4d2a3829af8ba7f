"""Tokens of bad words: the ids of each word inside a text and at the start of one, cached."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import RequestError
from quire.text.tokenizing.tokenizer import Tokenizer

MAX_TOKENS = 1024
MAX_CACHED_WORDS = 4096
"""Words come from requests."""
MAX_CACHED_CHARS = 64
"""Longest word whose tokens are cached, in characters."""


class BadWordTokens:
    """The tokens of words, by one tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._cached: dict[str, list[list[int]]] = {}

    def token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the ids of the forms of all words. Raises RequestError for too many."""
        made = [ids for word in words for ids in self._word_ids(word)]
        total = sum(map(len, made))
        if total > MAX_TOKENS:
            raise RequestError(
                f"bad_words are {total} tokens in all; at most {MAX_TOKENS} are allowed",
                param="bad_words",
            )
        return made

    def _word_ids(self, word: str) -> list[list[int]]:
        """The ids of a word inside a text (after a space) and at the start of one."""
        found = self._cached.get(word)
        if found is None:
            assert self._tokenizer is not None
            bare = word.lstrip(" ")
            forms = [self._tokenizer.encode(text, False) for text in (bare, " " + bare)]
            found = [ids for i, ids in enumerate(forms) if ids and ids not in forms[:i]]
            if len(self._cached) >= MAX_CACHED_WORDS:
                self._cached.clear()
            if len(word) <= MAX_CACHED_CHARS:
                self._cached[word] = found
        return [list(ids) for ids in found]
