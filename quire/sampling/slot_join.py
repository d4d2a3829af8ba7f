"""SlotJoin: all that a worker is sent of a sequence when the sequence gets a device slot.

It holds no `Sequence` and is plain data, so it can be sent to another process. A grammar is named
by its `Constraint`; the sampler of each process looks the compiled grammar up by that key.
"""

from __future__ import annotations

import msgspec

from quire.core.constraint import Constraint
from quire.core.params import SamplingParams
from quire.core.types import UNKNOWN, ForcedTokens, Sequence, StopConditions, ThinkingBudget


class SlotJoin(msgspec.Struct, frozen=True, array_like=True):
    """One sequence as the sampler sees it."""

    slot: int
    request_id: str
    index: int  # which of the request's n
    params: SamplingParams
    seed: int  # of this sequence: the request's, plus its index
    tokens: list[int]
    """Prompt and output so far, up to the first unknown token, without positions of the prompt that
    have embeddings in place of ids."""
    prompt_len: int
    max_len: int  # len(tokens) at which the sequence ends
    stop: StopConditions
    constraint: Constraint | None = None
    thinking: ThinkingBudget | None = None
    forced: ForcedTokens | None = None

    @classmethod
    def from_sequence(cls, seq: Sequence, slot: int | None = None) -> SlotJoin:
        """Copy what the sampler needs. slot: the sequence's own if not given."""
        request, tokens = seq.request, list(seq.tokens)
        if UNKNOWN in tokens[seq.prompt_len :]:  # one to come, or one that a preemption undid
            del tokens[tokens.index(UNKNOWN, seq.prompt_len) :]
        for embeds in reversed(request.prompt_embeds):
            del tokens[embeds.start : embeds.start + embeds.length]
        embedded = sum(embeds.length for embeds in request.prompt_embeds)
        return cls(
            seq.slot if slot is None else slot,
            request.id,
            seq.index,
            request.params,
            request.seed + seq.index,
            tokens,
            len(request.prompt) - embedded,
            seq.max_len - embedded,
            request.stop,
            request.constraint,
            request.thinking,
            request.forced,
        )

    @property
    def prompt_tokens(self) -> list[int]:
        return self.tokens[: self.prompt_len]

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.prompt_len :]
