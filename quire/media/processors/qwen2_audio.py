"""Recordings of Qwen2-Audio: log-mel features, and a token for each 40 ms."""

from __future__ import annotations

import numpy as np

from quire.errors import RequestError
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

MIN_FRAMES = 3
"""Fewer make no token."""
EDGE_FRAMES = 4
"""Frames of silence behind the audio that its last position reads, and two more."""


class Processor(WhisperFeatures):
    modalities: tuple[Modality, ...] = ("audio",)
    takes_embeds = True

    def __init__(self, files: ProcessorFiles) -> None:
        audio = files.config.get("audio_config") or {}
        bins, positions = audio.get("num_mel_bins", 128), audio.get("max_source_positions", 1500)
        super().__init__(files, bins, positions)
        self._audio_id = int(files.config.get("audio_token_index", 151646))

    def placeholder(self, modality: Modality, index: int) -> str:
        return f"Audio {index}: <|audio_bos|><|AUDIO|><|audio_eos|>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        assert isinstance(media, DecodedAudio)
        frames = -(-len(media.samples) // self.log_mel.hop)
        if frames < MIN_FRAMES:
            shortest = (MIN_FRAMES - 1) * self.log_mel.hop / self.sampling_rate
            raise RequestError(f"the audio must be longer than {shortest:g} s", param="audio")
        features = self.features(media)[:, : frames + EDGE_FRAMES]
        mask = np.ones(frames, np.uint8)
        tensors = (
            to_tensor("input_features", features),
            to_tensor("feature_attention_mask", mask),
        )
        return ProcessedMedia("audio", tensors, {"rows": ((frames - 1) // 2 + 1) // 2})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        rows, ids = int(media.sizes["rows"]), (self._audio_id,)
        return Expansion(ids * rows, ((0, rows),), replaces=ids)
