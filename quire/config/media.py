"""Media of prompts: images, video and audio. Options, what the model's files state, and the config.

Read by quire.engine.startup.text_setup, which makes a quire.media.pipeline of the section.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.json_file import read_json_object
from quire.config.option_field import option
from quire.errors import ConfigError
from quire.registry import PluginRegistry

Json = Mapping[str, Any]

SIZES = {
    "image": {"width", "height"},
    "video": {"width", "height", "num_frames"},
    "audio": {"length"},
}
MODALITIES = tuple(SIZES)
MAX_WORKERS = 8
"""Worker processes of an API process, unless an option sets their number."""
_NESTED = {
    "image_processor": "image",
    "video_processor": "video",
    "feature_extractor": "audio",
    "audio_processor": "audio",
}
"""Part of processor_config.json -> modality."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOptions:
    """Images, video and audio in prompts."""

    limit_mm_per_prompt: dict[str, Any] = field(default_factory=dict)
    """JSON: maximum of items in one prompt by modality, {"image": 2, "video": 0}; also image=2,
    video=0 without spaces. 0: none is accepted. Without an entry: 999. {"image": {"count": 2,
    "width": 512, "height": 512}}: the sizes are accepted and change nothing."""
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON: options of the model's processor, such as {"max_pixels": 1003520}. Their names and
    ranges are the model family's."""
    media_io_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON: options of decoding by modality, {"video": {"num_frames": 32, "fps": 2}}. -1 frames:
    all."""
    mm_processor_cache_gb: float = option(4.0, low=0)
    """GiB of host memory for processed items that may come again, in each API process. 0: none."""
    mm_processor_workers: int | None = option(None, low=1, high=64)
    """Worker processes that decode and process media, of each API process. None: as many as
    processors, at most 8."""
    allowed_local_media_path: str | None = None
    """Folder whose files requests may name as file:// URLs. None: they may name no file."""
    allowed_media_domains: tuple[str, ...] | None = None
    """Hosts from which media are fetched; *.example.com: all below that. They may have private
    addresses. None: any host with public addresses."""
    interleave_mm_strings: bool = False
    """Keep media at their place in the text of a message where the chat template takes text alone.
    Otherwise they are put before the text."""
    enable_mm_embeds: bool = False
    """Accept embeddings in place of media: rows of the encoder's output."""
    trust_request_mm_kwargs: bool = False
    """Accept mm_processor_kwargs and media_io_kwargs in requests over HTTP."""
    language_model_only: bool = False
    """Serve the text half of a multimodal model alone: its encoder is not loaded."""


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """The media that a model reads, as its files describe them."""

    family: str  # a file of quire.media.processors
    config: Json  # the outer config.json
    preprocessors: Mapping[str, Json]  # by modality
    processor: Json  # the rest of processor_config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSection:
    """Media of requests: how they are read, and limits."""

    family: str
    config: Json
    preprocessors: Mapping[str, Json]
    processor: Json
    counts: Mapping[str, int]  # items of one prompt by modality
    kwargs: Json = field(default_factory=dict)
    io_kwargs: Mapping[str, Json] = field(default_factory=dict)
    cache_bytes: int = 4 << 30
    workers: int = 1
    folder: str | None = None
    domains: tuple[str, ...] | None = None
    interleaves: bool = False
    takes_embeds: bool = False
    trusts_kwargs: bool = False


def read_media_facts(folder: Path, family: str | None, config: Json) -> MediaFacts | None:
    """Read the files of a model's processor. None: its media are not read.

    family: of quire.models.multimodal. config: the outer config.json.
    """
    if family is None or family not in PluginRegistry("quire.media.processors").names():
        return None
    found: dict[str, Json] = {}
    flat = _read(folder / "preprocessor_config.json")
    if "feature_extractor_type" in flat:
        found["audio"] = flat
    if flat and ("image_processor_type" in flat or "feature_extractor_type" not in flat):
        found["image"] = flat
    if video := _read(folder / "video_preprocessor_config.json"):
        found["video"] = video
    processor = _read(folder / "processor_config.json")
    for name, modality in _NESTED.items():
        if isinstance(nested := processor.pop(name, None), Mapping):
            found[modality] = nested
    return MediaFacts(family, config, found, processor)


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def resolve_media(options: MediaOptions, facts: MediaFacts | None) -> MediaSection | None:
    """Resolve the section. None: requests have no media. Raises ConfigError."""
    counts = item_counts(options)
    if facts is None or options.language_model_only:
        for name in ("enable_mm_embeds", "mm_processor_kwargs"):
            if getattr(options, name) and facts is None:
                raise ConfigError(f"{name}: this model reads text only")
        return None
    folder = options.allowed_local_media_path
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(f"allowed_local_media_path: {folder!r} is not a folder")
    return MediaSection(
        family=facts.family,
        config=facts.config,
        preprocessors=facts.preprocessors,
        processor=facts.processor,
        counts=counts,
        kwargs=options.mm_processor_kwargs,
        io_kwargs=options.media_io_kwargs,
        cache_bytes=int(options.mm_processor_cache_gb * (1 << 30)),
        workers=options.mm_processor_workers or min(os.cpu_count() or 1, MAX_WORKERS),
        folder=folder,
        domains=options.allowed_media_domains,
        interleaves=options.interleave_mm_strings,
        takes_embeds=options.enable_mm_embeds,
        trusts_kwargs=options.trust_request_mm_kwargs,
    )


def item_counts(options: MediaOptions) -> dict[str, int]:
    """Return the numbers of limit_mm_per_prompt. Raises ConfigError.

    {"image": 2} or {"image": {"count": 2, "width": 512}}: sizes, by which vLLM plans its memory.
    """
    given = options.limit_mm_per_prompt
    found = {}
    for modality, value in given.items():
        sizes = dict(value) if isinstance(value, Mapping) else {"count": value}
        count = sizes.pop("count", 999)
        whole = all(type(one) is int for one in (count, *sizes.values())) and 0 <= count <= 1 << 20
        if modality not in MODALITIES or not whole or not SIZES[modality].issuperset(sizes):
            raise ConfigError(
                "limit_mm_per_prompt must be numbers of image, video and audio, 0 or more, as "
                f'{{"image": 2}} or {{"image": {{"count": 2, "width": 512, "height": 512}}}}; got '
                f"{modality!r}: {value!r:.80}"
            )
        found[modality] = int(count)
    return found


def parse_counts(text: str) -> dict[str, int]:
    """Parse the older form of limit_mm_per_prompt: image=2,video=1. Raises ValueError."""
    pairs = [one.split("=") for one in text.split(",") if one]
    return {name.strip(): int(count) for name, count in pairs}
