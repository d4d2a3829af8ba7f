"""Encoder format: how prompts are divided between an encoder and its decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.types import ForcedTokens, StopConditions
from quire.text.speech import SpeechFormat


@dataclass(frozen=True, slots=True)
class EncoderFormat:
    """What prompts of a model with an encoder become."""

    max_len: int  # tokens of the longest source
    start_id: int  # the decoder's first token
    forced_first: int | None = None
    forced_last: frozenset[int] = frozenset()
    banned: tuple[int, ...] = ()
    banned_first: tuple[int, ...] = ()
    speech: SpeechFormat | None = None  # None: the encoder reads tokens

    def forced_tokens(self, prompt: Sequence[int], stop: StopConditions) -> ForcedTokens | None:
        """Return what is forced behind a decoder prompt. None: nothing."""
        last = self.forced_last if stop.eos_ids else frozenset[int]()
        first = self.forced_first if len(prompt) == 1 else None
        times = None if self.speech is None else self.speech.time_rules(prompt)
        if first is None and not (last or self.banned or self.banned_first or times):
            return None
        end = len(prompt) + stop.max_tokens - 1
        banned = self.banned, self.banned_first
        return ForcedTokens(len(prompt), first, end, last, *banned, times)
