"""Whisper: the log-mel features of one recording of at most 30 s, which are all the encoder reads.

It reads the whole of them, so the recording has no place in the decoder's prompt.
"""

from __future__ import annotations

import math

from quire.media.audio_ops import split_at_quiet
from quire.media.image_ops import to_tensor
from quire.media.processor import (
    DecodedAudio,
    DecodedMedia,
    Expansion,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._whisper import WhisperFeatures


class Processor(WhisperFeatures):
    modalities: tuple[Modality, ...] = ("audio",)

    def __init__(self, files: ProcessorFiles) -> None:
        self._positions = int(files.config["max_source_positions"])
        super().__init__(files, int(files.config["num_mel_bins"]), self._positions)

    def readable_seconds(self, kwargs: Settings) -> float:
        return math.inf if kwargs.get("pieces") else super().readable_seconds(kwargs)

    def placeholder(self, modality: Modality, index: int) -> str:
        return ""

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        """kwargs: `pieces` makes the features of each piece of a recording of any length."""
        assert isinstance(media, DecodedAudio)
        if kwargs.get("pieces"):
            pieces = split_at_quiet(media.samples, self.sampling_rate, self.longest_audio)
            tensors = tuple(
                to_tensor("input_features", self.log_mel(media.samples[one.start : one.stop]))
                for one in pieces
            )
            borders = (*(one.start for one in pieces), len(media.samples))
            return ProcessedMedia("audio", tensors, {"borders": borders})
        return ProcessedMedia("audio", (to_tensor("input_features", self.features(media)),))

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        return Expansion((0,) * self._positions, ((0, self._positions),))
