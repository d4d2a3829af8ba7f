"""Images and videos of Qwen3-Omni, in cells as Qwen3-VL's, and recordings: 13 tokens a second.

Videos have no times in text: their positions are those of real time, in whole steps of
position_id_per_seconds. transformers keeps fractions of steps, where pairs of frames have some.
Tokens of a video with sound are in the order of their times.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from quire.media.processor import Modality, Settings
from quire.media.processors import qwen2_5_omni, qwen3_vl

DEFAULT_LEVELS = 3
"""Layers of the vision tower whose states are rows too, if config.json does not say."""


class Processor(qwen2_5_omni.Processor):
    tokens: ClassVar[dict[Modality, str]] = {
        "image": "<|image_pad|>",
        "video": "<|video_pad|>",
        "audio": "<|audio_pad|>",
    }
    marks: ClassVar[tuple[str, str]] = ("start", "end")
    defaults = qwen3_vl.Processor.defaults
    least_frames = 1
    most_seconds = 1200
    marks_apart = 1

    @property
    def row_width(self) -> int:
        levels = (self.files.config.get("vision_config") or {}).get("deepstack_visual_indexes")
        return super().row_width * (1 + (DEFAULT_LEVELS if levels is None else len(levels)))

    def audio_rows(self, frames: int) -> int:
        """A chunk of a recording has a row for 8 frames; a rest of fewer counts as well."""
        chunk = 2 * int((self.files.config.get("audio_config") or {}).get("n_window", 50))
        return frames // chunk * -(-chunk // 8) + -(-(frames % chunk) // 8)

    def is_sound(self, sizes: Settings) -> npt.NDArray[np.bool_]:
        times = np.concatenate((self._times(sizes), np.arange(sizes["sound"])))
        return np.argsort(times, kind="stable") >= len(times) - int(sizes["sound"])

    def last_piece(self, sizes: Settings) -> int:
        return 1
