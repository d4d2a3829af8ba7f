"""Bodies of forms with files (multipart/form-data), from bytes that were read whole."""

from __future__ import annotations

import email.message
import re
from dataclasses import dataclass

from quire.errors import RequestError

MAX_PARTS = 128
MAX_HEADER_BYTES = 8192
"""Of one part."""
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{1,70}")


@dataclass(frozen=True, slots=True)
class FormPart:
    """One field. filename: None: it is no file."""

    name: str
    data: bytes
    filename: str | None = None


def parse_form(content_type: str, body: bytes) -> list[FormPart]:
    """Parse a body. Raises RequestError for one of another type, or that is malformed."""
    kind, options = _options(content_type)
    if kind != "multipart/form-data":
        raise RequestError(
            f"send the body as Content-Type: multipart/form-data, not {kind or 'nothing'!r:.60}"
        )
    boundary = options.get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise RequestError("the multipart body has no boundary in its Content-Type")
    mark = b"\r\n--" + boundary.encode()
    pieces = (b"\r\n" + body).split(mark, MAX_PARTS + 1)
    if len(pieces) > MAX_PARTS + 1:
        raise RequestError(f"the form must have at most {MAX_PARTS} fields")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise RequestError("the multipart body does not end with its boundary")
    return [_parse_part(one) for one in pieces[1:-1]]


def _parse_part(piece: bytes) -> FormPart:
    head, found, data = piece.partition(b"\r\n\r\n")
    if not found or len(head) > MAX_HEADER_BYTES or not head.lstrip(b" \t").startswith(b"\r\n"):
        raise RequestError("a part of the multipart body has no headers, or too long ones")
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            kind, options = _options(value)
            if kind == "form-data" and "name" in options:
                return FormPart(options["name"], data, options.get("filename"))
    raise RequestError("a part of the multipart body has no name")


def _options(header: str) -> tuple[str, dict[str, str]]:
    """The value of a header and its parameters, unquoted."""
    message = email.message.Message()
    message["content-type"] = header.strip()
    (kind, _), *rest = message.get_params([("", "")])
    return kind.lower(), {key.lower(): value for key, value in rest if isinstance(value, str)}
