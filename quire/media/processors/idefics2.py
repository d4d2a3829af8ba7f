"""Images of Idefics 2, of any shape up to 980 pixels: 64 rows each, between two equal tokens.

Of images side by side the last token of one is the first of the next. An image may be split: its
quarters come first, each 64 rows.
"""

from __future__ import annotations

from typing import Any, ClassVar

from quire.media.image_ops import resize, to_tensor
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    Pixels,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import SIGLIP, ImageProcessor, pixels_of

AROUND = "<fake_token_around_image>"
LONGEST = 4096


class Processor(ImageProcessor):
    defaults = SIGLIP | {
        "size": {"shortest_edge": 378, "longest_edge": 980},
        "resample": 2,
        "do_image_splitting": False,
    }
    allowed_kwargs: ClassVar = {
        "do_image_splitting": KwargRange(bool),
        "size": KwargRange(int, 28, LONGEST, ("shortest_edge", "longest_edge")),
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision: dict[str, Any] = files.config.get("vision_config") or {}
        self.patch = int(vision.get("patch_size") or 32)
        perceiver: dict[str, Any] = files.config.get("perceiver_config") or {}
        self.rows = int(perceiver.get("resampler_n_latents") or 64)

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        settings = {**self.settings, **kwargs}
        settings["size"] = {**self.settings["size"], **kwargs.get("size", {})}
        parts = [pixels_of(media)]
        if settings["do_image_splitting"]:
            parts = [*quarters(parts[0]), *parts]
        if settings["do_resize"]:
            shortest, longest = (int(settings["size"][f"{one}_edge"]) for one in EDGES)
            resample = int(settings["resample"])
            parts = [resize(one, *bounded(one, shortest, longest), resample) for one in parts]
        # Patches that are not whole are not read.
        whole = [one[: len(one) // self.patch * self.patch] for one in parts]
        whole = [one[:, : one.shape[1] // self.patch * self.patch] for one in whole]
        tensors = [to_tensor(f"pixels{i}", one[None]) for i, one in enumerate(whole)]
        tensors.append(to_tensor("scale_shift", self.scale_shift))
        return ProcessedMedia("image", tuple(tensors), {"parts": len(parts)})

    def item_text(self, media: ProcessedMedia, index: int, following: str = "") -> str:
        """A word right after an image is one after a space."""
        form = self.placeholder("image", index)
        joined = following and not following[0].isspace() and following[0] != "<"
        return f"{form} " if joined else form

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        around, count = self.token(AROUND), int(media.sizes["parts"])
        ids = (around, *(*(self.image_id,) * self.rows, around) * count)
        runs = tuple((1 + i * (self.rows + 1), self.rows) for i in range(count))
        return Expansion(ids, runs, replaces=(self.image_id,), shares_border=True)


EDGES = ("shortest", "longest")


def quarters(pixels: Pixels) -> list[Pixels]:
    """Cut an image in the middle of its sides."""
    y, x = pixels.shape[0] // 2, pixels.shape[1] // 2
    return [pixels[:y, :x], pixels[:y, x:], pixels[y:, :x], pixels[y:, x:]]


def bounded(pixels: Pixels, shortest: int, longest: int) -> tuple[int, int]:
    """Return (height, width): the longer side is cut down first, then both have a minimum."""
    height, width = pixels.shape[:2]
    ratio = width / height
    if width >= height and width > longest:
        height, width = int(longest / ratio), longest
    elif height > width and height > longest:
        height, width = longest, int(longest * ratio)
    return max(height, shortest), max(width, shortest)
