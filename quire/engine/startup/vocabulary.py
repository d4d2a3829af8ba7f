"""Vocabulary of a tokenizer: the bytes of every token id, which grammars are compiled over."""

from __future__ import annotations

from collections.abc import Iterable

from quire.grammar.vocabulary import Vocabulary
from quire.text.tokenizing.token_bytes import build_token_bytes, special_tokens
from quire.text.tokenizing.tokenizer import Tokenizer


def build_vocabulary(tokenizer: Tokenizer, size: int, ends: Iterable[int]) -> Vocabulary:
    """Return the vocabulary. size: logits of the model. ends: ids that end a text (the model's).

    Ids without a logit cannot be sampled, and are left out.
    """
    special = special_tokens(tokenizer)
    ending = tuple(dict.fromkeys(i for i in ends if 0 <= i < size))
    for i in ending:  # an end token is special, flagged or not
        special.setdefault(i, tokenizer.backend.id_to_token(i) or "")
    tokens = build_token_bytes(tokenizer, special)[:size]
    held = tuple((i, name) for i, name in sorted(special.items()) if i < size)
    return Vocabulary(tuple(tokens), held, ending, size)
