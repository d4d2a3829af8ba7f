"""Images and videos of Qwen2-VL: a token for each cell, between vision_start and vision_end."""

from __future__ import annotations

from typing import ClassVar

from quire.media.processor import Modality, Settings
from quire.media.processors._qwen import QwenProcessor


class Processor(QwenProcessor):
    defaults: ClassVar[dict[Modality, Settings]] = {
        "image": {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
        "video": {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}},
    }
