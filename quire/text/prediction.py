"""Predictions: the tokens that a request predicts for its output, of text or ids."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.params import SamplingParams
from quire.errors import RequestError
from quire.text.prompts import check_vocabulary
from quire.text.tokenizing.tokenizer import Tokenizer

SWITCH = "speculative"
"""Key of extra_args that switches drafts off, for clients that cannot send a field of quire."""


def speculates(params: SamplingParams) -> bool:
    """Return whether a request may have drafts."""
    switch = (params.extra_args or {}).get(SWITCH)
    return params.speculative is not False and switch not in (False, "false")


def predicted_tokens(
    params: SamplingParams, tokenizer: Tokenizer | None, *, most: int, vocab: int
) -> tuple[int, ...]:
    """Return the predicted tokens of a request; (): it predicts none, or has no drafts.

    most: tokens that an output can have. What is longer is cut: it is a hint. vocab: size of the
    vocabulary. Raises: RequestError.
    """
    given = params.prediction
    if not given or not speculates(params):
        return ()
    if isinstance(given, str):
        if tokenizer is None:
            raise RequestError(
                "prediction as text needs a tokenizer, this engine has none (skip_tokenizer_init);"
                " give token ids",
                param="prediction",
            )
        given = _encode(given, tokenizer, most)
    ids: Sequence[int] = given[:most]
    check_vocabulary(ids, vocab, "prediction")
    return tuple(ids)


def _encode(text: str, tokenizer: Tokenizer, most: int) -> list[int]:
    """Only as many characters as `most` tokens hold are tokenized."""
    bound = tokenizer.max_chars(most)
    return list(tokenizer.encode(text if bound is None else text[:bound], False))
