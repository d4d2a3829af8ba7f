"""Images and videos of Qwen3-VL: the time of each pair of a video's frames is text before it.

<0.3 seconds><|vision_start|><|video_pad|>...<|vision_end|><1.3 seconds><|vision_start|>...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from quire.errors import Unsupported
from quire.media.processor import (
    DecodedVideo,
    ExpandedItem,
    Expansion,
    Modality,
    ProcessedMedia,
    Settings,
)
from quire.media.processors._pixels import HALF
from quire.media.processors._qwen import (
    Cells,
    PixelBounds,
    QwenProcessor,
    grid_cells,
    smart_resize,
)

_SETTINGS = {"patch_size": 16, "image_mean": HALF, "image_std": HALF}


class Processor(QwenProcessor):
    defaults: ClassVar[dict[Modality, Settings]] = {
        "image": _SETTINGS | {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
        "video": _SETTINGS
        | {"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}},
    }

    @property
    def row_width(self) -> int:
        levels = (self.files.config.get("vision_config") or {}).get("deepstack_visual_indexes")
        return super().row_width * (1 + len((8, 16, 24) if levels is None else levels))

    def capped(
        self, settings: Settings, bounds: PixelBounds, frames: int, factor: int
    ) -> PixelBounds:
        most = int(settings.get("max_video_tokens") or 768) * factor**2
        each = max(min(most, bounds.most // frames), int(bounds.least * 1.05))
        return bounds._replace(most=each * frames)

    def counted_frames(self, frames: int, depth: int) -> tuple[int, int]:
        return max(frames, depth), max(round(frames / depth), 1) * depth

    def target_size(
        self, height: int, width: int, factor: int, bounds: PixelBounds, frames: tuple[int, int]
    ) -> tuple[int, int]:
        """Bounds are for all frames of a video; a small one first grows to a cell."""
        if frames != (1, 1) and min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return smart_resize(height, width, factor, bounds, frames)

    def video_sizes(self, video: DecodedVideo, depth: int, kwargs: Settings) -> dict[str, Any]:
        """Times are those of the source: of the first and the last frame of a pair, halved."""
        info = video.info
        numbers = [*info.frames_indices]
        numbers += numbers[-1:] * (-len(numbers) % depth)
        times = [number / info.fps for number in numbers]
        pairs = zip(times[::depth], times[depth - 1 :: depth], strict=True)
        return {"times": tuple((first + last) / 2 for first, last in pairs)}

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        if media.modality == "image":
            return super().expand(media, index)
        start = self.id_of("vision_start_token_id", "<|vision_start|>")
        pad = self.id_of("video_token_id", "<|video_pad|>")
        end = self.id_of("vision_end_token_id", "<|vision_end|>")
        _, rows, columns = self.grid_of("video", media.sizes)
        if "times" not in media.sizes:
            raise Unsupported(
                "embeddings of videos have no times of frames, which this model's prompts have: "
                "give the videos",
                param="multi_modal_data",
            )
        ids: list[int] = []
        runs = []
        for time in media.sizes["times"]:
            ids += [*self.files.tokenize(f"<{time:.1f} seconds>"), start]
            runs.append((len(ids), rows * columns))
            ids += [*[pad] * (rows * columns), end]
        # The models' authors replace the marks around the placeholder too. transformers 5.12 and
        # later keep them.
        return Expansion(tuple(ids), tuple(runs), replaces=(start, pad, end))

    def cells(self, item: ExpandedItem) -> Iterator[tuple[int, Cells]]:
        _, rows, columns = self.grid_of(item.modality, item.sizes)
        for offset, _ in item.expansion.runs:
            yield item.start + offset, grid_cells(1, rows, columns)
