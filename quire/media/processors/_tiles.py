"""Tilings: the grid of tiles whose aspect ratio is nearest to that of an image."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from quire.media.image_ops import resize
from quire.media.processor import Pixels
from quire.media.processors._pixels import cut_tiles


@lru_cache
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """(rows, columns) of least to most tiles, by their number."""
    side = range(1, most + 1)
    found = [(y, x) for x in side for y in side if least <= x * y <= most]
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def nearest_grid(
    height: int,
    width: int,
    tile: tuple[int, int],
    least: int,
    most: int,
    allowed: Callable[[tuple[int, int]], bool] = lambda grid: True,
) -> tuple[int, int]:
    """Return (rows, columns). Of equally near ones: the larger, if the image has half its pixels.

    tile: (height, width). allowed: which grids count; (1, 1) if none does.
    """
    best, nearest = (1, 1), float("inf")
    for rows, columns in filter(allowed, _grids(least, most)):
        distance = abs(width / height - columns / rows)
        larger = height * width > 0.5 * tile[0] * tile[1] * rows * columns
        if distance < nearest or (distance == nearest and larger):
            best, nearest = (rows, columns), distance
    return best


def tiles_with_thumbnail(
    pixels: Pixels,
    tile: tuple[int, int],
    least: int,
    most: int,
    resample: int,
    *,
    thumbnail: bool = True,
) -> list[Pixels]:
    """Cut an image into least to most tiles; the whole image follows if there are several."""
    height, width = pixels.shape[:2]
    rows, columns = nearest_grid(height, width, tile, least, most)
    whole = resize(pixels, rows * tile[0], columns * tile[1], resample)
    found = cut_tiles(whole, *tile)
    if thumbnail and len(found) > 1:
        found.append(resize(pixels, *tile, resample))
    return found


def best_resolution(height: int, width: int, sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the size that shows most of the image's pixels and wastes least."""

    def rank(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        shown = min(int(width * scale) * int(height * scale), height * width)
        return shown, shown - size[0] * size[1]

    return max(sizes, key=rank)  # of equals the first
