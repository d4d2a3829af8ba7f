"""Prompt logprobs buffer: collects prompt logprobs by chunk until the first token.

A preempted prompt is computed again; each position is kept once.
"""

from __future__ import annotations

from quire.core.types import UNKNOWN, Row, Sequence, TokenLogprobs


class PromptLogprobsBuffer:
    """sequence -> logprobs of its prompt positions, without gaps.

    They begin after the positions found in the prefix cache, which are not computed.
    """

    def __init__(self) -> None:
        self.known: dict[Sequence, list[TokenLogprobs]] = {}

    def add(self, row: Row, logprobs: list[TokenLogprobs]) -> None:
        """Keep the logprobs of new positions. `news` begins at position row.start + 1."""
        seq = row.seq
        if len(seq.tokens) > seq.prompt_len and seq.tokens[seq.prompt_len] != UNKNOWN:
            return  # recomputed after its first token, which had them
        known = self.known.setdefault(seq, [])
        known += logprobs[max(seq.cached + len(known) - row.start, 0) :]

    def needs_full_prompt(self, seq: Sequence) -> bool:
        """Whether a preempted sequence must recompute its prompt: cached blocks lack logprobs."""
        return seq.preemptions > 0 and seq.request.params.prompt_logprobs is not None

    def pop(self, seq: Sequence) -> list[TokenLogprobs] | None:
        """Remove and return the logprobs of a sequence."""
        return self.known.pop(seq, None)
