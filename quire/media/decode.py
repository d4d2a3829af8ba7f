"""Decodes images and videos of untrusted files, within limits. It runs in worker processes.

Formats are an allow-list. Sizes are read from headers and checked before pixels are decoded.
Recordings: quire.media.audio_decode.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from quire.errors import RequestError, Unsupported
from quire.media.limits import MAX_ASPECT_RATIO, MediaLimits
from quire.media.processor import (
    DecodedImage,
    DecodedVideo,
    MediaProcessor,
    Pixels,
    Settings,
    VideoInfo,
)

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
VIDEO_FORMATS = "MP4, MOV, WebM, Matroska, AVI"
SCAN = re.compile(rb"\xff\xda\0(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")
"""Head of a scan of a JPEG file: length, and one to four components."""
ORIENTATION = 0x0112
"""Tag of EXIF."""
MAX_SCANS = 100
"""Of a JPEG file: each is a pass over all its pixels. Progressive ones have about ten."""
MAX_FRAME_PIXELS = 1 << 25
"""Pixels of one frame of a video."""
MAX_PACKETS = 1 << 18
"""Frames of a source: over an hour at 60 frames per second."""


def decode_image(data: bytes, limits: MediaLimits, where: str) -> DecodedImage:
    """Decode an image to RGB, upright; of an animation the first frame. Raises RequestError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata
            image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
            check_size(image.width, image.height, limits, where)
            _check_passes(image, data, where)
            image.load()
            return DecodedImage(image_pixels(image, where))
    except RequestError:
        raise
    except UnidentifiedImageError:
        known = ", ".join(IMAGE_FORMATS)
        raise _invalid(where, f"is no image of a format that is read: {known}") from None
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - decoders raise what they like on damaged files
        raise _invalid(where, f"cannot be decoded ({type(error).__name__}): is it whole?") from None


def _check_passes(image: Image.Image, data: bytes, where: str) -> None:
    """Raise RequestError for files that take far longer than their pixels, or have several."""
    scans = SCAN.finditer(data) if image.format in ("JPEG", "MPO") else ()
    if sum(1 for _ in scans) > MAX_SCANS:
        raise _invalid(where, f"has more than {MAX_SCANS} scans; progressive files have about ten")
    if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:
        raise _invalid(where, "is a TIFF file of several pages; send one page")


def check_size(width: int, height: int, limits: MediaLimits, where: str) -> None:
    """Raise RequestError for sizes that no model reads."""
    if width < 1 or height < 1:
        raise _invalid(where, f"has a size of {width} x {height} pixels")
    if width * height > limits.pixels:
        most = limits.pixels
        raise _invalid(where, f"has {width} x {height} pixels; at most {most} in all are read")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        message = f"has {width} x {height} pixels; one side may be at most {MAX_ASPECT_RATIO}"
        raise _invalid(where, f"{message} times as long as the other")


def image_pixels(image: Image.Image, where: str) -> Pixels:
    """Return [height, width, 3] in RGB: upright, transparency on white, 16 bits cut to 8."""
    with suppress(Exception):  # orientation in damaged EXIF data is ignored
        if image.getexif().get(ORIENTATION, 1) != 1:  # it copies in any case
            image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_8_bits(image, where)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _to_8_bits(image: Image.Image, where: str) -> Image.Image:
    values = np.asarray(image)
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            raise _invalid(where, "has pixels that are not numbers")
        scaled = np.clip(values * (255.0 if values.max() <= 1 else 1.0), 0, 255)
    elif image.mode == "I" and values.max() < 256:
        scaled = np.clip(values, 0, 255)
    else:
        scaled = np.clip(values, 0, 65535) // 257
    return Image.fromarray(scaled.astype(np.uint8))


# -- video ------------------------------------------------------------------------------------


def decode_video(
    data: bytes, processor: MediaProcessor, options: Settings, limits: MediaLimits, where: str
) -> DecodedVideo:
    """Decode the frames that the processor samples. options: media_io_kwargs of video.

    Frames are counted in the file: its header may state any number. Raises RequestError,
    Unsupported without PyAV.
    """
    try:
        import av
    except ImportError:
        message = "video files need PyAV: pip install 'quire-llm[video]'"
        raise Unsupported(message, param="messages") from None
    name = video_format(data)
    if name is None:
        raise _invalid(where, f"is no video of a format that is read: {VIDEO_FORMATS}")
    try:
        with av.open(io.BytesIO(data), format=name, metadata_errors="replace") as container:
            return _sampled(container, processor, options, limits, where)
    except RequestError:
        raise
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - PyAV raises many kinds on damaged files
        raise _invalid(where, f"cannot be decoded ({type(error).__name__}): is it whole?") from None


def video_format(data: bytes) -> str | None:
    """FFmpeg's name of the format. It would follow the addresses in playlists: none is opened."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return "mov"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    return None


@dataclass(frozen=True, slots=True)
class _Frames:
    """Times of presentation of a source's frames, in order, and of those that can be sought."""

    times: list[int]
    keys: list[int]

    def key_before(self, time: int) -> int | None:
        """Return the last key frame that is not after a time."""
        place = int(np.searchsorted(self.keys, time, side="right"))
        return self.keys[place - 1] if place else None


def _sampled(
    container: Any, processor: MediaProcessor, options: Settings, limits: MediaLimits, where: str
) -> DecodedVideo:
    if not container.streams.video:
        raise _invalid(where, "has no video stream")
    stream = container.streams.video[0]
    width, height = stream.codec_context.width, stream.codec_context.height
    check_size(width, height, limits, where)
    if width * height > MAX_FRAME_PIXELS:
        message = f"has frames of {width} x {height} pixels; at most {MAX_FRAME_PIXELS} are read"
        raise _invalid(where, message)
    found = _list_frames(container, stream, where)
    total = len(found.times)
    seconds = float((found.times[-1] - found.times[0]) * stream.time_base)
    fps = float(stream.average_rate or 0) or ((total - 1) / seconds if seconds > 0 else 1.0)
    fps = min(max(fps, 1e-3), 1e3)
    indices = processor.frame_indices(total, fps, options)
    most = min(limits.frames, max(limits.frame_bytes // (width * height * 3), 1))
    if len(indices) > most:
        message = f"gives {len(indices)} frames of {width} x {height} pixels; at most {most}"
        raise _invalid(where, f"{message} are decoded: ask for fewer (num_frames, fps)")
    frames = np.empty((len(indices), height, width, 3), np.uint8)
    wanted = [found.times[i] for i in indices]
    count = 0
    for frame in _decode_at(container, stream, found, wanted):
        if (frame.width, frame.height) != (width, height):
            frame = frame.reformat(width=width, height=height)
        while count < len(wanted) and frame.pts >= wanted[count]:
            frames[count] = frame.to_ndarray(format="rgb24")
            count += 1
    if count < len(indices):
        raise _invalid(where, f"ends after {count} of the {len(indices)} frames that are read")
    return DecodedVideo(frames, VideoInfo(fps, tuple(indices), total, total / fps))


def _list_frames(container: Any, stream: Any, where: str) -> _Frames:
    """Read the packets of the stream without decoding them."""
    times, keys = [], []
    for packet in container.demux(stream):
        if packet.pts is None or not packet.size:
            continue
        times.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
        if len(times) > MAX_PACKETS:
            raise _invalid(where, f"has more than {MAX_PACKETS} frames")
    if not times:
        raise _invalid(where, "has no frames")
    return _Frames(sorted(times), sorted(keys))


def _decode_at(container: Any, stream: Any, found: _Frames, wanted: list[int]) -> Iterator[Any]:
    """Yield frames, among them those at the wanted times.

    It seeks where that skips frames, and only forward: in a file whose times are out of order a
    seek may lead back.
    """
    place = 0
    sought: int | None = None
    while place < len(wanted):
        key = found.key_before(wanted[place])
        if sought is None or (key is not None and key > sought):
            sought = key if key is not None else found.times[0]
            container.seek(sought, stream=stream)
        for frame in container.decode(stream):
            if frame.pts is None:
                continue
            while place < len(wanted) and frame.pts >= wanted[place]:
                place += 1
            yield frame
            if place == len(wanted):
                return
            key = found.key_before(wanted[place])
            if key is not None and key > max(sought, frame.pts):
                break  # the frames between are not decoded
        else:
            return


def _invalid(where: str, problem: str) -> RequestError:
    return RequestError(f"{where} {problem}")
