"""Log-probabilities of prompts, chunk by chunk, until the first token takes them along.

A prompt that is preempted is computed again; each position is kept once.
"""

from __future__ import annotations

from quire.core.types import UNKNOWN, Row, Sequence, TokenLogprobs


class PromptLogprobsBuffer:
    """sequence -> what is known of its prompt positions, without gaps.

    The first is the one after those found in the prefix cache, which nobody computes.
    """

    def __init__(self) -> None:
        self.known: dict[Sequence, list[TokenLogprobs]] = {}

    def add(self, row: Row, news: list[TokenLogprobs]) -> None:
        """Keep those of positions not seen yet. `news` begins at position row.start + 1."""
        seq = row.seq
        if len(seq.tokens) > seq.prompt_len and seq.tokens[seq.prompt_len] != UNKNOWN:
            return  # recomputed after its first token, with which they were handed out
        known = self.known.setdefault(seq, [])
        known += news[max(seq.cached + len(known) - row.start, 0) :]

    def needs_full_prompt(self, seq: Sequence) -> bool:
        """Whether a sequence that comes back must compute its prompt: the cache judges nothing."""
        return seq.preemptions > 0 and seq.request.params.prompt_logprobs is not None

    def pop(self, seq: Sequence) -> list[TokenLogprobs] | None:
        """Hand them out, or forget them."""
        return self.known.pop(seq, None)
