"""Images of Molmo: the whole image, and crops of it that overlap, in the tiling that fits best.

Tokens of images are before all others of a prompt, behind the token that begins it. A crop gives
its squares of 2 x 2 patches but for those at borders that the neighbouring crop gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError
from quire.media.image_ops import BILINEAR, pad, resize, to_tensor
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    Pixels,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import CLIP, ImageProcessor, pixels_of

SQUARE = 2
MOST_CROPS = 36
FIRST = "<|endoftext|>"
PATCH, LINE_END, START, END = "<im_patch>", "<im_col>", "<im_start>", "<im_end>"
OWN_TOKENS = (START, END, PATCH, LINE_END)
"""In the order of their ids, which begin behind the vocabulary of the text model."""
TEMPLATE = (
    "{% for message in messages %}{{ ' ' + message['role'].capitalize() + ': ' "
    "+ message['content'] }}{% endfor %}{% if add_generation_prompt %} Assistant:{% endif %}"
)
OUTSIDE, PARTLY = 1, 2
"""Kinds of patches of which all or some pixels are beyond the image; 0: none is."""


class Crops(NamedTuple):
    """How an image is cut, in patches."""

    side: int  # of a crop
    left: int  # of a crop's patches at the left and top, that overlap the one before
    right: int  # the same at the right and below

    @property
    def step(self) -> int:
        return self.side - self.left - self.right

    def squares(self, place: int, count: int) -> range:
        """Which of a crop's squares, along an axis, are rows. place: among `count` crops."""
        first = 0 if place == 0 else self.left // SQUARE
        patches = self.step + self.left * (place == 0) + self.right * (place == count - 1)
        return range(first, first + (patches + 1) // SQUARE)


class Processor(ImageProcessor):
    defaults: ClassVar[Settings] = CLIP | {
        "max_crops": 12,
        "overlap_margins": (4, 4),
        "base_image_input_size": (336, 336),
        "image_patch_size": 14,
    }
    allowed_kwargs: ClassVar[Mapping[str, KwargRange]] = {
        "max_crops": KwargRange(int, 1, MOST_CROPS)
    }
    fallback_template = TEMPLATE

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        size, self.patch = self.settings["base_image_input_size"], self.settings["image_patch_size"]
        self.side = int(size if isinstance(size, int) else size[0])
        left, right = self.settings["overlap_margins"]
        self.crops = Crops(self.side // self.patch, int(left), int(right))
        if left % SQUARE or left < SQUARE or self.crops.step < 1:
            raise ConfigError(
                f"preprocessor_config.json: overlap_margins is {[left, right]}; the first must be "
                f"even and positive, and both together less than the {self.crops.side} patches"
            )

    def placeholder(self, modality: str, index: int) -> str:
        return ""

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, crops = pixels_of(media), self.crops
        margin, step = (crops.left + crops.right) * self.patch, crops.step * self.patch
        height, width = pixels.shape[:2]
        most = int({**self.settings, **kwargs}["max_crops"])
        tall, wide = tiling(height - margin, width - margin, step, most)
        large, inside = fitted(pixels, tall * step + margin, wide * step + margin)
        at = [(y * step, x * step) for y in range(tall) for x in range(wide)]
        cuts = [(slice(y, y + self.side), slice(x, x + self.side)) for y, x in at]
        whole, _ = fitted(pixels, self.side, self.side)
        made = self.item([whole, *(large[one] for one in cuts)], {"grid": (tall, wide)})
        kinds = np.stack([patch_kinds(inside[one], self.patch) for one in cuts])
        last = np.full_like(kinds[:1], PARTLY)
        more = (
            to_tensor("pads", np.concatenate((kinds, last))),  # as checkpoints were trained
            to_tensor("order", self.order(tall, wide)),
        )
        return ProcessedMedia("image", (*made.tensors, *more), made.sizes)

    def order(self, tall: int, wide: int) -> npt.NDArray[np.int32]:
        """Number the squares of the whole image and of all crops in the order of the prompt."""
        side = -(-self.crops.side // SQUARE)
        cells = np.arange((1 + tall * wide) * side**2, dtype=np.int32).reshape(-1, side, side)
        lines = [
            np.concatenate(
                [
                    cells[1 + y * wide + x, row, _slice(self.crops.squares(x, wide))]
                    for x in range(wide)
                ]
            )
            for y in range(tall)
            for row in self.crops.squares(y, tall)
        ]
        return np.concatenate([cells[0].reshape(-1), *lines])

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        start, end, patch, line_end = self._own_tokens()
        ids: list[int] = [self.token(FIRST)] if index == 1 else []
        runs = []
        side = -(-self.crops.side // SQUARE)
        tall, wide = (
            sum(len(self.crops.squares(i, count)) for i in range(count))
            for count in media.sizes["grid"]
        )
        for lines, columns in ((side, side), (tall, wide)):
            ids.append(start)
            for _ in range(lines):
                runs.append((len(ids), columns))
                ids += [patch] * columns + [line_end]
            ids.append(end)
        return Expansion(tuple(ids), tuple(runs), insert_at=0)

    def _own_tokens(self) -> list[int]:
        """Return the ids of OWN_TOKENS. Raises ConfigError if the model has others."""
        config = self.files.config
        found = [self.token(one) for one in OWN_TOKENS]
        first = config.get("embedding_size") or config.get("vocab_size") or found[0]
        known = any(found)  # else a start measures items before there is a tokenizer
        if known and found != [*range(first, first + len(found))]:
            raise ConfigError(
                f"the tokenizer has {', '.join(OWN_TOKENS)} as {found}; the model adds rows of "
                f"images to the third of the tokens behind its vocabulary, which begin at {first}"
            )
        return found


def _slice(one: range) -> slice:
    return slice(one.start, one.stop)


def tiling(height: int, width: int, step: int, most: int) -> tuple[int, int]:
    """Return rows and columns of at most `most` crops in all, for an image of this size.

    Those that enlarge it least; where each would shrink it, those that shrink it least.
    """
    found = [(y, x) for y in range(1, most + 1) for x in range(1, most + 1) if y * x <= most]
    found.sort(key=lambda one: (one[0] * one[1], one[0]))
    with np.errstate(divide="ignore"):
        sizes = np.array(found, np.int32) * np.int32(step)
        scales = (sizes.astype(np.float32) / np.array([height, width], np.float32)).min(axis=1)
    if (scales < 1).all():
        return found[int(scales.argmax())]
    return found[int(np.where(scales < 1, 1e10, scales).argmin())]


def fitted(pixels: Pixels, height: int, width: int) -> tuple[Pixels, npt.NDArray[np.bool_]]:
    """Resize an image to fit into a size, and put it in the middle of black. The second array says
    which pixels are of the image."""
    tall, wide = pixels.shape[:2]
    scale = min(np.float32(height) / np.float32(tall), np.float32(width) / np.float32(wide))
    tall, wide = (max(int(np.float32(one) * scale), 1) for one in (tall, wide))
    top, left = (height - tall) // 2, (width - wide) // 2
    inside = np.zeros((height, width), np.bool_)
    inside[top : top + tall, left : left + wide] = True
    return pad(resize(pixels, tall, wide, BILINEAR), height, width, top=top, left=left), inside


def patch_kinds(inside: npt.NDArray[np.bool_], patch: int) -> npt.NDArray[Any]:
    """Return of each patch whether it is outside of the image, or partly: uint8 [P]."""
    rows, columns = inside.shape[0] // patch, inside.shape[1] // patch
    cells = inside[: rows * patch, : columns * patch].reshape(rows, patch, columns, patch)
    whole, some = cells.all(axis=(1, 3)), cells.any(axis=(1, 3))
    return np.where(whole, 0, np.where(some, PARTLY, OUTSIDE)).astype(np.uint8).reshape(-1)
