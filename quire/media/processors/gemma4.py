"""Images of Gemma 4: of any shape, as many whole squares of patches as fit. Frames of videos are
such images, each with its time in text. Recordings: log-mel features, and a token for each 40 ms.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError, RequestError
from quire.media.image_ops import resize, to_tensor
from quire.media.processor import (
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    Expansion,
    KwargRange,
    MediaProcessor,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import image_settings, scale_shift

SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Rows of an image that the model was trained for, at most."""
USUAL = {
    "resample": 3,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": False,
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
    "patch_size": 16,
    "pooling_kernel_size": 3,
}
"""What the files of a checkpoint leave out."""
IDS = {
    "boi_token_id": 255_999,
    "eoi_token_id": 258_882,
    "image_token_id": 258_880,
    "video_token_id": 258_884,
    "boa_token_id": 256_000,
    "eoa_token_index": 258_883,
    "audio_token_id": 258_881,
}
"""Fields of config.json -> ids of tokens where it leaves them out."""
MAX_ROWS = 8960
"""Of a video: 128 frames of the usual size."""


class Processor(MediaProcessor):
    modalities: tuple[Modality, ...] = ("image", "video", "audio")
    most_seconds = 30
    allowed_kwargs: ClassVar = {"max_soft_tokens": KwargRange(int, SOFT_TOKENS[0], SOFT_TOKENS[-1])}

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        given: list[Modality] = []
        if files.config.get("vision_config") is not None:
            given += ("image", "video")
        if files.config.get("audio_config") is not None:
            given.append("audio")
        self.modalities = tuple(given)
        self.settings: dict[Modality, dict[str, Any]] = {
            "image": image_settings(files, {**USUAL, "max_soft_tokens": 280}),
            "video": {**USUAL, "max_soft_tokens": 70, **files.preprocessors.get("video", {})},
        }
        text = files.config.get("text_config") or {}
        self.bidirectional = text.get("use_bidirectional_attention") == "vision"
        self.features = FlooredMel(files.preprocessor("audio"))
        self.sampling_rate = self.features.rate

    def placeholder(self, modality: Modality, index: int) -> str:
        return str(self.files.processor.get(f"{modality}_token") or f"<|{modality}|>")

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        if isinstance(media, DecodedAudio):
            return self._process_audio(media)
        video = isinstance(media, DecodedVideo)
        settings = {**self.settings["video" if video else "image"], **kwargs}
        most = settings["max_soft_tokens"]
        if most not in SOFT_TOKENS:
            raise RequestError(
                f"max_soft_tokens is {most}; it must be one of {', '.join(map(str, SOFT_TOKENS))}",
                param="mm_processor_kwargs",
            )
        if isinstance(media, DecodedVideo):
            frames = media.frames
        else:
            assert isinstance(media, DecodedImage)
            frames = media.pixels[None]
        patch, pool = int(settings["patch_size"]), int(settings["pooling_kernel_size"])
        height, width = whole_squares(frames.shape[1], frames.shape[2], patch, pool, most)
        resample = int(settings["resample"])
        made = np.stack([resize(one, height, width, resample) for one in frames])
        # the model's own normalization, of numbers from 0 to 1 to -1 to 1, is one step with that
        factors = 2 * scale_shift(settings) - np.array([[0.0], [1.0]], np.float32)
        tensors = to_tensor("pixels", made), to_tensor("scale_shift", factors)
        rows = height * width // (patch * pool) ** 2
        if not isinstance(media, DecodedVideo):
            return ProcessedMedia("image", tensors, {"rows": rows})
        if rows * len(made) > MAX_ROWS:
            raise RequestError(
                f"the video has {len(made)} frames of {rows} tokens; the product must be at most "
                f"{MAX_ROWS}: set num_frames of media_io_kwargs, or max_soft_tokens",
                param="video",
            )
        rate = media.info.fps if media.info.fps > 0 else 24.0
        times = tuple(number / rate for number in media.info.frames_indices)
        return ProcessedMedia("video", tensors, {"rows": rows, "times": times})

    def _process_audio(self, audio: DecodedAudio) -> ProcessedMedia:
        self.check_seconds(audio)
        made = self.features(audio.samples)
        if not len(made):
            least = self.features.least / self.sampling_rate
            raise RequestError(f"the audio must have {least:g} s at least", param="audio")
        rows = -(-len(made) // 4)
        return ProcessedMedia("audio", (to_tensor("features", made),), {"rows": rows})

    def item_text(self, media: ProcessedMedia, index: int, following: str = "") -> str:
        form = self.placeholder(media.modality, index)
        times = media.sizes.get("times")
        return form if not times else f"{minutes(times[0])} {form}"

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        modality, rows = media.modality, int(media.sizes["rows"])
        names = (
            ("boa_token_id", "eoa_token_index")
            if modality == "audio"
            else ("boi_token_id", "eoi_token_id")
        )
        start, end = (self._id(name) for name in names)
        pad = self._id(f"{modality}_token_id")
        ids, runs = [start], [(1, rows)]
        for time in media.sizes.get("times", ())[1:]:  # the first is in the text of the prompt
            ids += [*[pad] * rows, end, *self.files.tokenize(f" {minutes(time)} "), start]
            runs.append((len(ids), rows))
        ids += [*[pad] * rows, end]
        both = self.bidirectional and modality != "audio"
        return Expansion(tuple(ids), tuple(runs), bidirectional=both, replaces=(pad,))

    def _id(self, name: str) -> int:
        found = self.files.config.get(name)
        return IDS[name] if found is None else int(found)


def minutes(seconds: float) -> str:
    """Return a time as mm:ss."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def whole_squares(height: int, width: int, patch: int, pool: int, most: int) -> tuple[int, int]:
    """Return (height, width) in whole squares of pool x pool patches, at most so many of them,
    nearly of the same ratio."""
    side = pool * patch
    factor = math.sqrt(most * side**2 / (height * width))
    rows, columns = int(factor * height / side), int(factor * width / side)
    if not rows:
        rows, columns = 1, min(width // height, most)
    elif not columns:
        rows, columns = min(height // width, most), 1
    return rows * side, columns * side


class FlooredMel:
    """ln(|rfft(hann * x)| @ filters + floor), of windows whose first is centred at the start."""

    def __init__(self, hf: Settings) -> None:
        """hf: of the feature extractor. Raises ConfigError for what no released model has."""
        for name in ("preemphasis", "dither"):
            if hf.get(name):
                raise ConfigError(f"preprocessor_config.json: {name} is {hf[name]}; it must be 0")
        if hf.get("per_bin_mean") is not None or hf.get("per_bin_stddev") is not None:
            raise ConfigError(
                "preprocessor_config.json: per_bin_mean and per_bin_stddev must be null"
            )
        self.rate = int(hf.get("sampling_rate") or 16_000)
        width = round(self.rate * float(hf.get("frame_length_ms", 20.0)) / 1000)
        self.hop = round(self.rate * float(hf.get("hop_length_ms", 10.0)) / 1000)
        self.width, self.floor = (
            int(hf.get("frame_length") or width),
            float(hf.get("mel_floor", 1e-3)),
        )
        self.least = self.width + 1 - self.width // 2
        self._scale = np.float32(hf.get("input_scale_factor", 1.0))
        self._n_fft = 2 ** math.ceil(math.log2(self.width)) * (2 if hf.get("fft_overdrive") else 1)
        angles = 2 * np.pi * np.arange(self.width) / self.width
        self._window = (0.5 - 0.5 * np.cos(angles)).astype(np.float32)
        low, top = float(hf.get("min_frequency", 0.0)), float(hf.get("max_frequency", 8000.0))
        bins = int(hf.get("feature_size", 128))
        self._filters = htk_filters(self._n_fft // 2 + 1, bins, self.rate, low, top)

    def __call__(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[n] -> [frames, bins]; only windows with a sample behind them count."""
        padded = np.pad(samples * self._scale, (self.width // 2, 0))
        if len(padded) <= self.width:
            return np.empty((0, self._filters.shape[1]), np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.width + 1)[:: self.hop]
        spectrum = np.abs(np.fft.rfft(windows[:, :-1] * self._window, self._n_fft, axis=1))
        return np.log(spectrum @ self._filters + self.floor).astype(np.float32)


def htk_filters(
    frequencies: int, bins: int, rate: int, low: float, top: float
) -> npt.NDArray[np.float64]:
    """Triangular filters, evenly spaced on HTK's mel scale: [frequencies, bins]."""
    least, most = (2595 * math.log10(1 + hertz / 700) for hertz in (low, top))
    mels = np.linspace(least, most, bins + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    at, widths = np.linspace(0, rate // 2, frequencies)[:, None], np.diff(edges)
    rising, falling = (at - edges[:-2]) / widths[:-1], (edges[2:] - at) / widths[1:]
    found: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return found
