"""Images and recordings of Phi-4-multimodal as the hub has it: their placeholders are numbered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.media.processor import Expansion, ProcessedMedia, ProcessorFiles
from quire.media.processors import phi4_multimodal


class Processor(phi4_multimodal.Processor):
    text_placeholders = True

    def __init__(self, files: ProcessorFiles) -> None:
        config: dict[str, Any] = {**files.config}
        config["vision_config"] = config.get("img_processor") or {}
        config["audio_config"] = (config.get("audio_processor") or {}).get("config") or {}
        super().__init__(replace(files, config=config))

    def placeholder(self, modality: str, index: int) -> str:
        return f"<|{modality}_{index}|>"

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        return replace(super().expand(media, index), replaces=())
