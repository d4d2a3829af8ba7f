"""Media parts of messages, in the forms of the APIs, taken out of the messages.

    {"type": "image_url", "image_url": {"url": ...} or "..."}      input_image, video_url, audio_url
    {"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}
    {"type": "image_embeds", "image_embeds": base64, or a dict of them}
    {"type": "image_pil", "image_pil": PIL.Image}                  offline

each with an optional "uuid", the caller's name of the content, which may then be null. In the
messages {"type": "image"} remains: chat templates read that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from quire.errors import RequestError, Unsupported
from quire.media.items import MediaSource, check_uuid, decode_base64, invalid_part
from quire.media.objects import read_object
from quire.media.processor import Modality

ReadTensor = Callable[[str], Any]
"""Reads base64 of a stored tensor. Raises RequestError."""

_KINDS: dict[str, tuple[Modality, str]] = {
    "image_url": ("image", "url"),
    "input_image": ("image", "url"),
    "image": ("image", "any"),
    "image_pil": ("image", "object"),
    "image_embeds": ("image", "embeds"),
    "video_url": ("video", "url"),
    "video": ("video", "any"),
    "video_embeds": ("video", "embeds"),
    "audio_url": ("audio", "url"),
    "audio": ("audio", "any"),
    "input_audio": ("audio", "base64"),
    "audio_embeds": ("audio", "embeds"),
}
"""Type of a part -> modality and form of its value."""


class ExtractedMedia(NamedTuple):
    """Messages without the contents of their media, and those in order."""

    messages: list[Any]
    parts: list[MediaSource]


def extract_parts(
    messages: Sequence[Any],
    *,
    objects: bool = False,
    read_tensor: ReadTensor | None = None,
    where: str = "messages",
) -> ExtractedMedia:
    """Take the media out of messages, which are not modified. Raises RequestError, Unsupported.

    objects: images may also be objects of PIL, arrays and tensors: the caller is this process.
    read_tensor: of embeddings; None: those are refused.
    """
    made: list[Any] = []
    parts: list[MediaSource] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(is_media_part, content)):
            made.append(message)
            continue
        kept: list[object] = []
        for j, part in enumerate(content):
            if not is_media_part(part):
                kept.append(part)
                continue
            found = read_part(part, f"{where}[{i}].content[{j}]", objects, read_tensor)
            parts.append(found)
            kept.append({"type": found.modality})
        made.append({**message, "content": kept})
    return ExtractedMedia(made, parts)


def _part_type(part: Mapping[str, Any]) -> str | None:
    kind = part.get("type")
    if kind is None and "text" not in part:
        kind = next((key for key in part if key in _KINDS), None)
    return kind if isinstance(kind, str) else None


def is_media_part(part: object) -> bool:
    """Whether a part of a content is an image, a video or a recording."""
    return isinstance(part, Mapping) and _part_type(part) in _KINDS


def read_part(
    part: Mapping[str, Any], where: str, objects: bool, read_tensor: ReadTensor | None
) -> MediaSource:
    """Read one part. where: its place in the request. The rest: see extract_parts()."""
    kind = cast(str, _part_type(part))
    modality, form = _KINDS[kind]
    uuid = check_uuid(part.get("uuid"), where)
    given = part.get(kind)
    if kind == "input_image":
        if part.get("file_id") is not None:
            message = f"{where}.file_id: this server has no files; send image_url"
            raise Unsupported(message, param="messages")
        given = part.get("image_url")
    if given is None:
        if uuid is None:
            name = "image_url" if kind == "input_image" else kind
            raise invalid_part(where, f"has no {name}")
        return MediaSource(modality, where, uuid=uuid)
    if form == "url" or (form == "any" and isinstance(given, str | Mapping)):
        return MediaSource(modality, where, url=_read_url(given, f"{where}.{kind}"), uuid=uuid)
    if form == "base64":
        if not isinstance(given, Mapping) or not isinstance(given.get("data"), str):
            raise invalid_part(f"{where}.{kind}", "must be an object with data (base64) and format")
        data = decode_base64(given["data"], f"{where}.{kind}.data")
        return MediaSource(modality, where, data=data, uuid=uuid)
    if form == "embeds":
        return _read_embeds(modality, given, f"{where}.{kind}", uuid, read_tensor)
    if not objects:
        message = f"has the type {kind}, which takes objects of Python; use {modality}_url"
        raise invalid_part(where, message)
    return read_object(modality, given, where, uuid)


def _read_embeds(
    modality: Modality, given: Any, where: str, uuid: str | None, read_tensor: ReadTensor | None
) -> MediaSource:
    if read_tensor is None:
        message = f"{where}: embeddings are off: start with --enable-mm-embeds"
        raise Unsupported(message, param="messages")
    values = given if isinstance(given, Mapping) else {"embeds": given}
    try:
        arrays = {
            key: read_tensor(one) if isinstance(one, str) else one for key, one in values.items()
        }
    except RequestError as error:
        raise invalid_part(where, f"cannot be read: {error}") from None
    return read_object(modality, arrays, where, uuid)


def _read_url(given: object, where: str) -> str:
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url:
        raise invalid_part(where, "must be a URL, or an object with url")
    return url
