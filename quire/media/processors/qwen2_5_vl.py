"""Images and videos of Qwen2.5-VL: as Qwen2-VL's, with positions of time in real time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from quire.media.processor import DecodedVideo, ExpandedItem, KwargRange, Settings
from quire.media.processors import qwen2_vl
from quire.media.processors._qwen import Cells, QwenProcessor, grid_cells


class Processor(QwenProcessor):
    defaults = qwen2_vl.Processor.defaults
    allowed_kwargs: ClassVar = {
        **QwenProcessor.allowed_kwargs,
        "fps": KwargRange(float, 0.01, 1000),  # of the frames as they were sampled
    }

    def video_sizes(self, video: DecodedVideo, depth: int, kwargs: Settings) -> dict[str, Any]:
        info = video.info
        sampled = len(info.frames_indices) / info.total_num_frames * info.fps
        return {"seconds": depth / float(kwargs.get("fps", sampled))}  # of a pair of frames

    def cells(self, item: ExpandedItem) -> Iterator[tuple[int, Cells]]:
        interval = 1.0
        if item.modality == "video":
            vision = self.files.config.get("vision_config") or {}
            interval = float(vision.get("tokens_per_second", 4)) * item.sizes.get("seconds", 1.0)
        pairs, rows, columns = self.grid_of(item.modality, item.sizes)
        yield item.start, grid_cells(pairs, rows, columns, interval)
