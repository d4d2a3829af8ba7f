"""Stop check: ends a sequence by its tokens: EOS, stop ids, length, with a minimum length first.

Stop strings are found by quire.text, which aborts the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.types import Sequence


class StopResult(NamedTuple):
    """How a sequence ended. `token` is the stop id, unless that is EOS."""

    reason: str  # "stop" | "length"
    token_id: int | None = None


def check_stop(seq: Sequence, token: int, length: int) -> StopResult | None:
    """Return how a token that makes the sequence `length` tokens long ends it; None: it does not.

    Order: the minimum keeps it alive, then EOS, then stop ids, then the length.
    """
    stop = seq.request.stop
    if token in seq.stop_ids and length - seq.prompt_len >= stop.min_tokens:
        if token in stop.eos_ids:
            return StopResult("stop")
        return StopResult("stop", token)
    return StopResult("length") if length >= seq.max_len else None


def append_tokens(seq: Sequence, at: int, ids: Seq[int]) -> tuple[int, StopResult | None]:
    """Replace the unknown token at `at` by accepted ones, up to one that ends the sequence. Tokens
    that later steps will yield stay behind them.

    Returns the number of tokens kept, and how the sequence ends, if it does.
    """
    if not ids:
        del seq.tokens[at:]  # as are those of later steps
    if at + len(ids) >= seq.max_len or not seq.stop_ids.isdisjoint(ids):
        for kept, token in enumerate(ids, 1):
            done = check_stop(seq, token, at + kept)
            if done is not None:
                seq.tokens[at:] = ids[:kept]
                return kept, done
    seq.tokens[at : at + 1] = ids
    return len(ids), None
