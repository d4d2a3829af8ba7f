"""Whisper: the log-mel features of one recording of at most 30 s, which are all the encoder reads.

It reads the whole of them, so the recording has no place in the decoder's prompt.
"""

from __future__ import annotations

from typing import ClassVar

from quire.errors import RequestError
from quire.media.audio_ops import LogMel
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


class Processor(MediaProcessor):
    modalities: ClassVar[tuple[Modality, ...]] = ("audio",)

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self._positions = int(files.config["max_source_positions"])
        settings = files.preprocessor("audio")
        rate, hop = settings.get("sampling_rate", 16_000), settings.get("hop_length", 160)
        self._log_mel = LogMel(
            int(files.config["num_mel_bins"]),
            rate=rate,
            n_fft=settings.get("n_fft", 400),
            hop=hop,
            seconds=2 * self._positions * hop // rate,
        )
        self.sampling_rate = rate
        self.longest_audio = self._log_mel.samples

    def placeholder(self, modality: Modality, index: int) -> str:
        return ""

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        assert isinstance(media, DecodedAudio)
        longest = self.longest_audio
        if len(media.samples) > longest:
            raise RequestError(
                f"the audio has {len(media.samples) / self.sampling_rate:.2f} s, and the model "
                f"reads {longest // self.sampling_rate} s: cut it, or send it to "
                "/v1/audio/transcriptions",
                param="audio",
            )
        features = self._log_mel(media.samples)
        return ProcessedMedia("audio", (to_tensor("input_features", features),))

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        return Expansion((0,) * self._positions, ((0, self._positions),))
