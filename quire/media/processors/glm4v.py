"""Images and videos of GLM-4.1V: pairs of a video's frames are images, each before its second.

<|begin_of_image|><|image|>...<|end_of_image|>0<|begin_of_image|><|image|>...<|end_of_image|>1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from quire.media.processor import Expansion, Modality, Settings
from quire.media.processors._timed_video import TimedVideoProcessor


class Processor(TimedVideoProcessor):
    defaults: ClassVar[dict[Modality, Settings]] = {
        "image": {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}},
        "video": {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}},
    }
    tokens: ClassVar = {"image": "<|image|>", "video": "<|video|>"}

    def placeholder(self, modality: Modality, index: int) -> str:
        return f"<|begin_of_{modality}|>{self.tokens[modality]}<|end_of_{modality}|>"

    def image_frames(self, depth: int) -> tuple[int, int]:
        return depth, depth

    def time_of(self, pair: Sequence[float]) -> float:
        return pair[0]

    def expand_video(self, times: Sequence[float], rows: int, columns: int) -> Expansion:
        start = self.id_of("image_start_token_id", "<|begin_of_image|>")
        pad = self.id_of("image_token_id", self.tokens["image"])
        end = self.id_of("image_end_token_id", "<|end_of_image|>")
        ids: list[int] = []
        runs = []
        for time in times:
            ids.append(start)
            runs.append((len(ids), rows * columns))
            ids += [*[pad] * (rows * columns), end, *self.files.tokenize(str(int(time)))]
        video = self.id_of("video_token_id", self.tokens["video"])
        return Expansion(tuple(ids), tuple(runs), replaces=(video,))
