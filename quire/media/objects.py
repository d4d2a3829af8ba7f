"""Objects of Python as media: images of PIL, arrays, tensors, and given embeddings.

    {"image": one or a list, "video": ..., "audio": ...}     multi_modal_data of offline prompts

Torch is not imported: a tensor is read by its own methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from PIL import Image

from quire.errors import RequestError, Unsupported
from quire.media.decode import check_size, image_pixels
from quire.media.items import MediaSource, check_uuid, invalid_part
from quire.media.limits import MediaLimits
from quire.media.processor import (
    DecodedAudio,
    DecodedImage,
    DecodedVideo,
    Modality,
    Pixels,
    VideoInfo,
)

MODALITIES: tuple[Modality, ...] = ("image", "video", "audio")
DATA, UUIDS = "multi_modal_data", "multi_modal_uuids"
CHANNELS = (1, 3, 4)
UNKNOWN_RATE = 0
"""Sampling rate of samples that are in the rate of the model."""
_READING = tuple(Lock() for _ in range(64))
"""Held while an image is read, by its address: PIL loads its file at the first use, and an image
may be in several prompts, which threads read."""
_ALIASES = {"images": "image", "videos": "video", "audios": "audio"}


def read_media_data(data: object, uuids: object = None) -> list[MediaSource]:
    """Read multi_modal_data and multi_modal_uuids of a prompt. Raises RequestError, Unsupported."""
    if data is not None and not isinstance(data, Mapping):
        message = f"{DATA} must be a dict of image, video and audio, got a {type(data).__name__}"
        raise RequestError(message, param=DATA)
    if uuids is not None and not isinstance(uuids, Mapping):
        message = f"{UUIDS} must be a dict of image, video and audio"
        raise RequestError(message, param=UUIDS)
    by_name = _by_modality(data or {}, DATA)
    names = _by_modality(uuids or {}, UUIDS)
    found: list[MediaSource] = []
    for modality in MODALITIES:
        items = _as_items(modality, by_name.get(modality))
        named = names.get(modality)
        listed = list(named) if isinstance(named, list | tuple) else [named] * (named is not None)
        if listed and not items:
            items = [None] * len(listed)
        if listed and len(listed) != len(items):
            raise RequestError(
                f"{UUIDS}[{modality!r}] has {len(listed)} entries for {len(items)} items",
                param=UUIDS,
            )
        for i, item in enumerate(items):
            where = f"{DATA}.{modality}[{i}]"
            found.append(read_object(modality, item, where, listed[i] if listed else None))
    return found


def _by_modality(given: Mapping[Any, Any], param: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = _ALIASES.get(str(key), str(key))
        if name not in MODALITIES:
            known = ", ".join(MODALITIES)
            raise Unsupported(f"{param} has {key!r:.80}; known are {known}", param=param)
        found[name] = value
    return found


def _as_items(modality: Modality, given: Any) -> list[Any]:
    """The items of one modality: a list, or what is one item alone."""
    if given is None:
        return []
    if isinstance(given, list):
        is_frames = modality == "video" and given and isinstance(given[0], Image.Image)
        is_samples = modality == "audio" and given and isinstance(given[0], float | int)
        return [given] if is_frames or is_samples else given
    shape = getattr(given, "shape", None)
    if shape is not None and len(shape) == 3 and _is_embeds(modality, given):
        return list(given)
    return [given]


def _is_embeds(modality: Modality, given: Any) -> bool:
    """Whether an array has embeddings: rows of numbers where pixels or samples need other axes.

    [1 or 3, n, m] may be either; pixels are never below 0.
    """
    shape = tuple(given.shape)
    if modality == "image":
        if len(shape) != 3 or shape[-1] in CHANNELS:
            return len(shape) == 2
        return shape[0] not in (1, 3) or (0 not in shape and bool(given.min() < 0))
    return len(shape) in (2, 3) if modality == "audio" else len(shape) == 2


def read_object(modality: Modality, given: Any, where: str, uuid: object = None) -> MediaSource:
    """Read one item of a caller in this process. None is allowed beside a uuid.

    Raises RequestError.
    """
    name = check_uuid(uuid, where)
    if given is None:
        if name is None:
            raise invalid_part(where, "is None, and has no uuid")
        return MediaSource(modality, where, uuid=name)
    if isinstance(given, Mapping):
        if given and not any(str(key).endswith("embeds") for key in given):
            return MediaSource(modality, where, arrays=_arrays_by_name(given, where), uuid=name)
        return MediaSource(modality, where, embeds=_embeds_by_name(given, where), uuid=name)
    if isinstance(given, bytes):
        return MediaSource(modality, where, data=given, uuid=name)
    if hasattr(given, "shape") and _is_embeds(modality, given):
        return MediaSource(modality, where, embeds={"embeds": to_array(given, where)}, uuid=name)
    if modality == "image":
        return MediaSource(modality, where, decoded=_image(given, where), uuid=name)
    if modality == "video":
        return MediaSource(modality, where, decoded=_video(given, where), uuid=name)
    return MediaSource(modality, where, decoded=_audio(given, where), uuid=name)


def _embeds_by_name(given: Mapping[Any, Any], where: str) -> dict[str, npt.NDArray[Any]]:
    """{"image_embeds": rows, "image_grid_thw": ...}: the name of the rows becomes "embeds"."""
    found = {str(key): to_array(value, where) for key, value in given.items()}
    named = [key for key in found if key.endswith("embeds")]
    if len(named) != 1:
        raise invalid_part(where, "is a dict, which must have one entry of embeddings")
    return {"embeds" if key == named[0] else key: value for key, value in found.items()}


def _arrays_by_name(given: Mapping[Any, Any], where: str) -> dict[str, npt.NDArray[Any]]:
    """Arrays of a family, without those that are None or have no numbers."""
    return {
        str(key): to_array(value, f"{where}.{key}")
        for key, value in given.items()
        if value is not None and 0 not in tuple(getattr(value, "shape", ()))
    }


def to_array(given: Any, where: str) -> npt.NDArray[Any]:
    """Return a dense tensor or array as an array; bfloat16 becomes float32. Raises RequestError."""
    layout = str(getattr(given, "layout", "torch.strided"))
    if not layout.endswith("strided") or str(getattr(given, "device", "")) == "meta":
        raise invalid_part(where, "must be a dense tensor with numbers")
    if hasattr(given, "detach"):
        given = given.detach()
        if str(given.dtype) == "torch.bfloat16":
            given = given.float()
        given = given.numpy(force=True)
    try:
        array = np.asarray(given)
    except (TypeError, ValueError):
        raise invalid_part(where, f"is a {type(given).__name__}, which is no array") from None
    if array.dtype.kind not in "uif" or not array.size:
        raise invalid_part(where, f"must be an array of numbers, got {array.dtype}")
    return array


def _image(given: Any, where: str) -> DecodedImage:
    if isinstance(given, Image.Image):
        check_size(given.width, given.height, MediaLimits(), where)
        with _READING[id(given) // 64 % len(_READING)]:
            return DecodedImage(image_pixels(given, where))
    if not hasattr(given, "shape"):
        kind = type(given).__name__
        raise invalid_part(where, f"must be an image of PIL, an array or a tensor, got a {kind}")
    array = _channels_last(_to_uint8(to_array(given, where), where), where)
    check_size(array.shape[1], array.shape[0], MediaLimits(), where)
    return DecodedImage(array)


def _to_uint8(array: npt.NDArray[Any], where: str) -> Pixels:
    """Numbers of 0 to 255, or floats of 0 to 1."""
    if array.dtype == np.uint8:
        return cast(Pixels, array)
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 255:
            raise invalid_part(where, "must have pixels of 0 to 1 or 0 to 255")
        array = array * 255.0 if array.max() <= 1 else array
        return np.rint(array).astype(np.uint8)
    if array.min() < 0 or array.max() > 255:
        raise invalid_part(where, "must have pixels of 0 to 255")
    return array.astype(np.uint8)


def _channels_last(array: Pixels, where: str) -> Pixels:
    """[H, W, 3] of [H, W, 1, 3 or 4] or [1 or 3, H, W]."""
    if array.ndim != 3 or (array.shape[2] not in CHANNELS and array.shape[0] not in (1, 3)):
        shape = list(array.shape)
        raise invalid_part(
            where, f"must have the shape [height, width, 3] or [3, ...], not {shape}"
        )
    if array.shape[2] not in CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.shape[2] == 4:
        return image_pixels(Image.fromarray(array), where)
    if array.shape[2] == 1:
        array = np.repeat(array, 3, axis=2)
    return np.ascontiguousarray(array)


def _video(given: Any, where: str) -> DecodedVideo:
    metadata: Mapping[str, Any] = {}
    if isinstance(given, tuple):
        if len(given) != 2 or not isinstance(given[1], Mapping | None):
            raise invalid_part(where, "is a tuple, which must be (frames, metadata)")
        metadata = given[1] or {}
        given = given[0]
    if isinstance(given, Sequence) and not hasattr(given, "shape"):
        frames = [_image(one, f"{where}[{i}]").pixels for i, one in enumerate(given)]
        if not frames or any(one.shape != frames[0].shape for one in frames):
            raise invalid_part(where, "must have at least one frame, and all of one size")
        array = np.stack(frames)
    else:
        array = _to_uint8(to_array(given, where), where)
        if array.ndim != 4 or 3 not in (array.shape[3], array.shape[1]):
            message = f"must have the shape [frames, height, width, 3], not {list(array.shape)}"
            raise invalid_part(where, message)
        if array.shape[3] != 3:
            array = np.ascontiguousarray(array.transpose(0, 2, 3, 1))
    return DecodedVideo(array, _video_info(metadata, len(array), where))


def _video_info(metadata: Mapping[str, Any], frames: int, where: str) -> VideoInfo:
    try:
        fps = float(metadata.get("fps") or 2.0)
        listed = metadata.get("frames_indices")
        indices = tuple(range(frames)) if listed is None else tuple(int(one) for one in listed)
        total = int(metadata.get("total_num_frames") or max(indices) + 1)
        duration = float(metadata.get("duration") or total / fps)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise invalid_part(where, "has metadata that are not numbers") from None
    if len(indices) != frames or not 0 < fps < 1e4 or not 0 < duration < 1e8:
        message = "has metadata that do not fit: frames_indices has one entry for each frame"
        raise invalid_part(where, f"{message}, fps and duration are positive")
    return VideoInfo(fps, indices, total, duration)


def _audio(given: Any, where: str) -> DecodedAudio:
    rate: Any = UNKNOWN_RATE
    if isinstance(given, tuple):
        if len(given) != 2:
            raise invalid_part(where, "is a tuple, which must be (samples, sampling rate)")
        given, rate = given
    array = to_array(given, where)
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.number):
        raise invalid_part(where, "has a sampling rate that is not a number")
    if array.dtype.kind == "i":
        array = array / np.float32(np.iinfo(array.dtype).max + 1)
    return DecodedAudio(array.astype(np.float32), int(rate))
