"""Errors to HTTP, once: which class is which status, and the body clients know.

    {"error": {"message": ..., "type": ..., "param": ..., "code": status}}

Nothing else in quire knows a status number. Messages of our own faults lose paths and addresses.
"""

from __future__ import annotations

import logging
import re
import reprlib
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import (
    EngineDead,
    EngineError,
    Overloaded,
    QuireError,
    RequestError,
    UnknownModel,
    Unsupported,
)
from quire.server.presence import ClientGone, DeadlinePassed

log = logging.getLogger(__name__)


class BodyTooLarge(RequestError):
    """The body has more bytes than this server reads."""


CLIENT_GONE = 499
"""No status of HTTP: nobody reads it, but logs do."""

_STATUS: tuple[tuple[type[Exception], int, str], ...] = (  # the narrowest first
    (UnknownModel, 404, "NotFoundError"),
    (Unsupported, 501, "NotImplementedError"),
    (BodyTooLarge, 413, "RequestTooLargeError"),
    (RequestError, 400, "BadRequestError"),
    (Overloaded, 429, "RateLimitError"),
    (DeadlinePassed, 408, "TimeoutError"),
    (ClientGone, CLIENT_GONE, "ClientGone"),
    (EngineDead, 500, "InternalServerError"),
    (EngineError, 500, "InternalServerError"),
)
_HTTP_TYPES = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
}
_PRIVATE = re.compile(r"0x[0-9a-fA-F]{6,}|(?<![\w/:.])/(?:[\w.~+-]+/)+[\w.~+-]*")


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of any exception. Those nobody meant are logged and told without detail."""
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            param = error.param if isinstance(error, RequestError) else None
            message = str(error) if status < 500 or status == 501 else scrub(str(error))
            return status, _body(message, name, param, status)
    if isinstance(error, ValidationError):
        return 400, _body(*_explain(error), 400)
    if isinstance(error, HTTPException):
        name = _HTTP_TYPES.get(error.status_code, "BadRequestError")
        return error.status_code, _body(str(error.detail), name, None, error.status_code)
    if not isinstance(error, QuireError):
        log.error("a request failed", exc_info=error)
        message = "the server failed on this request; its log says why"
        return 500, _body(message, "InternalServerError", None, 500)
    return 500, _body(scrub(str(error)), "InternalServerError", None, 500)


def error_response(error: Exception) -> Response:
    """The answer for an exception."""
    status, body = error_body(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, Unsupported):
        headers["x-should-retry"] = "false"  # official clients try every 5xx again otherwise
    content = msgspec.json.encode(body)
    return Response(content, status, headers=headers, media_type="application/json")


def scrub(message: str) -> str:
    """The message without file paths and memory addresses."""
    return _PRIVATE.sub("...", message)


def install(app: FastAPI) -> None:
    """Let every exception of every route become its answer here."""

    async def answer(http: Request, error: Exception) -> Response:
        return error_response(error)

    for kind in (QuireError, ValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _body(message: str, name: str, param: str | None, status: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": name, "param": param, "code": status}}


def _explain(error: ValidationError) -> tuple[str, str, str | None]:
    """Message, type and param of a body that is not what the route reads."""
    allowed: dict[str, list[str]] = {}
    given: dict[str, object] = {}
    for one in error.errors(include_url=False, include_context=False):
        field = str(one["loc"][0]) if one["loc"] else "body"
        given.setdefault(field, one["input"])
        said = one["msg"].removeprefix("Input should be ")
        if said not in allowed.setdefault(field, []):
            allowed[field].append(said)
    lines = [_line(field, said, given[field]) for field, said in list(allowed.items())[:5]]
    message = f"{len(allowed)} validation error{'s'[: len(allowed) > 1]}: {'; '.join(lines)}"
    param = next(iter(allowed))
    return message, "Bad Request", None if param == "body" else param


def _line(field: str, allowed: list[str], given: object) -> str:
    if field == "body" or allowed == ["Field required"]:
        return f"{field}: {allowed[0]}"
    shown = reprlib.repr(given)
    return f"{field}: must be {' or '.join(allowed)}, got {shown}"
