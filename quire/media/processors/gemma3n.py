"""Images of Gemma 3n, all of one size, and recordings of up to 30 s, all with as many tokens.

The token at the end of an item is one of its rows: its vector is not in the table of the text.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError, RequestError
from quire.media.image_ops import to_tensor
from quire.media.processor import (
    DecodedAudio,
    DecodedMedia,
    Expansion,
    MediaProcessor,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import (
    HALF,
    image_settings,
    pixels_of,
    resized_and_cropped,
    scale_shift,
    size_of,
)
from quire.media.processors.gemma4 import htk_filters

USUAL = {
    "do_resize": True,
    "size": {"height": 768, "width": 768},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": False,
    "image_mean": HALF,
    "image_std": HALF,
}
"""What the files of a checkpoint leave out."""
PIXELS = 16
"""Along a side, for each place of the map whose squares are averaged."""
MULTIPLE = 128
"""Recordings are filled up to a multiple of so many samples."""


class Processor(MediaProcessor):
    modalities: tuple[Modality, ...] = ("image", "audio")
    most_seconds = 30
    parts: ClassVar = {
        "image": (
            "boi_token_id",
            "image_token_id",
            "eoi_token_id",
            "<start_of_image>",
            "<end_of_image>",
        ),
        "audio": (
            "boa_token_id",
            "audio_token_id",
            "eoa_token_id",
            "<start_of_audio>",
            "<end_of_audio>",
        ),
    }
    """Fields of config.json with the tokens of an item, and the text of those around it."""
    ids: ClassVar = {
        "boi_token_id": 255_999,
        "image_token_id": 262_145,
        "eoi_token_id": 262_144,
        "boa_token_id": 256_000,
        "audio_token_id": 262_273,
        "eoa_token_id": 262_272,
    }
    """Where config.json leaves them out."""

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.settings = image_settings(files, USUAL)
        self._check_size()
        self.features = EmphasizedFrames(files.preprocessor("audio"))
        self.sampling_rate = self.features.rate
        self.rows = {
            "image": int(files.config.get("vision_soft_tokens_per_image") or 256),
            "audio": int(files.config.get("audio_soft_tokens_per_image") or 188),
        }

    def _check_size(self) -> None:
        """Raise ConfigError if the tower cannot make its rows of images of this size."""
        step = PIXELS * math.isqrt(
            int(self.files.config.get("vision_soft_tokens_per_image") or 256)
        )
        height, width = size_of(self.settings)
        if height != width or height % step:
            raise ConfigError(
                f"preprocessor_config.json: size is {height} x {width}; images of this model must "
                f"be square, and a side a multiple of {step}"
            )

    def placeholder(self, modality: Modality, index: int) -> str:
        return f"<{modality}_soft_token>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        if isinstance(media, DecodedAudio):
            return self._process_audio(media)
        pixels = resized_and_cropped(pixels_of(media), self.settings)[None]
        factors = to_tensor("scale_shift", scale_shift(self.settings))
        return ProcessedMedia("image", (to_tensor("pixels", pixels), factors))

    def _process_audio(self, audio: DecodedAudio) -> ProcessedMedia:
        self.check_seconds(audio)
        made = self.features(audio.samples)
        if not len(made):
            least = self.features.least / self.sampling_rate
            raise RequestError(f"the audio must have {least:g} s at least", param="audio")
        return ProcessedMedia("audio", (to_tensor("features", made),))

    def item_text(self, media: ProcessedMedia, index: int, following: str = "") -> str:
        """The line breaks around items form tokens with those of the prompt."""
        *_, start, end = self.parts[media.modality]
        return f"\n\n{start}{self.placeholder(media.modality, index)}{end}\n\n"

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        start, pad, end = (self._id(name) for name in self.parts[media.modality][:3])
        rows = self.rows[media.modality]
        ids = (start, *[pad] * rows, end)
        return Expansion(ids, ((1, rows + 1),), replaces=(start, pad, end))

    def _id(self, name: str) -> int:
        found = self.files.config.get(name)
        return int(self.ids[name] if found is None else found)


class EmphasizedFrames:
    """ln(max(|rfft(hann * e)| @ filters, floor)), e being a window whose high tones are louder."""

    def __init__(self, hf: Settings) -> None:
        """hf: of the feature extractor. Raises ConfigError for what is random."""
        if hf.get("dither"):
            raise ConfigError(f"preprocessor_config.json: dither is {hf['dither']}; it must be 0")
        if hf.get("preemphasis_htk_flavor") is False:
            raise ConfigError("preprocessor_config.json: preemphasis_htk_flavor must be true")
        self.rate = int(hf.get("sampling_rate") or 16_000)
        self.width = round(self.rate * float(hf.get("frame_length_ms", 32.0)) / 1000)
        self.hop = round(self.rate * float(hf.get("hop_length_ms", 10.0)) / 1000)
        self.least = self.width // MULTIPLE * MULTIPLE + 1
        self.floor = float(hf.get("mel_floor", 1e-5))
        self._emphasis = float(hf.get("preemphasis", 0.97))
        self._scale = np.float32(hf.get("input_scale_factor", 1.0))
        overdrive = 1 if hf.get("fft_overdrive") is False else 2
        self._n_fft = 2 ** math.ceil(math.log2(self.width)) * overdrive
        angles = 2 * np.pi * np.arange(self.width, dtype=np.float32) / self.width
        self._window = (0.5 * (1 - np.cos(angles))).astype(np.float32)
        low, top = float(hf.get("min_frequency", 125.0)), float(hf.get("max_frequency", 7600.0))
        bins = int(hf.get("feature_size", 128))
        self._filters = htk_filters(self._n_fft // 2 + 1, bins, self.rate, low, top)
        self._mean = _of_bins(hf, "per_bin_mean", bins, 0.0)
        self._stddev = _of_bins(hf, "per_bin_stddev", bins, 1.0)

    def __call__(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[n] -> [frames, bins]."""
        padded = np.pad(samples * self._scale, (0, -len(samples) % MULTIPLE))
        if len(padded) <= self.width:
            return np.empty((0, self._filters.shape[1]), np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.width + 1)[:: self.hop]
        loud = windows[:, :-1] - self._emphasis * windows[:, [0, *range(self.width - 1)]]
        spectrum = np.abs(np.fft.rfft(loud * self._window, self._n_fft, axis=1))
        features = np.log(np.maximum(spectrum @ self._filters, self.floor))
        made: npt.NDArray[np.float32] = ((features - self._mean) / self._stddev).astype(np.float32)
        return made


def _of_bins(hf: Settings, name: str, bins: int, usual: float) -> npt.NDArray[np.float64]:
    """Read numbers of each bin. Raises ConfigError."""
    found = np.full(bins, usual) if hf.get(name) is None else np.asarray(hf[name], np.float64)
    if found.shape != (bins,):
        raise ConfigError(f"preprocessor_config.json: {name} must have {bins} numbers, or be null")
    return found
