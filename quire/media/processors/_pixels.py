"""Settings of image processors, and the tensors of items that are images of one size or tiles.

Pixels stay 8-bit integers up to the encoder: it rescales and normalizes them on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from quire.errors import ConfigError
from quire.media.image_ops import center_crop, pad, resize, shortest_edge_size, to_tensor
from quire.media.processor import (
    DecodedImage,
    DecodedMedia,
    MediaProcessor,
    Pixels,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
CLIP = {
    "do_resize": True,
    "size": {"shortest_edge": 224},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
"""What a preprocessor_config.json of CLIP leaves out."""
SIGLIP = CLIP | {
    "size": {"height": 224, "width": 224},
    "do_center_crop": False,
    "image_mean": HALF,
    "image_std": HALF,
}


def image_settings(files: ProcessorFiles, defaults: Settings) -> dict[str, Any]:
    """Return the settings of images, with the family's defaults of those that files leave out."""
    stated = files.preprocessor("image")
    return {**defaults, **{key: value for key, value in stated.items() if value is not None}}


def size_of(settings: Settings, key: str = "size") -> tuple[int, int]:
    """Return a size in settings as (height, width). Raises ConfigError."""
    size = settings[key]
    if isinstance(size, int):
        return size, size
    if isinstance(size, Mapping):
        if "height" in size and "width" in size:
            return int(size["height"]), int(size["width"])
        if "shortest_edge" in size:
            return int(size["shortest_edge"]), int(size["shortest_edge"])
    raise ConfigError(f"preprocessor_config.json: {key} is {size!r:.80}; it must be a size")


def scale_shift(settings: Settings) -> np.ndarray[Any, Any]:
    """Return [2, 3] float32: x * scale + shift rescales and normalizes a pixel."""
    factor = float(settings["rescale_factor"]) if settings.get("do_rescale") else 1.0
    mean, std = np.zeros(3), np.ones(3)
    if settings.get("do_normalize"):
        mean += np.asarray(settings["image_mean"], np.float64)
        std *= np.asarray(settings["image_std"], np.float64)
    return np.stack((factor / std, -mean / std)).astype(np.float32)


def resized_and_cropped(pixels: Pixels, settings: Settings) -> Pixels:
    """Resize by `size` and crop, as the settings have it."""
    if settings.get("do_pad"):
        color = [int(255 * mean) for mean in settings["image_mean"]]
        pixels = padded_to_square(pixels, color)
    if settings.get("do_resize"):
        size = settings["size"]
        if isinstance(size, Mapping) and "shortest_edge" in size:
            height, width = pixels.shape[:2]
            shape = shortest_edge_size(height, width, int(size["shortest_edge"]))
        else:
            shape = size_of(settings)
        pixels = resize(pixels, *shape, int(settings["resample"]))
    if settings.get("do_center_crop"):
        pixels = center_crop(pixels, *size_of(settings, "crop_size"))
    return pixels


def padded_to_square(pixels: Pixels, color: Sequence[int]) -> Pixels:
    """Put the image in the middle of a square of its longer side."""
    height, width = pixels.shape[:2]
    side = max(height, width)
    if height == width:
        return pixels
    top, left = (side - height) // 2, (side - width) // 2
    return pad(pixels, side, side, top=top, left=left, color=color)


def pixels_of(media: DecodedMedia) -> Pixels:
    """Return the pixels of an image. Other media do not reach these processors."""
    assert isinstance(media, DecodedImage)
    return media.pixels


def cut_tiles(pixels: Pixels, height: int, width: int) -> list[Pixels]:
    """Cut an image into tiles of this size, row by row."""
    rows, columns = pixels.shape[0] // height, pixels.shape[1] // width
    return [
        pixels[y * height : (y + 1) * height, x * width : (x + 1) * width]
        for y in range(rows)
        for x in range(columns)
    ]


def tiles_of(media: ProcessedMedia, name: str, rows: int) -> int:
    """Return how many tiles of so many rows an item has. name: of their number in its sizes.

    Embeddings that were given have their rows alone.
    """
    return int(media.sizes[name]) if name in media.sizes else max(media.sizes["rows"] // rows, 1)


class ImageProcessor(MediaProcessor):
    """Base of processors of still images whose encoder reads `pixels` and `scale_shift`."""

    defaults: ClassVar[Settings] = CLIP

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.settings = image_settings(files, self.defaults)
        self.scale_shift = scale_shift(self.settings)

    def placeholder(self, modality: str, index: int) -> str:
        return str(self.files.processor.get("image_token") or "<image>")

    @property
    def image_id(self) -> int:
        """Id of the placeholder of an image, which each of its rows has too."""
        for key in ("image_token_id", "image_token_index"):
            if isinstance(found := self.files.config.get(key), int):
                return found
        return self.token(self.placeholder("image", 1))

    @property
    def video_id(self) -> int:
        """Id of the placeholder of a video, which each of its rows has too."""
        for key in ("video_token_id", "video_token_index"):
            if isinstance(found := self.files.config.get(key), int):
                return found
        return self.token(self.placeholder("video", 1))

    def token(self, text: str) -> int:
        """Return the id of a token. Raises ConfigError if there is none."""
        found = self.files.token_id(text)
        if found is None:
            raise ConfigError(f"the tokenizer has no token {text!r}, which images need")
        return found

    def item(self, tiles: Sequence[Pixels], sizes: Mapping[str, Any] = {}) -> ProcessedMedia:
        """Pack tiles of one size."""
        tensors = (
            to_tensor("pixels", np.stack(tiles)),
            to_tensor("scale_shift", self.scale_shift),
        )
        return ProcessedMedia("image", tensors, dict(sizes))
