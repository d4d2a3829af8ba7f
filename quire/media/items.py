"""Media items of a request that are not yet read, and the checks that all forms share."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from quire.errors import RequestError
from quire.media.processor import DecodedAudio, DecodedMedia, DecodedVideo, Modality

MAX_UUID_CHARS = 256


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One image, video or recording. It has one of the five contents, or a uuid alone.

    where: its place in the request, for errors. uuid: the caller's name of the content; alone it
    is what an earlier request of the same tenant had under it.
    """

    modality: Modality
    where: str
    url: str | None = None
    data: bytes | None = None  # an encoded file
    decoded: DecodedMedia | None = None
    embeds: Mapping[str, Any] | None = None  # arrays by name; "embeds": [rows, width]
    arrays: Mapping[str, Any] | None = None  # by name, of families that read them
    uuid: str | None = None

    @property
    def param(self) -> str:
        """The field of the request that has it."""
        return param_of(self.where)


def with_sounds(parts: Sequence[MediaSource]) -> list[MediaSource]:
    """Return the parts with the samples of recordings as the sounds of videos given as frames, in
    order; those recordings are no parts any more. A video that is a file has its sound in it.

    Raises RequestError unless the recordings are as many.
    """
    silent = [i for i, one in enumerate(parts) if isinstance(one.decoded, DecodedVideo)]
    heard = [i for i, one in enumerate(parts) if one.modality == "audio"]
    if not silent or not heard:
        return list(parts)
    if len(silent) != len(heard):
        raise invalid_part(
            parts[heard[0]].where,
            f"is one of {len(heard)} recordings beside {len(silent)} videos of frames: with the "
            "sound of videos each of these needs one",
        )
    found = list(parts)
    for video, audio in zip(silent, heard):
        sound = parts[audio].decoded
        if not isinstance(sound, DecodedAudio):
            raise invalid_part(parts[audio].where, "must be samples: it is the sound of a video")
        decoded = replace(cast(DecodedVideo, parts[video].decoded), sound=sound)
        found[video] = replace(parts[video], decoded=decoded)
    return [one for i, one in enumerate(found) if i not in heard]


def param_of(where: str) -> str:
    """Return the field of the request in which a place is: messages[0].content[1] -> messages."""
    return where.partition("[")[0].partition(".")[0]


def invalid_part(where: str, problem: str) -> RequestError:
    """Return the error of a part: its place, and what is wrong with it."""
    return RequestError(f"{where} {problem}", param=param_of(where))


def check_uuid(given: object, where: str) -> str | None:
    """Return the caller's name of an item. Raises RequestError."""
    if given is None:
        return None
    if not isinstance(given, str) or not 0 < len(given) <= MAX_UUID_CHARS:
        message = f"must be text of 1 to {MAX_UUID_CHARS} characters"
        raise invalid_part(f"{where}.uuid", message)
    return given


def decode_base64(text: str, where: str) -> bytes:
    """Decode strictly: no character is skipped. Raises RequestError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid_part(where, "is not valid base64") from None
