"""Images of MiniCPM-V 4.6: one of a usual area, and of large ones slices in rows and columns.

<image_id>0</image_id><image>...</image><slice>...</slice><slice>...</slice>\\n<slice>...

Frames of a video are such images, one after another, with one id.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError, RequestError
from quire.media.image_ops import resize, to_tensor
from quire.media.processor import (
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    Expansion,
    KwargRange,
    MediaProcessor,
    Modality,
    Pixels,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import HALF, cut_tiles, scale_shift

USUAL = {
    "resample": 3,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": HALF,
    "image_std": HALF,
    "max_slice_nums": 9,
    "scale_resolution": 448,
    "patch_size": 14,
    "slice_mode": True,
    "downsample_mode": "16x",
    "use_image_id": True,
    "max_num_frames": 128,
    "stack_frames": 1,
}
"""What the files of a checkpoint leave out."""
MAX_ROWS: dict[Modality, int] = {"image": 4096, "video": 16384}
MAX_SLICES = 36
TENTHS = 10
"""Frames of a second of which those of a long video are chosen."""
Grid = tuple[int, int]


class Processor(MediaProcessor):
    modalities: tuple[Modality, ...] = ("image", "video")
    allowed_kwargs: ClassVar = {
        "max_slice_nums": KwargRange(int, 1, MAX_SLICES),
        "use_image_id": KwargRange(bool),
    }

    numbered: ClassVar[tuple[Modality, ...]] = ("image", "video")
    """Modalities whose items have their number before them."""

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.settings = {one: _settings(files, one) for one in self.modalities}
        vision = files.config.get("vision_config") or {}
        self._side = int(vision.get("image_size", 224)) // int(vision.get("patch_size", 16))

    def placeholder(self, modality: Modality, index: int) -> str:
        return f"<|{modality}_pad|>"

    def frame_indices(self, total: int, fps: float, kwargs: Settings) -> list[int]:
        """A frame of each second; of long videos as many, of those at each tenth of a second."""
        if fps <= 0 or "num_frames" in kwargs or "fps" in kwargs:
            return super().frame_indices(total, fps, kwargs)
        most, seconds = int(self.settings["video"]["max_num_frames"]), total / fps
        if seconds <= most:
            found = [int(i * fps) for i in range(math.ceil(seconds))]
        else:
            tenths = [round(i / TENTHS, 1) for i in range(int(seconds / 0.1))]
            chosen = np.linspace(0, len(tenths) - 1, min(most, len(tenths)), dtype=int)
            found = [int(tenths[i] * fps) for i in chosen]
        return sorted({min(one, total - 1) for one in found})

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        modality: Modality = "video" if isinstance(media, DecodedVideo) else "image"
        settings = {**self.settings[modality], **kwargs}
        if isinstance(media, DecodedVideo):
            frames = media.frames
        else:
            assert isinstance(media, DecodedImage)
            frames = media.pixels[None]
        patch, levels = int(settings["patch_size"]), 1 if settings["downsample_mode"] == "4x" else 2
        unit, resample = patch << levels, int(settings["resample"])
        area, (_, tall, wide, _) = int(settings["scale_resolution"]), frames.shape
        grid = None
        if settings["slice_mode"]:
            grid = slice_grid(tall, wide, int(settings["max_slice_nums"]), area)
        whole = fitting_size(tall, wide, area, unit, grows=grid is None)
        tile = None if grid is None else tile_size(tall, wide, grid, area, unit)
        sides = (whole,) if tile is None else (whole, tile)
        shapes = tuple((height // unit, width // unit) for height, width in sides)
        count = math.prod(shapes[0]) + (0 if grid is None else math.prod((*shapes[1], *grid)))
        if count * len(frames) > MAX_ROWS[modality]:
            raise RequestError(
                f"the {modality} has {len(frames)} frames of {count} tokens; the product must be "
                f"at most {MAX_ROWS[modality]}: set max_slice_nums of mm_processor_kwargs, or "
                "num_frames of media_io_kwargs",
                param=modality,
            )
        made = [nested_patches(resize(one, *whole, resample), patch, levels) for one in frames]
        tensors = [
            to_tensor("scale_shift", scale_shift(settings)),
            to_tensor("whole", np.stack(made)),
            to_tensor("whole_places", self._places(*whole, patch, levels)),
        ]
        if grid is not None and tile is not None:
            all_tiles = []
            for one in frames:
                large = resize(one, tile[0] * grid[0], tile[1] * grid[1], resample)
                tiles = cut_tiles(large, *tile)
                all_tiles.append(np.stack([nested_patches(t, patch, levels) for t in tiles]))
            tensors.append(to_tensor("tiles", np.stack(all_tiles)))
            tensors.append(to_tensor("tile_places", self._places(*tile, patch, levels)))
        sizes = {"grid": grid or (0, 0), "shapes": shapes, "frames": len(frames)}
        sizes["marked"] = int(bool(settings["use_image_id"]))
        return ProcessedMedia(modality, tuple(tensors), sizes)

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        pad = self._id(f"{media.modality}_token_id", self.placeholder(media.modality, index))
        image, slice_ = (
            (self._token(f"<{name}>"), self._token(f"</{name}>")) for name in ("image", "slice")
        )
        tall, wide = media.sizes["grid"]
        whole, *tile = (math.prod(shape) for shape in media.sizes["shapes"])
        ids: list[int] = []
        runs = []

        def put(around: tuple[int, int], rows: int) -> None:
            ids.append(around[0])
            runs.append((len(ids), rows))
            ids.extend((*[pad] * rows, around[1]))

        if media.sizes["marked"] and media.modality in self.numbered:
            ids += self.files.tokenize(f"<image_id>{index - 1}</image_id>")
        line_break = self.files.tokenize("\n") if tall > 1 else ()
        for _ in range(media.sizes["frames"]):
            put(image, whole)
            for row in range(tall):
                ids += line_break if row else ()
                for _ in range(wide):
                    put(slice_, tile[0])
        return Expansion(tuple(ids), tuple(runs), replaces=(pad,))

    def _places(self, height: int, width: int, patch: int, levels: int) -> npt.NDArray[np.int32]:
        """Places of a tile's patches in the table of positions, in their order."""
        rows, columns = (nearest_places(size // patch, self._side) for size in (height, width))
        return nested(rows[:, None] * self._side + columns, levels).reshape(-1).astype(np.int32)

    def _token(self, text: str) -> int:
        found = self.files.token_id(text)
        if found is None:
            raise ConfigError(f"the tokenizer has no token {text}")
        return found

    def _id(self, field: str, text: str) -> int:
        found = self.files.config.get(field)
        return self._token(text) if found is None else int(found)


def _settings(files: ProcessorFiles, modality: Modality) -> dict[str, Any]:
    """Read the settings of a modality. Raises ConfigError."""
    stated = {k: v for k, v in files.preprocessor(modality).items() if v is not None}
    found = {**USUAL, **stated}
    if modality == "video":  # of the marks, the file of images decides
        image = files.preprocessor("image").get("use_image_id")
        found["use_image_id"] = USUAL["use_image_id"] if image is None else image
    vision = files.config.get("vision_config") or {}
    for name, ours, theirs in (
        ("downsample_mode", found["downsample_mode"], files.config.get("downsample_mode", "16x")),
        ("patch_size", found["patch_size"], vision.get("patch_size", 16)),
        ("stack_frames", found["stack_frames"], 1),
        ("do_resize", found["do_resize"], True),
    ):
        if ours != theirs:
            raise ConfigError(
                f"the processor's {name} for {modality}s is {ours}; it must be {theirs}"
            )
    return found


def slice_grid(height: int, width: int, most: int, area: int) -> Grid | None:
    """Return (rows, columns) of slices of an image, whose ratio is nearest; None: there are none.

    area: the side of a square of as many pixels as a slice has.
    """
    wanted = min(math.ceil(height * width / area**2), most)
    if wanted <= 1:
        return None
    ratio = math.log(width / height)
    grids = [
        (rows, count // rows)
        for count in (wanted - 1, wanted, wanted + 1)
        if 1 < count <= most
        for rows in range(1, count + 1)
        if count % rows == 0
    ]

    def rank(grid: Grid) -> tuple[float, int]:
        return abs(ratio - math.log(grid[1] / grid[0])), -grid[0]

    return min(grids, key=rank)


def fitting_size(
    height: float, width: float, area: int, unit: int, *, grows: bool
) -> tuple[int, int]:
    """Return (height, width) in whole units, of about as many pixels as a square of the side
    `area` if an image has more, or if it `grows`."""
    if grows or height * width > area**2:
        ratio = width / height
        height = int(area / math.sqrt(ratio))
        width = int(height * ratio)
    return whole_units(height, unit), whole_units(width, unit)


def tile_size(height: int, width: int, grid: Grid, area: int, unit: int) -> tuple[int, int]:
    """Return (height, width) of a slice."""
    rows, columns = grid
    tall, wide = whole_units(height, rows) / rows, whole_units(width, columns) / columns
    return fitting_size(tall, wide, area, unit, grows=True)


def whole_units(length: float, unit: int) -> int:
    """Return the nearest multiple, at least one."""
    return max(round(length / unit) * unit, unit)


def nested(cells: npt.NDArray[Any], levels: int) -> npt.NDArray[Any]:
    """[R, C, ...] -> [R / 2^levels, C / 2^levels, 4^levels, ...]: squares, of which each has the
    squares of the level below one after another."""
    rows, columns, *rest = cells.shape
    side = 1 << levels
    rows, columns = rows // side, columns // side
    split = cells.reshape(rows, *[2] * levels, columns, *[2] * levels, *rest)
    order = [0, levels + 1]
    for level in range(levels):
        order += [1 + level, levels + 2 + level]
    order += range(2 * levels + 2, split.ndim)
    return split.transpose(order).reshape(rows, columns, side**2, *rest)


def nested_patches(pixels: Pixels, patch: int, levels: int) -> Pixels:
    """[H, W, 3] -> [patches, 3 * patch * patch], in the order in which they are merged."""
    height, width, channels = pixels.shape
    cut = pixels.reshape(height // patch, patch, width // patch, patch, channels)
    cells = nested(cut.transpose(0, 2, 4, 1, 3), levels)
    return np.ascontiguousarray(cells).reshape(-1, channels * patch * patch)


def nearest_places(count: int, side: int) -> npt.NDArray[np.int64]:
    """Return the place among `side` of an axis for each of `count` patches.

    transformers computes in float32, so that a patch on the border of two places has either one,
    as rounding has it. It is the later one here.
    """
    return np.arange(count, dtype=np.int64) * side // count
