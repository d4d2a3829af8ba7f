"""Images and videos of Qwen3-VL: the time of each pair of a video's frames is text before it.

<0.3 seconds><|vision_start|><|video_pad|>...<|vision_end|><1.3 seconds><|vision_start|>...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from quire.media.processor import Expansion, Modality, Settings
from quire.media.processors._pixels import HALF
from quire.media.processors._qwen import PixelBounds
from quire.media.processors._timed_video import TimedVideoProcessor

_SETTINGS = {"patch_size": 16, "image_mean": HALF, "image_std": HALF}


class Processor(TimedVideoProcessor):
    default_levels: ClassVar[tuple[int, ...]] = (8, 16, 24)
    """Layers of the tower whose states are rows too, if config.json does not say."""
    defaults: ClassVar[dict[Modality, Settings]] = {
        "image": _SETTINGS | {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
        "video": _SETTINGS
        | {"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}},
    }

    @property
    def row_width(self) -> int:
        levels = (self.files.config.get("vision_config") or {}).get("deepstack_visual_indexes")
        return super().row_width * (1 + len(self.default_levels if levels is None else levels))

    def capped(
        self, settings: Settings, bounds: PixelBounds, frames: int, factor: int
    ) -> PixelBounds:
        most = int(settings.get("max_video_tokens") or 768) * factor**2
        each = max(min(most, bounds.most // frames), int(bounds.least * 1.05))
        return bounds._replace(most=each * frames)

    def time_of(self, pair: Sequence[float]) -> float:
        return (pair[0] + pair[-1]) / 2

    def expand_video(self, times: Sequence[float], rows: int, columns: int) -> Expansion:
        start = self.id_of("vision_start_token_id", "<|vision_start|>")
        pad = self.id_of("video_token_id", "<|video_pad|>")
        end = self.id_of("vision_end_token_id", "<|vision_end|>")
        ids: list[int] = []
        runs = []
        for time in times:
            ids += [*self.files.tokenize(f"<{time:.1f} seconds>"), start]
            runs.append((len(ids), rows * columns))
            ids += [*[pad] * (rows * columns), end]
        # The models' authors replace the marks around the placeholder too. transformers 5.12 and
        # later keep them.
        return Expansion(tuple(ids), tuple(runs), replaces=(start, pad, end))
