"""Facts of the encoder of an encoder-decoder model, from the files of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.conventions import conventions_of
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SpeechFacts:
    """An encoder that reads recordings."""

    features: tuple[int, int]  # [bins, frames] of the log-mel features of each
    multilingual: bool = True
    alignment_heads: tuple[tuple[int, int], ...] = ()  # (layer, head): they look at the time
    alignment_width: int = 7  # positions that their weights are smoothed over
    last_first_time: int = 50  # latest start of the first segment, in steps of 0.02 s

    @classmethod
    def from_hf(cls, found: Mapping[str, Any]) -> SpeechFacts:
        """Read config.json with the fields of the generation config over it."""
        width = found.get("median_filter_width", 7)
        if not isinstance(width, int) or width < 1 or not width % 2:
            raise ConfigError(f"median_filter_width must be an odd number, got {width!r:.40}")
        return cls(
            features=(int(found["num_mel_bins"]), 2 * int(found["max_source_positions"])),
            multilingual=bool(found.get("is_multilingual", True)),
            alignment_heads=_alignment_heads(found),
            alignment_width=width,
            last_first_time=int(found.get("max_initial_timestamp_index", 50)),
        )

    @property
    def positions(self) -> int:
        """Positions of the encoder's output, of every recording."""
        return self.features[1] // 2


def _alignment_heads(found: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Read alignment_heads; without them all heads of the later half of the layers align."""
    layers, heads = (int(found[name]) for name in ("decoder_layers", "decoder_attention_heads"))
    given = found.get("alignment_heads")
    if given is None:
        return tuple((i, head) for i in range(layers // 2, layers) for head in range(heads))
    if not isinstance(given, list) or not given:
        raise ConfigError(f"alignment_heads must be a list of layers and heads, got {given!r:.80}")
    for one in given:
        inside = isinstance(one, list) and len(one) == 2 and 0 <= one[0] < layers
        if not inside or not 0 <= one[1] < heads:
            raise ConfigError(
                f"alignment_heads has {one!r:.40}; the decoder has {layers} layers of {heads} heads"
            )
    return tuple((int(layer), int(head)) for layer, head in given)


def longest_image(hf: Mapping[str, Any]) -> int | None:
    """Return the positions of an image that an encoder reads alone; None: it reads tokens."""
    if conventions_of(hf).source != "image":
        return None
    return image_positions((hf.get("wrapper_config") or {}).get("vision_config") or {})


def image_positions(vision: Mapping[str, Any]) -> int:
    """Return the positions of a vision tower's output: its patches and a class token."""
    side, patch = (
        vision.get(name, usual) for name, usual in (("image_size", 384), ("patch_size", 16))
    )
    if not isinstance(side, int) or not isinstance(patch, int) or not 0 < patch <= side:
        raise ConfigError(
            f"config.json: image_size of the vision tower is {side!r:.40} and patch_size "
            f"{patch!r:.40}; both must be positive integers, the image larger"
        )
    return (side // patch) ** 2 + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """What cross attention reads, and the tokens that the config files of an encoder-decoder
    model force."""

    max_len: int = 0  # positions of the longest source; 0: those of images, by limit_mm_per_prompt
    start_id: int | None = None  # the decoder's first token; None: prompts are the decoder's
    speech: SpeechFacts | None = None  # None: sources are token ids
    forced_first: int | None = None  # the first generated token
    forced_last: tuple[int, ...] = ()  # one of these ends an answer of the greatest length
    banned: tuple[int, ...] = ()
    banned_first: tuple[int, ...] = ()  # as the first token that is chosen


def image_reader(hf: Mapping[str, Any]) -> EncoderFacts | None:
    """Return the facts of a decoder that reads images by cross attention; None: of another one."""
    return EncoderFacts() if conventions_of(hf).source == "images" else None
