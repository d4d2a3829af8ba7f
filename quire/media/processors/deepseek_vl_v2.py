"""Images of DeepSeek-VL2: the whole image, and tiles of it in the best of a few resolutions.

A prompt of more than two images has no tiles beside the whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from quire.media.image_ops import pad, resize, to_tensor
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    Modality,
    Pixels,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import SIGLIP, ImageProcessor, cut_tiles, pixels_of
from quire.media.processors._tiles import best_resolution

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}<|User|>: "
    "{{ message['content'] }}\n\n{% elif message['role'] == 'assistant' %}<|Assistant|>: "
    "{{ message['content'] }}{{ eos_token }}{% else %}{{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)
MOST_TILED = 2
"""Images of a prompt that are tiled."""


class Processor(ImageProcessor):
    defaults = SIGLIP
    takes_embeds = True
    fallback_template = TEMPLATE
    allowed_kwargs: ClassVar = {"cropping": KwargRange(bool)}

    def __init__(self, files: ProcessorFiles) -> None:
        given = {**files.processor, **files.preprocessor("image")}
        images = {key: given[key] for key in ("image_mean", "image_std") if given.get(key)}
        super().__init__(ProcessorFiles(files.config, {"image": images}))
        self.files = files
        vision: dict[str, Any] = files.config.get("vision_config") or {}
        projector: dict[str, Any] = files.config.get("projector_config") or {}
        self.side = int(vision.get("image_size") or 384)
        grid = self.side // int(vision.get("patch_size") or 16)
        self.squares = -(-grid // int(projector.get("downsample_ratio") or 2))
        points = files.config.get("candidate_resolutions") or [(self.side, self.side)]
        self.sizes = [(int(height), int(width)) for width, height in points]
        self.whole_first = files.config.get("global_view_pos", "head") == "head"

    def placeholder(self, modality: str, index: int) -> str:
        return "<image>"

    @property
    def image_id(self) -> int:
        return self.token("<image>")

    def prompt_kwargs(self, modalities: Sequence[Modality]) -> Settings:
        return {"cropping": False} if len(modalities) > MOST_TILED else {}

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels = pixels_of(media)
        size = (self.side, self.side)
        if kwargs.get("cropping", True):
            height, width, _ = pixels.shape
            size = best_resolution(height, width, self.sizes)
        tiles = cut_tiles(self.padded(pixels, *size), self.side, self.side)
        order = self.order(size[0] // self.side, size[1] // self.side)
        made = self.item([self.padded(pixels, self.side, self.side), *tiles], {"rows": len(order)})
        return ProcessedMedia("image", (*made.tensors, to_tensor("order", order)), made.sizes)

    def padded(self, pixels: Pixels, height: int, width: int) -> Pixels:
        """Resize to fit into [height, width], and put it in the middle, as PIL's ImageOps.pad."""
        tall, wide, _ = pixels.shape
        if wide / tall > width / height:
            size = max(round(tall / wide * width), 1), width
        else:
            size = height, max(round(wide / tall * height), 1)
        top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
        color = [int(255 * mean) for mean in self.settings["image_mean"]]
        return pad(resize(pixels, *size), height, width, top=top, left=left, color=color)

    def order(self, y: int, x: int) -> np.ndarray[Any, Any]:
        """Number the rows of the encoder in the order of the prompt; see its Encoder."""
        s, count = self.squares, self.squares**2
        cells = np.arange((1 + y * x) * count, dtype=np.int32).reshape(-1, s, s)
        newline, separator = cells.size, cells.size + 1
        tiles = cells[1:].reshape(y, x, s, s).transpose(0, 2, 1, 3).reshape(y * s, x * s)
        views = [
            np.pad(lines, ((0, 0), (0, 1)), constant_values=newline).reshape(-1)
            for lines in ((cells[0], tiles) if self.whole_first else (tiles, cells[0]))
        ]
        return np.concatenate((views[0], [separator], views[1])).astype(np.int32)

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        ids, rows = (self.image_id,), int(media.sizes["rows"])
        return Expansion(ids * rows, ((0, rows),), replaces=ids)
