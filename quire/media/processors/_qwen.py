"""Images and videos of Qwen's families: any size, whole cells of patches, positions of three axes.

An item keeps its aspect ratio. Its pixels go to the encoder as bytes, which resizes, cuts and
normalizes them on the device; frames are taken in pairs there. Only what shrinks by much is resized
here, to send less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError, RequestError
from quire.media.image_ops import BICUBIC, resize, to_tensor
from quire.media.objects import to_array
from quire.media.processor import (
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    ExpandedItem,
    Expansion,
    KwargRange,
    MediaProcessor,
    Modality,
    Pixels,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import CLIP_MEAN, CLIP_STD, scale_shift

MAX_RATIO = 200
"""Longest side by shortest: what the models' own processors refuse beyond."""
SENT_PIXELS = 2
"""Pixels that are sent to the encoder at most, for each that it makes of them."""
USUAL = {
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
"""What a preprocessor_config.json leaves out, in all families."""
SHARED = (
    ("patch_size", "patch_size"),
    ("temporal_patch_size", "temporal_patch_size"),
    ("spatial_merge_size", "merge_size"),
)
"""Fields of vision_config and of preprocessor_config.json that must be equal."""
Cells = npt.NDArray[np.int64]


class PixelBounds(NamedTuple):
    """Numbers of pixels that an image, or what `smart_resize` counts of a video, may have."""

    least: int
    most: int


def smart_resize(
    height: int, width: int, factor: int, bounds: PixelBounds, frames: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Return (height, width) in multiples of `factor`, within the bounds, nearly of the same ratio.

    frames: how many the pixels are counted of, as given and in whole patches.
    Raises RequestError for a longer side of more than 200 times the shorter.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise RequestError(
            f"an image or video has {width} x {height} pixels; the longer side must be at most "
            f"{MAX_RATIO} times the shorter"
        )
    given, whole = frames
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if whole * rows * columns > bounds.most:
        shrink = math.sqrt(given * height * width / bounds.most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif whole * rows * columns < bounds.least:
        grow = math.sqrt(bounds.least / (given * height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


class QwenProcessor(MediaProcessor):
    """Base of the families."""

    modalities: tuple[Modality, ...] = ("image", "video")
    takes_embeds: ClassVar[bool] = True
    embed_sizes: ClassVar[tuple[str, ...]] = ("image_grid_thw", "video_grid_thw")
    tokens: ClassVar[dict[Modality, str]] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    """The token of each cell, which is also the placeholder's."""
    defaults: ClassVar[dict[Modality, Settings]]
    """What preprocessor_config.json leaves out."""
    allowed_kwargs: ClassVar = {
        "min_pixels": KwargRange(int),
        "max_pixels": KwargRange(int),
        "size": KwargRange(int, keys=("shortest_edge", "longest_edge")),
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.settings = {one: self._read_settings(one) for one in self.defaults}
        vision = files.config.get("vision_config") or {}
        for one, settings in self.settings.items():
            for theirs, ours in SHARED:
                if vision.get(theirs, settings[ours]) != settings[ours]:
                    raise ConfigError(
                        f"the processor's {ours} for {one} is {settings[ours]}, and the model's "
                        f"{theirs} {vision[theirs]}: they must be equal"
                    )

    def placeholder(self, modality: Modality, index: int) -> str:
        return f"<|vision_start|>{self.tokens[modality]}<|vision_end|>"

    def read_data(self, data: object) -> object:
        """Divide embeddings of several items, one behind the other, by the lines of their grids."""
        if not isinstance(data, Mapping):
            return data
        return {key: self._divided(key, value) for key, value in data.items()}

    def _divided(self, modality: object, given: object) -> object:
        names = f"{modality}_embeds", f"{modality}_grid_thw"
        if not isinstance(given, Mapping) or set(given) != {*names}:
            return given
        settings = next((own for name, own in self.settings.items() if name == modality), None)
        if settings is None:
            return given
        rows, grids = given[names[0]], to_array(given[names[1]], f"multi_modal_data.{modality}")
        merge = int(settings["merge_size"])
        if grids.ndim != 2 or grids.shape[1] != 3 or len(grids) < 2:
            return given
        ends = np.cumsum(grids.prod(1) // merge**2).tolist()
        if getattr(rows, "ndim", 0) != 2 or ends[-1] != len(rows):
            return given  # refused, with its numbers, where it is read
        parts = zip(grids, [0, *ends], ends)
        return [{names[0]: rows[low:high], names[1]: grid} for grid, low, high in parts]

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        modality: Modality = "image" if isinstance(media, DecodedImage) else "video"
        settings = self.settings[modality]
        bounds, merge = self._bounds(settings, kwargs), int(settings["merge_size"])
        factor, depth = int(settings["patch_size"]) * merge, int(settings["temporal_patch_size"])
        if isinstance(media, DecodedVideo):
            frames, sizes = media.frames, self.video_sizes(media, depth, kwargs)
            count = self.video_frames(len(frames), depth)
            if settings.get("cap_pixels_per_frame"):
                bounds = self.capped(settings, bounds, len(frames), factor)
        else:
            assert isinstance(media, DecodedImage), "these models read images and videos"
            frames, sizes, count = media.pixels[None], {}, self.image_frames(depth)
        height, width = frames.shape[1:3]
        if settings["do_resize"]:
            height, width = self.target_size(height, width, factor, bounds, count)
        elif height % factor or width % factor:
            raise RequestError(
                f"an image or video has {width} x {height} pixels; with do_resize false both must "
                f"be multiples of {factor}"
            )
        resample = int(settings["resample"])
        if resample != BICUBIC or shrinks(frames, height, width):
            frames = np.stack([resize(one, height, width, resample) for one in frames])
        grid = (-(-len(frames) // depth), height // factor, width // factor)
        tensors = (
            to_tensor("pixels", frames),
            to_tensor("cells", np.zeros(grid[1:], np.uint8)),
            to_tensor("scale_shift", scale_shift(settings)),
        )
        return ProcessedMedia(modality, tensors, {"grid": grid, **sizes})

    def passes_pixels(self, media: DecodedMedia, kwargs: Settings) -> bool:
        if not isinstance(media, DecodedImage):
            return False
        settings = self.settings["image"]
        height, width, _ = media.pixels.shape
        fits = height * width <= self._bounds(settings, kwargs).most
        return fits and int(settings["resample"]) == BICUBIC

    def target_size(
        self, height: int, width: int, factor: int, bounds: PixelBounds, frames: tuple[int, int]
    ) -> tuple[int, int]:
        """Return the size in pixels that an item is resized to."""
        return smart_resize(height, width, factor, bounds, frames)

    def capped(
        self, settings: Settings, bounds: PixelBounds, frames: int, factor: int
    ) -> PixelBounds:
        """Return bounds that share the pixels of a whole context out to the frames of a video."""
        tokens = int(settings.get("max_video_tokens") or 128_000)
        total = int(tokens * factor**2 * 0.9) * int(settings["temporal_patch_size"])
        most = max(min(bounds.most, total // frames), int(bounds.least * 1.05))
        return bounds._replace(most=most)

    def image_frames(self, depth: int) -> tuple[int, int]:
        """Return how many frames of an image the bounds on pixels are for: see smart_resize."""
        return 1, 1

    def video_frames(self, frames: int, depth: int) -> tuple[int, int]:
        """Return how many frames of a video the bounds on pixels are for."""
        return 1, 1

    def video_sizes(self, video: DecodedVideo, depth: int, kwargs: Settings) -> dict[str, Any]:
        """Return what `expand` and `rope` need of a video beside its grid."""
        return {}

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        pad = self.id_of(f"{media.modality}_token_id", self.tokens[media.modality])
        rows = math.prod(self.grid_of(media.modality, media.sizes))
        return Expansion((pad,) * rows, ((0, rows),), replaces=(pad,))

    def rope(
        self, ids: Sequence[int], items: Sequence[ExpandedItem]
    ) -> tuple[npt.NDArray[np.int32], int] | None:
        if not items:
            return None
        found, at, position = np.empty((3, len(ids)), np.int32), 0, 0
        for item in items:
            for start, cells in self.cells(item):
                found[:, at:start] = np.arange(position, position + start - at)
                position += start - at
                at = start + cells.shape[1]
                found[:, start:at] = cells + position
                position += self.steps(item, cells)
        found[:, at:] = np.arange(position, position + len(ids) - at)
        return found, int(found.max()) + 1 - len(ids)

    def steps(self, item: ExpandedItem, cells: Cells) -> int:
        """Return how far behind a run's first rotary position that of the next token is.

        It is free on all axes, time too. transformers 5 leaves out time.
        """
        return int(cells.max()) + 1

    def cells(self, item: ExpandedItem) -> Iterator[tuple[int, Cells]]:
        """Yield (position in the prompt, [3, n] relative rotary positions) of the item's runs."""
        yield item.start, grid_cells(*self.grid_of(item.modality, item.sizes))

    def grid_of(self, modality: Modality, sizes: Settings) -> tuple[int, int, int]:
        """Return pairs of frames, rows and columns of cells. Raises RequestError.

        Of embeddings that were given: what the caller says of their patches.
        """
        if "grid" in sizes:
            pairs, rows, columns = sizes["grid"]
            return pairs, rows, columns
        name, merge = f"{modality}_grid_thw", int(self.settings[modality]["merge_size"])
        found = sizes.get(name, ())
        if len(found) != 3 or min(found) < 1 or found[1] % merge or found[2] % merge:
            raise RequestError(
                f"embeddings of {modality}s need {name}: three numbers, of which those of rows and "
                f"columns of patches are multiples of {merge}",
                param="multi_modal_data",
            )
        grid = found[0], found[1] // merge, found[2] // merge
        if math.prod(grid) != sizes["rows"]:
            raise RequestError(
                f"embeddings have {sizes['rows']} rows; a {name} of {list(found)} has "
                f"{math.prod(grid)}",
                param="multi_modal_data",
            )
        return grid

    def id_of(self, field: str, text: str) -> int:
        """Return the id of a token of config.json, or of the tokenizer. Raises ConfigError."""
        found = self.files.config.get(field)
        found = self.files.token_id(text) if found is None else int(found)
        if found is None:
            raise ConfigError(f"config.json has no {field}, and the tokenizer no token {text}")
        return found

    def _read_settings(self, modality: Modality) -> dict[str, Any]:
        stated = {k: v for k, v in self.files.preprocessor(modality).items() if v is not None}
        return {**USUAL, **self.defaults[modality], **stated}

    def _bounds(self, settings: Settings, kwargs: Settings) -> PixelBounds:
        """Bounds of an item: those of its request, else of the files, in either form."""
        found = {"shortest_edge": 0, "longest_edge": 0}
        for one in (settings, kwargs):
            found.update(one.get("size") or {})
            older = {"shortest_edge": one.get("min_pixels"), "longest_edge": one.get("max_pixels")}
            found.update({key: value for key, value in older.items() if value is not None})
        bounds = PixelBounds(int(found["shortest_edge"]), int(found["longest_edge"]))
        if not 0 < bounds.least <= bounds.most:
            raise RequestError(
                f"mm_processor_kwargs: an item would have at least {bounds.least} and at most "
                f"{bounds.most} pixels; the former must not be above the latter",
                param="mm_processor_kwargs",
            )
        return bounds


def shrinks(frames: Pixels, height: int, width: int) -> bool:
    """Whether frames [F, H, W, 3] have so many more pixels than are wanted that fewer are sent."""
    _, rows, columns, _ = frames.shape
    return bool(rows * columns > SENT_PIXELS * height * width)


def grid_cells(pairs: int, rows: int, columns: int, interval: float = 1.0) -> Cells:
    """Return [3, n]: time, row and column of each cell. interval: steps of time between pairs."""
    cells = np.indices((pairs, rows, columns), np.int64).reshape(3, -1)
    # transformers computes in single precision; the product may be just below an integer.
    times = np.arange(pairs, dtype=np.float32) * np.float32(interval)
    cells[0] = times.astype(np.int64)[cells[0]]
    return cells
