"""Log-probabilities of prompts, chunk by chunk, until the first token takes them along.

A prompt that is preempted is computed again; each position is kept once.
"""

from __future__ import annotations

from quire.core.types import Row, Sequence, TokenLogprobs


class PromptLogprobs:
    """sequence -> what is known of its prompt positions 1, 2, ..., without gaps."""

    def __init__(self) -> None:
        self.known: dict[Sequence, list[TokenLogprobs]] = {}

    def add(self, row: Row, news: list[TokenLogprobs]) -> None:
        """Keep those of positions not seen yet. `news` begins at position row.start + 1."""
        if len(row.seq.tokens) > row.seq.prompt_len + 1:
            return  # recomputed after its first token, with which they were handed out
        known = self.known.setdefault(row.seq, [])
        known += news[max(len(known) - row.start, 0) :]

    def pop(self, seq: Sequence) -> list[TokenLogprobs] | None:
        """Hand them out, or forget them."""
        return self.known.pop(seq, None)
