"""Facts of the encoder of an encoder-decoder model, from the files of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SpeechFacts:
    """An encoder that reads recordings."""

    features: tuple[int, int]  # [bins, frames] of the log-mel features of each
    multilingual: bool = True
    last_first_time: int = 50  # latest start of the first segment, in steps of 0.02 s

    @classmethod
    def from_hf(cls, found: Mapping[str, Any]) -> SpeechFacts:
        """Read config.json with the fields of the generation config over it."""
        return cls(
            (int(found["num_mel_bins"]), 2 * int(found["max_source_positions"])),
            bool(found.get("is_multilingual", True)),
            int(found.get("max_initial_timestamp_index", 50)),
        )

    @property
    def positions(self) -> int:
        """Positions of the encoder's output, of every recording."""
        return self.features[1] // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """The encoder of an encoder-decoder model, and the tokens that its config files force."""

    max_len: int  # positions of the longest source
    start_id: int  # the decoder's first token
    speech: SpeechFacts | None = None  # None: sources are token ids
    forced_first: int | None = None  # the first generated token
    forced_last: tuple[int, ...] = ()  # one of these ends an answer of the greatest length
    banned: tuple[int, ...] = ()
    banned_first: tuple[int, ...] = ()  # as the first token that is chosen
