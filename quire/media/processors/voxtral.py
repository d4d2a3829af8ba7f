"""Recordings of Voxtral: log-mel features of whole pieces of 30 s, and 375 tokens for each."""

from __future__ import annotations

import numpy as np

from quire.media.audio_ops import LogMel
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

MAX_PIECES = 20
"""Of a recording, as in quire.models.multimodal.voxtral."""


class Processor(WhisperFeatures):
    modalities: tuple[Modality, ...] = ("audio",)

    def __init__(self, files: ProcessorFiles) -> None:
        audio = files.config.get("audio_config") or {}
        self._bins = int(audio.get("num_mel_bins", 128))
        positions = int(audio.get("max_source_positions", 1500))
        super().__init__(files, self._bins, positions)
        self.most_seconds *= MAX_PIECES
        joined = int(audio.get("intermediate_size", 5120)) // int(audio.get("hidden_size", 1280))
        self._rows = positions // joined
        self._audio_id = int(files.config.get("audio_token_id") or 24)

    def placeholder(self, modality: Modality, index: int) -> str:
        return "[BEGIN_AUDIO][AUDIO]"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        assert isinstance(media, DecodedAudio)
        self.check_seconds(media)
        pieces = -(-len(media.samples) // self.longest_audio)
        whole = LogMel(self._bins, seconds=pieces * self.longest_audio // self.sampling_rate)
        features = whole(media.samples).reshape(self._bins, pieces, -1).transpose(1, 0, 2)
        tensor = to_tensor("input_features", np.ascontiguousarray(features))
        return ProcessedMedia("audio", (tensor,), {"pieces": pieces})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        rows, ids = int(media.sizes["pieces"]) * self._rows, (self._audio_id,)
        return Expansion(ids * rows, ((0, rows),), replaces=ids)
