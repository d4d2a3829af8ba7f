"""Images and videos of Qwen2.5-Omni, as Qwen2.5-VL's, and recordings: a token for each 40 ms.

A video whose sound is read (use_audio_in_video) is one item: the tokens of its cells and of its
sound are divided into chunks of two seconds, of which each has those of its cells first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quire.errors import RequestError
from quire.media.audio_ops import LogMel
from quire.media.image_ops import to_tensor
from quire.media.processor import (
    SOUND_KWARGS,
    DecodedAudio,
    DecodedMedia,
    DecodedVideo,
    ExpandedItem,
    Expansion,
    KwargRange,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
    reads_sound,
)
from quire.media.processors import qwen2_5_vl
from quire.media.processors._qwen import Cells


class Processor(qwen2_5_vl.Processor):
    modalities: tuple[Modality, ...] = ("image", "video", "audio")
    tokens: ClassVar[dict[Modality, str]] = {
        "image": "<|IMAGE|>",
        "video": "<|VIDEO|>",
        "audio": "<|AUDIO|>",
    }
    marks: ClassVar[tuple[str, str]] = ("bos", "eos")
    """Ends of the names of the tokens around an item."""
    least_frames: ClassVar[int] = 3
    """Of a recording; fewer make no token."""
    most_seconds = 300
    """Of a recording."""
    marks_apart: ClassVar[int] = 0
    """Rotary positions between the two marks at an end of a video with sound."""
    allowed_kwargs: ClassVar = {
        **qwen2_5_vl.Processor.allowed_kwargs,
        **dict.fromkeys(SOUND_KWARGS, KwargRange(bool)),
    }

    def __init__(self, files: ProcessorFiles) -> None:
        config = {**files.config, **(files.config.get("thinker_config") or {})}
        # the position of a second has another name than in Qwen2.5-VL
        rate = int(config.get("position_id_per_seconds", 25))
        self._rate, self._chunk = rate, int(rate * float(config.get("seconds_per_chunk", 2)))
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

    def _read_settings(self, modality: Modality) -> dict[str, Any]:
        """Bounds of videos that have no file of their own are not those of images."""
        found = super()._read_settings(modality)
        if modality == "video" and "video" not in self.files.preprocessors:
            found |= {"min_pixels": None, "max_pixels": None, **self.defaults["video"]}
        return found

    def placeholder(self, modality: Modality, index: int) -> str:
        kind, (start, end) = "audio" if modality == "audio" else "vision", self.marks
        return f"<|{kind}_{start}|>{self.tokens[modality]}<|{kind}_{end}|>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        if isinstance(media, DecodedVideo) and media.sound is not None and reads_sound(kwargs):
            return self._process_with_sound(media, media.sound, kwargs)
        if not isinstance(media, DecodedAudio):
            return super().process(media, kwargs)
        self.check_seconds(media)
        samples, hop = media.samples, int(self._mel["hop"])
        frames = -(-len(samples) // hop)
        if frames < self.least_frames:
            shortest = (self.least_frames - 1) * hop / self.sampling_rate
            raise RequestError(f"the audio must be longer than {shortest:g} s", param="audio")
        seconds = len(samples) // self.sampling_rate + 2  # the last frame reads silence behind it
        features = LogMel(self._bins, seconds=seconds, **self._mel)(samples)[:, :frames]
        tensor = to_tensor("input_features", np.ascontiguousarray(features))
        return ProcessedMedia("audio", (tensor,), {"rows": self.audio_rows(frames)})

    def _process_with_sound(
        self, video: DecodedVideo, sound: DecodedAudio, kwargs: Settings
    ) -> ProcessedMedia:
        """order: of the rows of cells, and behind them those of the sound, which comes when."""
        seen, heard = super().process(video, kwargs), self.process(sound, {})
        sizes = {**seen.sizes, "sound": heard.sizes["rows"]}
        order = np.argsort(self.is_sound(sizes), kind="stable")
        order = np.argsort(order, kind="stable").astype(np.int32)
        return ProcessedMedia(
            "video", (*seen.tensors, *heard.tensors, to_tensor("order", order)), sizes
        )

    def is_sound(self, sizes: Settings) -> npt.NDArray[np.bool_]:
        """Whether each token of a video with sound, in order, is one of the sound."""
        pieces = self._chunks(self._times(sizes)), self._chunks(np.arange(sizes["sound"]))
        made: list[npt.NDArray[np.bool_]] = []
        for counts in itertools.zip_longest(*pieces, fillvalue=0):
            made += [np.full(count, kind) for count, kind in zip(counts, (False, True))]
        return np.concatenate(made)

    def _times(self, sizes: Settings) -> npt.NDArray[Any]:
        """Return the time of each cell of a video, in steps of positions."""
        pairs, rows, columns = self.grid_of("video", sizes)
        seconds = float(sizes["seconds"])
        return np.repeat(np.arange(pairs), rows * columns) * seconds * self._rate

    def _chunks(self, times: npt.NDArray[Any]) -> list[int]:
        """Return how many tokens each chunk has. A gap of several chunks in `times` makes chunks of
        one token behind it, as in transformers."""
        cuts = [0]
        for i, time in enumerate(times.tolist()):
            if time >= len(cuts) * self._chunk:
                cuts.append(i)
        return [end - start for start, end in itertools.pairwise([*cuts, len(times)])]

    def audio_rows(self, frames: int) -> int:
        """Return the rows of a recording with so many frames."""
        return ((frames - 1) // 2 + 1) // 2

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        pad = self.id_of("audio_token_id", self.tokens["audio"])
        if media.modality == "audio":
            rows = int(media.sizes["rows"])
            return Expansion((pad,) * rows, ((0, rows),), replaces=(pad,))
        if not media.sizes.get("sound"):
            return super().expand(media, index)
        cell = self.id_of("video_token_id", self.tokens["video"])
        (start, end), (begin, finish) = (
            [
                self.id_of(f"{kind}_{name}_token_id", f"<|{kind}_{mark}|>")
                for name, mark in zip(("start", "end"), self.marks)
            ]
            for kind in ("vision", "audio")
        )
        found = np.where(self.is_sound(media.sizes), pad, cell).tolist()
        ids = (start, begin, *found, finish, end)
        return Expansion(ids, ((2, len(found)),), replaces=(start, cell, end))

    def cells(self, item: ExpandedItem) -> Iterator[tuple[int, Cells]]:
        """Positions of recordings are those of text."""
        if item.modality == "audio":
            return
        if not item.sizes.get("sound"):
            yield from super().cells(item)
            return
        is_sound = self.is_sound(item.sizes)
        found = np.empty((3, len(is_sound)), np.int64)
        found[:, is_sound] = np.arange(item.sizes["sound"])
        _, found[:, ~is_sound] = next(super().cells(item))
        behind = int(found[:, -self.last_piece(item.sizes) :].max()) + 1
        marks = np.broadcast_to([[0], [self.marks_apart]], (2, 3)).T  # at an end, relative
        begin = 1 + self.marks_apart
        yield item.start, np.hstack((marks, found + begin, marks + begin + behind))

    def steps(self, item: ExpandedItem, cells: Cells) -> int:
        """Behind a video with sound: one more than its last token's, as in transformers."""
        if not item.sizes.get("sound"):
            return super().steps(item, cells)
        return int(cells[0, -1]) + 1

    def last_piece(self, sizes: Settings) -> int:
        """Return how many tokens the last part of one kind has, of a video with sound."""
        seen, heard = self._chunks(self._times(sizes)), self._chunks(np.arange(sizes["sound"]))
        return heard[-1] if len(heard) >= len(seen) else seen[-1]

    def id_of(self, field: str, text: str) -> int:
        older = field.replace("_id", "_index")
        return super().id_of(older if older in self.files.config else field, text)
