"""Images and videos of Qwen2.5-Omni, as Qwen2.5-VL's, and recordings: a token for each 40 ms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from quire.errors import RequestError
from quire.media.audio_ops import LogMel
from quire.media.image_ops import to_tensor
from quire.media.processor import (
    DecodedAudio,
    DecodedMedia,
    ExpandedItem,
    Expansion,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors import qwen2_5_vl
from quire.media.processors._qwen import Cells

MIN_FRAMES = 3
"""Fewer make no token."""
MOST_SECONDS = 300
"""Of a recording."""
AUDIO_TOKEN = "<|AUDIO|>"


class Processor(qwen2_5_vl.Processor):
    modalities: tuple[Modality, ...] = ("image", "video", "audio")
    tokens: ClassVar[dict[Modality, str]] = {
        "image": "<|IMAGE|>",
        "video": "<|VIDEO|>",
        "audio": AUDIO_TOKEN,
    }
    defaults: ClassVar[dict[Modality, Settings]] = {**qwen2_5_vl.Processor.defaults, "audio": {}}

    def __init__(self, files: ProcessorFiles) -> None:
        config = {**files.config, **(files.config.get("thinker_config") or {})}
        # the position of a second has another name than in Qwen2.5-VL
        rate = int(config.get("position_id_per_seconds", 25))
        config["vision_config"] = {**(config.get("vision_config") or {}), "tokens_per_second": rate}
        super().__init__(replace(files, config=config))
        stated = files.preprocessor("audio")
        self.sampling_rate = int(stated.get("sampling_rate") or 16_000)
        self._mel: dict[str, Any] = {
            "rate": self.sampling_rate,
            "n_fft": int(stated.get("n_fft") or 400),
            "hop": int(stated.get("hop_length") or 160),
        }
        self._bins = int((config.get("audio_config") or {}).get("num_mel_bins", 128))

    def placeholder(self, modality: Modality, index: int) -> str:
        if modality == "audio":
            return f"<|audio_bos|>{AUDIO_TOKEN}<|audio_eos|>"
        return f"<|vision_bos|>{self.tokens[modality]}<|vision_eos|>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        if not isinstance(media, DecodedAudio):
            return super().process(media, kwargs)
        samples, hop = media.samples, int(self._mel["hop"])
        if len(samples) > MOST_SECONDS * self.sampling_rate:
            raise RequestError(f"the audio is longer than {MOST_SECONDS} s", param="audio")
        frames = -(-len(samples) // hop)
        if frames < MIN_FRAMES:
            shortest = (MIN_FRAMES - 1) * hop / self.sampling_rate
            raise RequestError(f"the audio must be longer than {shortest:g} s", param="audio")
        seconds = len(samples) // self.sampling_rate + 2  # the last frame reads silence behind it
        features = LogMel(self._bins, seconds=seconds, **self._mel)(samples)[:, :frames]
        rows = ((frames - 1) // 2 + 1) // 2
        tensor = to_tensor("input_features", np.ascontiguousarray(features))
        return ProcessedMedia("audio", (tensor,), {"rows": rows})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        if media.modality != "audio":
            return super().expand(media, index)
        pad, rows = self.id_of("audio_token_id", AUDIO_TOKEN), int(media.sizes["rows"])
        return Expansion((pad,) * rows, ((0, rows),), replaces=(pad,))

    def cells(self, item: ExpandedItem) -> Iterator[tuple[int, Cells]]:
        """Positions of recordings are those of text."""
        if item.modality != "audio":
            yield from super().cells(item)

    def id_of(self, field: str, text: str) -> int:
        older = field.replace("_id", "_index")
        return super().id_of(older if older in self.files.config else field, text)
