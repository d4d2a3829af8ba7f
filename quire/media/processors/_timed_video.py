"""Videos whose pairs of frames are separate runs of a prompt, each with its time in text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from quire.errors import Unsupported
from quire.media.processor import DecodedVideo, ExpandedItem, Expansion, ProcessedMedia, Settings
from quire.media.processors._qwen import (
    Cells,
    PixelBounds,
    QwenProcessor,
    grid_cells,
    smart_resize,
)


class TimedVideoProcessor(QwenProcessor):
    """Base of these families. Times are those of the source."""

    @abstractmethod
    def expand_video(self, times: Sequence[float], rows: int, columns: int) -> Expansion:
        """Return the tokens of a video with these times of pairs, and cells of each."""

    @abstractmethod
    def time_of(self, pair: Sequence[float]) -> float:
        """Return the time of a pair of frames in seconds, by those of its frames."""

    def target_size(
        self, height: int, width: int, factor: int, bounds: PixelBounds, frames: tuple[int, int]
    ) -> tuple[int, int]:
        """Where bounds are for all frames, an item smaller than a cell grows to one first."""
        if frames != (1, 1) and min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return smart_resize(height, width, factor, bounds, frames)

    def video_frames(self, frames: int, depth: int) -> tuple[int, int]:
        return max(frames, depth), max(round(frames / depth), 1) * depth

    def video_sizes(self, video: DecodedVideo, depth: int, kwargs: Settings) -> dict[str, Any]:
        numbers = [*video.info.frames_indices]
        numbers += numbers[-1:] * (-len(numbers) % depth)
        times = [number / video.info.fps for number in numbers]
        pairs = zip(*(times[i::depth] for i in range(depth)), strict=True)
        return {"times": tuple(self.time_of(pair) for pair in pairs)}

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        if media.modality == "image":
            return super().expand(media, index)
        _, rows, columns = self.grid_of("video", media.sizes)
        if "times" not in media.sizes:
            raise Unsupported(
                "embeddings of videos have no times of frames, which this model's prompts have: "
                "give the videos",
                param="multi_modal_data",
            )
        return self.expand_video(media.sizes["times"], rows, columns)

    def cells(self, item: ExpandedItem) -> Iterator[tuple[int, Cells]]:
        _, rows, columns = self.grid_of(item.modality, item.sizes)
        for offset, _ in item.expansion.runs:
            yield item.start + offset, grid_cells(1, rows, columns)
