"""Satellite images of Prithvi-EO: tensors, which are a prompt by themselves.

    {"pixel_values": [bands, frames, H, W], "location_coords": [2], "temporal_coords": [frames, 2]}

Pixels are normalized by the caller, with `mean` and `std` of config.json. Axes of one in front are
left out, and so is that of frames if the model reads one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config.geospatial import SECTION
from quire.errors import RequestError
from quire.media.image_ops import to_tensor
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    MediaProcessor,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)

PIXELS, TIME, PLACE = "pixel_values", "temporal_coords", "location_coords"
MAX_BYTES = 256 << 20
"""Of the pixels of one item."""

Array = npt.NDArray[Any]
Problem = Callable[[str], RequestError]


class Processor(MediaProcessor):
    is_whole_prompt = True
    stand_in_ids = (1,)

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        sizes = files.config[SECTION]
        self.bands, self.frames = int(sizes["in_chans"]), int(sizes["num_frames"])
        self.patch = tuple(int(one) for one in sizes["patch_size"])

    def placeholder(self, modality: str, index: int) -> str:
        return ""

    def read_data(self, data: object) -> object:
        names = (PIXELS, TIME, PLACE)
        if not isinstance(data, Mapping) or PIXELS not in data:
            return data
        rest = {key: value for key, value in data.items() if key not in names}
        return {**rest, "image": {key: data[key] for key in names if key in data}}

    def read_arrays(self, arrays: Mapping[str, Array], problem: Problem) -> ProcessedMedia:
        for name in arrays:
            if name not in (PIXELS, TIME, PLACE):
                raise problem(f"has {name!r:.80}; known are {PIXELS}, {TIME} and {PLACE}")
        if PIXELS not in arrays:
            raise problem(f"has no {PIXELS}, or it is empty")
        pixels = self._read_pixels(arrays[PIXELS], problem)
        tensors = [to_tensor("pixels", pixels.copy())]
        for name, ours, shape in ((TIME, "time", (self.frames, 2)), (PLACE, "location", (2,))):
            if name in arrays:
                array = self._finite(name, arrays[name], problem)
                if array.shape not in (shape, (1, *shape)):
                    wanted = f"{list(shape)} or {[1, *shape]}"
                    raise problem(f"{name} must have the shape {wanted}, got {list(array.shape)}")
                tensors.append(to_tensor(ours, array.reshape(shape).copy()))
        t, p, _ = self.patch
        patches = self.frames // t * (pixels.shape[-1] // p) ** 2
        return ProcessedMedia("image", tuple(tensors), {"rows": patches + 1})

    def _read_pixels(self, given: Array, problem: Problem) -> Array:
        """Return them as [C, T, H, W]."""
        shape, whole = given.shape, (self.bands, self.frames)
        leading = [whole, (1, *whole)]
        if self.frames == 1:
            leading += [(self.bands,), (1, self.bands)]
        if len(shape) < 3 or shape[:-2] not in leading:
            raise problem(
                f"{PIXELS} must have the shape [{self.bands} bands, {self.frames} frames, height, "
                f"width], got {list(shape)}; another number of frames is served with hf_overrides "
                f'{{"{SECTION}": {{"num_frames": 1}}}}'
            )
        height, width = shape[-2:]
        side = self.patch[1]
        if height != width or height % side:
            raise problem(
                f"{PIXELS} has images of {height} x {width} pixels; they must be square, and a "
                f"multiple of {side}, the side of a patch"
            )
        if given.size * 4 > MAX_BYTES:
            raise problem(
                f"{PIXELS} takes {given.size * 4 >> 20} MiB; at most {MAX_BYTES >> 20} are read"
            )
        return self._finite(PIXELS, given, problem).reshape(*whole, height, width)

    def _finite(self, name: str, given: Array, problem: Problem) -> Array:
        array = given.astype(np.float32)
        if not np.isfinite(array).all():
            raise problem(f"{name} has numbers that are not finite")
        return array

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        raise RequestError(
            f"this model reads satellite images as tensors: send {PIXELS}, and {PLACE} and {TIME} "
            "if there are some",
            param="multi_modal_data",
        )

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        rows = int(media.sizes["rows"])
        return Expansion((0,) * rows, ((0, rows),))
