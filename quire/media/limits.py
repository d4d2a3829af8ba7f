"""Limits of media in a request, checked before anything is fetched or decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.errors import RequestError
from quire.media.processor import Modality

DEFAULT_COUNT = 999
"""Items of a modality in one prompt, unless limit_mm_per_prompt sets another number."""
MAX_ASPECT_RATIO = 200
"""Of an image's or a video's sides."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What one prompt may have. Sizes in bytes."""

    counts: Mapping[str, int] = field(default_factory=dict)  # limit_mm_per_prompt
    item_bytes: Mapping[str, int] = field(
        default_factory=lambda: {"image": 64 << 20, "video": 256 << 20, "audio": 25 << 20}
    )
    prompt_bytes: int = 256 << 20  # encoded files of one prompt, fetched ones included
    pixels: int = 89_478_485  # of one image; what PIL considers to be no bomb
    frames: int = 768  # decoded frames of one video
    frame_bytes: int = 512 << 20  # decoded frames of one video
    audio_seconds: float = 600.0

    def check_counts(
        self, modalities: Sequence[Modality], supported: Sequence[str], param: str
    ) -> None:
        """Raise RequestError for more items than allowed. modalities: one for each item."""
        for modality in dict.fromkeys(modalities):
            if modality not in supported:
                reads = " and ".join(supported)
                message = f"this model reads no {modality}; beside text it reads {reads}"
                raise RequestError(message, param=param)
            most = self.counts.get(modality, DEFAULT_COUNT)
            count = sum(one == modality for one in modalities)
            if count > most:
                hint = ""
                if modality in self.counts:
                    hint = " Set `--limit-mm-per-prompt` to increase this limit."
                raise RequestError(
                    f"At most {most} {modality}(s) may be provided in one prompt; got {count}."
                    f"{hint}",
                    param=param,
                )
