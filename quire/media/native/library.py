"""Native library of media: resizes images as PIL does, with equal pixels, several times as fast.

An API process finds or builds the library, and its workers load it before they lose their access to
files. Without it PIL resizes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from contextlib import suppress

import numpy as np
import PIL

from quire import env
from quire.media.processor import Pixels
from quire.platform.native_build import RESIZE, NativeBuildError

logger = logging.getLogger(__name__)

FILTERS = range(1, 6)
"""PIL's numbers of the filters that the library has: lanczos, bilinear, bicubic, box, hamming."""
_DOWN_MAY_BE_FIRST = int(PIL.__version__.partition(".")[0]) >= 13
_Arguments = ctypes.c_long * 10
_lock = threading.Lock()
_library: ctypes.CDLL | None = None
"""That of this process. Written by load_library() only."""


def find_library() -> str:
    """Return the path of the library, which the first call on a machine builds; "" if there is
    none: the log says why."""
    with _lock:
        return _find()


@functools.cache
def _find() -> str:
    settings = env.read()
    if settings.cpu_isa == "none":
        return ""
    try:
        path = str(RESIZE.find_or_build(settings.cache_dir, settings.cpu_isa))
        ctypes.CDLL(path)  # the loader may refuse the file, and workers have no log
    except (NativeBuildError, OSError) as e:
        logger.warning("no native library for images: PIL resizes them, more slowly. %s", e)
        return ""
    return path


def load_library(path: str) -> None:
    """Let this process use the library; "": PIL."""
    global _library
    _library = None
    with suppress(OSError):
        _library = ctypes.CDLL(path) if path else None


def resize(pixels: Pixels, height: int, width: int, resample: int) -> Pixels | None:
    """Resize [h, w, 3] to [height, width, 3]. None: PIL must. Raises MemoryError."""
    tall, wide, *channels = pixels.shape
    if _library is None or resample not in FILTERS or min(tall, wide, height, width) < 1:
        return None
    if channels != [3] or pixels.dtype != np.uint8:
        return None
    if pixels.strides[1:] != (3, 1):
        pixels = np.ascontiguousarray(pixels)
    made = np.empty((height, width, 3), np.uint8)
    # PIL's order of the two passes: each rounds to 8 bits, so the order shows in the pixels.
    down_first = _DOWN_MAY_BE_FIRST and tall - height > max(0, 2 * (wide - width))
    given = (pixels.ctypes.data, pixels.strides[0], tall, wide)
    wanted = (made.ctypes.data, made.strides[0], height, width)
    if _library.quire_resize(_Arguments(*given, *wanted, resample, down_first)):
        raise MemoryError(f"no memory to resize {wide} x {tall} pixels to {width} x {height}")
    return made
