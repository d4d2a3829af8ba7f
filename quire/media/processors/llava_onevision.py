"""Images and video of LLaVA-OneVision: as LLaVA-NeXT, but what has many tiles is shrunk.

Each image of a prompt is tiled, as transformers does with a flat list of images.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from quire.core.types import MediaTensor
from quire.media.image_ops import to_tensor
from quire.media.processor import (
    DecodedMedia,
    DecodedVideo,
    Expansion,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors import llava_next
from quire.media.processors._pixels import CLIP, resized_and_cropped

Cells = npt.NDArray[np.int64]
LEAST_RATIO = 1.1
"""Of the sides, at which lines are shrunk."""


class Processor(llava_next.Processor):
    modalities = ("image", "video")
    defaults = CLIP | {
        "size": {"height": 384, "width": 384},
        "do_center_crop": False,
        "image_grid_pinpoints": [(384 * y, 384 * x) for y in range(1, 7) for x in range(1, 7)],
    }
    vision: ClassVar = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
    strategy = "full"

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        stated = str(files.config.get("vision_aspect_ratio") or "anyres_max_9")
        self.most = int(stated.removeprefix("anyres_max_"))  # tiles

    def placeholder(self, modality: str, index: int) -> str:
        if modality == "video":
            return str(self.files.processor.get("video_token") or "<video>")
        return super().placeholder(modality, index)

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        if not isinstance(media, DecodedVideo):
            return super().process(media, kwargs)
        frames = [resized_and_cropped(one, self.settings) for one in media.frames]
        side = self.side // self.patch
        cells = np.arange(len(frames) * self.rows).reshape(len(frames), side, side)
        parts = [shrunk(one, (side + 1) // 2, (side + 1) // 2) for one in cells]
        order = np.concatenate([at.reshape(-1, 4) for at, _ in parts])
        weights = np.concatenate([share.reshape(-1, 4) for _, share in parts])
        end = np.full((1, 4), len(frames) * self.rows)
        further = _weighted(np.concatenate((order, end)), np.concatenate((weights, FIRST)))
        made = self.item(frames, {"rows": len(order) + 1})
        return ProcessedMedia("video", (*made.tensors, *further), made.sizes)

    def lines_in_order(self, lines: Cells, newline: int) -> tuple[MediaTensor, ...]:
        height, width = lines.shape
        ratio = math.sqrt(height * width / (self.most * (self.side // self.patch) ** 2))
        if ratio <= LEAST_RATIO:
            return super().lines_in_order(lines, newline)
        order, weights = shrunk(lines, int(height // ratio), int(width // ratio))
        ends = np.full((len(order), 1, 4), newline)
        order = np.concatenate((order, ends), axis=1).reshape(-1, 4)
        shares = np.broadcast_to(FIRST, ends.shape)
        weights = np.concatenate((weights, shares), axis=1).reshape(-1, 4)
        whole = np.repeat(np.arange(self.rows)[:, None], 4, axis=1)
        first = np.broadcast_to(FIRST, whole.shape)
        return _weighted(np.concatenate((whole, order)), np.concatenate((first, weights)))

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        rows = int(media.sizes["rows"])
        ids = (self.image_id if media.modality == "image" else self.video_id,)
        return Expansion(ids * rows, ((0, rows),), replaces=ids)


FIRST = np.array([[1.0, 0.0, 0.0, 0.0]])
"""Weights of a row that is one of the encoder's."""


def shrunk(cells: Cells, height: int, width: int) -> tuple[Cells, npt.NDArray[np.float64]]:
    """Return (the four cells, their weights) of bilinear interpolation, [height, width, 4] each."""
    y, down = _neighbours(cells.shape[0], height)
    x, right = _neighbours(cells.shape[1], width)
    order = cells[y[:, None, :, None], x[None, :, None, :]]
    weights = down[:, None, :, None] * right[None, :, None, :]
    return order.reshape(height, width, 4), weights.reshape(height, width, 4)


def _neighbours(size: int, count: int) -> tuple[Cells, npt.NDArray[np.float64]]:
    """Return (the two places of `size`, their weights), each [count, 2], of evenly spread ones."""
    at = np.maximum((np.arange(count) + 0.5) * (size / count) - 0.5, 0.0)
    low = np.floor(at).astype(np.int64)
    places = np.stack((low, np.minimum(low + 1, size - 1)), axis=1)
    return places, np.stack((1.0 - (at - low), at - low), axis=1)


def _weighted(order: Cells, weights: npt.NDArray[np.float64]) -> tuple[MediaTensor, ...]:
    return (
        to_tensor("order", order.astype(np.int32)),
        to_tensor("weights", weights.astype(np.float32)),
    )
