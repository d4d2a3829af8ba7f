"""Images of SmolVLM: as of Idefics 3. Videos: frames that are whole images, each with its time.

You are provided the following series of two frames from a 0:00:04 [H:MM:SS] video.\\n\\n
Frame from 00:01:<fake_token_around_image><global-img>...<fake_token_around_image>\\nFrame from ...
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.media.image_ops import resize, to_tensor
from quire.media.processor import (
    DecodedMedia,
    DecodedVideo,
    Expansion,
    Modality,
    Pixels,
    ProcessedMedia,
    Settings,
)
from quire.media.processors import idefics3
from quire.media.processors._pixels import scale_shift

SAMPLING = {"fps": 1, "max_frames": 64}
"""Of frames, where files do not say it: that of the released checkpoints."""
SKIPPED = 1.0
"""Seconds at both ends of a long video that are not read."""
WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)


class Processor(idefics3.Processor):
    modalities: tuple[Modality, ...] = ("image", "video")
    text_placeholders = True  # that of a video is no token

    def placeholder(self, modality: str, index: int) -> str:
        return "<video>" if modality == "video" else super().placeholder(modality, index)

    @property
    def video_settings(self) -> dict[str, Any]:
        """Settings of videos, with what files leave out."""
        stated = self.files.preprocessor("video").items()
        settings = {**self.defaults, **{key: one for key, one in stated if one is not None}}
        sampling = {**SAMPLING, **(settings.get("video_sampling") or {})}
        return settings | sampling | {"size": sampling.get("video_size") or settings["size"]}

    def frame_indices(self, total: int, fps: float, kwargs: Settings) -> list[int]:
        if fps <= 0 or kwargs.get("num_frames", 1) < 0:
            return super().frame_indices(total, fps, kwargs)
        settings = self.video_settings
        most = int(kwargs.get("num_frames", settings["max_frames"]))
        rate = float(kwargs.get("fps", settings["fps"]))
        if rate <= 0:
            return super().frame_indices(total, fps, {**kwargs, "num_frames": most})
        seconds, first, last = total / fps, 0, total - 1
        if seconds - 2 * SKIPPED > most * rate:
            first, last = int(SKIPPED * fps), min(int(total - SKIPPED * fps), last)
        if first >= last:
            first, last = 0, total - 1
        count = max(min(round(rate * seconds), most), 1)
        return [int(i) for i in np.unique(np.linspace(first, last, count, dtype=int))]

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        if not isinstance(media, DecodedVideo):
            return super().process(media, kwargs)
        settings = {**self.video_settings, **kwargs}
        side = int(settings["max_image_size"]["longest_edge"])
        if side != self.side:
            raise ConfigError(
                f"video_preprocessor_config.json makes frames of {side} pixels; the model's vision "
                f"tower reads {self.side}"
            )
        frames = [self._frame(one, settings) for one in media.frames]
        info = media.info
        rate = info.fps if info.fps > 0 else 24.0
        tensors = (
            to_tensor("pixels", np.stack(frames)),
            to_tensor("scale_shift", scale_shift(settings)),
        )
        times = tuple(number / rate for number in info.frames_indices)
        return ProcessedMedia("video", tensors, {"times": times, "seconds": int(info.duration)})

    def _frame(self, pixels: Pixels, settings: Settings) -> Pixels:
        resample = int(settings["resample"])
        if settings["do_resize"]:
            edge = min(int(settings["size"]["longest_edge"]), idefics3.LONGEST)
            pixels = resize(pixels, *idefics3.edge_size(pixels, edge), resample)
        return resize(pixels, self.side, self.side, resample)

    def item_text(self, media: ProcessedMedia, index: int, following: str = "") -> str:
        form = self.placeholder(media.modality, index)
        if media.modality != "video":
            return form
        times, seconds = media.sizes["times"], timedelta(seconds=media.sizes["seconds"])
        return (
            f"You are provided the following series of {number_in_words(len(times))} frames from a "
            f"{seconds} [H:MM:SS] video.\n{frame_text(times[0])}{form}\n\n"
        )

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        if media.modality != "video":
            return super().expand(media, index)
        around, whole = self.token("<fake_token_around_image>"), self.token("<global-img>")
        ids: list[int] = []
        runs = []
        for number, time in enumerate(media.sizes["times"]):
            if number:  # the text of the first is in that of the prompt
                ids += self.files.tokenize(frame_text(time))
            ids += (around, whole)
            runs.append((len(ids), self.rows))
            ids += [*[self.image_id] * self.rows, around]
        return Expansion(tuple(ids), tuple(runs))


def frame_text(time: float) -> str:
    """Return what is before a frame at this time, in seconds."""
    return f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:"


def number_in_words(number: int) -> str:
    """Return a number below 1000 in English: "one hundred and twenty-one"."""
    words = WORDS.split()
    if number < 20:
        return words[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return words[18 + tens] + (f"-{words[rest]}" if rest else "")
    hundreds, rest = divmod(number, 100)
    return f"{words[hundreds]} hundred" + (f" and {number_in_words(rest)}" if rest else "")
