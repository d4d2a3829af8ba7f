"""Features of recordings as Whisper's encoder reads them, in all models that have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.media.audio_ops import LogMel
from quire.media.processor import DecodedAudio, MediaProcessor, ProcessorFiles, Settings


class WhisperFeatures(MediaProcessor):
    """Base of processors that make log-mel features of at most 30 s."""

    def __init__(self, files: ProcessorFiles, bins: int, positions: int) -> None:
        """bins, positions: of the encoder, which reads two frames for each position."""
        super().__init__(files)
        settings: Settings = files.preprocessor("audio")
        rate, hop = settings.get("sampling_rate", 16_000), settings.get("hop_length", 160)
        self.sampling_rate = rate
        self.log_mel = LogMel(
            bins,
            rate=rate,
            n_fft=settings.get("n_fft", 400),
            hop=hop,
            seconds=2 * positions * hop // rate,
        )
        self.longest_audio = self.log_mel.samples
        self.most_seconds = self.longest_audio / rate

    def features(self, audio: DecodedAudio) -> npt.NDArray[Any]:
        """[bins, frames] float32. Raises RequestError for what the model cannot read at once."""
        self.check_seconds(audio)
        return np.asarray(self.log_mel(audio.samples))
