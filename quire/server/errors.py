"""Maps exceptions to HTTP errors: the status of each class, and the body that clients expect.

    {"error": {"message": ..., "type": ..., "param": ..., "code": status}}
    {"type": "error", "error": {"type": ..., "message": ...}}          on Anthropic's routes
    {"error": ..., "error_type": ...}                                  on those of TEI

No other file has status numbers of errors. Messages of the server's own faults are redacted.
"""

from __future__ import annotations

import difflib
import logging
import re
import reprlib
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from quire.errors import (
    EngineAway,
    EngineCrashed,
    EngineDead,
    EngineError,
    MediaUnavailable,
    Overloaded,
    Quarantined,
    QuireError,
    RequestError,
    ShuttingDown,
    StepFailed,
    TooLong,
    UnknownModel,
    Unsupported,
)
from quire.server.auth import redact
from quire.server.generation.client_watch import (
    ClientDisconnected,
    DeadlinePassed,
    RequestCancelled,
)

log = logging.getLogger(__name__)


class InvalidUserInput(RequestError):
    """A field of a body that operates on the server."""


class BodyTooLarge(RequestError):
    """The body has more bytes than this server reads."""


MAX_LISTED_ITEMS = 20
"""Of a value that is shown."""
CLIENT_CLOSED_REQUEST = 499
"""No status of HTTP: no client reads it, but logs show it."""

_STATUS: tuple[tuple[type[Exception], int, str], ...] = (  # the narrowest first
    (UnknownModel, 404, "NotFoundError"),
    (Unsupported, 501, "NotImplementedError"),
    (MediaUnavailable, 422, "UnprocessableEntityError"),
    (BodyTooLarge, 413, "RequestTooLargeError"),
    (InvalidUserInput, 400, "InvalidUserInput"),
    (RequestError, 400, "BadRequestError"),
    (Overloaded, 429, "RateLimitError"),
    (DeadlinePassed, 408, "TimeoutError"),
    (ClientDisconnected, CLIENT_CLOSED_REQUEST, "ClientGone"),
    (RequestCancelled, CLIENT_CLOSED_REQUEST, "RequestCancelled"),
    (EngineAway, 503, "ServiceUnavailableError"),
    (ShuttingDown, 503, "ServiceUnavailableError"),
    (Quarantined, 422, "UnprocessableEntityError"),
    (EngineDead, 500, "InternalServerError"),
    (EngineError, 500, "InternalServerError"),
)
_NOT_RETRYABLE = (Unsupported, StepFailed, EngineCrashed, Quarantined)
"""What would come again if it were tried again."""
_HTTP_TYPES = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    503: "ServiceUnavailableError",
}
_ANTHROPIC_ROUTES = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
TEI_ROUTES = frozenset({"/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity"})
TEI_SCOPE_KEY = "quire.tei"
"""In the scope of a request to another route with a body of TEI's API."""
_TEI_TYPES = {413: "Validation", 422: "Validation", 429: "Overloaded", 503: "Unhealthy"}
_TOO_LONG = re.compile(r"List should have at most (\d+) items after validation.*")
"""What pydantic says about a list; the value itself is shown behind it."""
_DEFAULT_MESSAGES = ("Not Found", "Method Not Allowed")
MAX_SHOWN_CHARS = 100
"""Characters of the requested path in a message."""


def build_error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of any exception. Unexpected ones are logged, and the body has no detail."""
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            param = error.param if isinstance(error, RequestError) else None
            message = (
                str(error) if status < 500 or status == 501 else redact_server_fault(str(error))
            )
            return status, _openai_error_body(message, name, param, status)
    if isinstance(error, (ValidationError, RequestValidationError)):
        return 400, _openai_error_body(*_explain_validation_error(error), 400)
    if isinstance(error, HTTPException):
        name = _HTTP_TYPES.get(error.status_code, "BadRequestError")
        return error.status_code, _openai_error_body(
            str(error.detail), name, None, error.status_code
        )
    if not isinstance(error, QuireError):
        log.error("a request failed", exc_info=error)
        message = "the server failed on this request; the reason is in its log"
        return 500, _openai_error_body(message, "InternalServerError", None, 500)
    return 500, _openai_error_body(
        redact_server_fault(str(error)), "InternalServerError", None, 500
    )


def build_anthropic_error(status: int, message: str) -> dict[str, Any]:
    """The body of an error as Anthropic's clients read it."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def is_anthropic_route(scope: Scope) -> bool:
    """The route belongs to Anthropic's API."""
    path = get_route_path(scope)
    return path == _ANTHROPIC_ROUTES or path.startswith(f"{_ANTHROPIC_ROUTES}/")


def is_tei_request(scope: Scope) -> bool:
    """The route or the body belongs to the API of text-embeddings-inference."""
    return TEI_SCOPE_KEY in scope or get_route_path(scope) in TEI_ROUTES


def build_tei_error(status: int, message: str) -> dict[str, Any]:
    """The body of an error as clients of text-embeddings-inference read it."""
    kind = _TEI_TYPES.get(status, "Backend" if status >= 500 else "Validation")
    return {"error": message, "error_type": kind}


def error_response(error: Exception, scope: Scope) -> Response:
    """The answer for an exception, in the form of the route."""
    status, body = build_error_body(error)
    if is_anthropic_route(scope):
        body = build_anthropic_error(status, body["error"]["message"])
    if is_tei_request(scope):
        status = 413 if isinstance(error, TooLong) else status
        body = build_tei_error(status, body["error"]["message"])
    elif isinstance(error, Overloaded):
        body["error"].update(error.numbers)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, (Overloaded, EngineAway)):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, _NOT_RETRYABLE):
        headers["x-should-retry"] = "false"  # official clients try every 5xx again otherwise
    content = msgspec.json.encode(body)
    return Response(content, status, headers=headers, media_type="application/json")


def redact_server_fault(message: str) -> str:
    """The message of a fault of ours, without paths, addresses and stacks."""
    return redact.redact_server_error(message)


def install_error_handlers(app: FastAPI, *, log_stack: bool = False) -> None:
    """Let every exception of every route become its answer here. log_stack: say where it arose."""

    async def answer(http: Request, error: Exception) -> Response:
        if log_stack:
            log.warning(
                "%s %s is answered with an error", http.method, http.url.path, exc_info=error
            )
        if isinstance(error, HTTPException) and error.detail in _DEFAULT_MESSAGES:
            error = HTTPException(
                error.status_code, _describe_missing_route(app, http, error), error.headers
            )
        return error_response(error, http.scope)

    for kind in (QuireError, ValidationError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _describe_missing_route(app: FastAPI, http: Request, error: HTTPException) -> str:
    """The message for a path or a method that does not exist, with those that do."""
    path = get_route_path(http.scope)
    asked = f"{http.method} {path[:MAX_SHOWN_CHARS]}"
    allowed = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow")
    if error.status_code == 405 and allowed:
        return f"{asked}: only {allowed}"
    known = [str(vars(route)["path"]) for route in app.routes if "path" in vars(route)]
    near = difflib.get_close_matches(path[:MAX_SHOWN_CHARS], known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if app.openapi_url is None:
        return f"no route {asked}{hint}"
    return f"no route {asked}{hint or ';'} GET {app.openapi_url} lists them"


def _openai_error_body(message: str, name: str, param: str | None, status: int) -> dict[str, Any]:
    message = redact.redact_client_error(message)  # here, because every error comes by
    return {"error": {"message": message, "type": name, "param": param, "code": status}}


def _explain_validation_error(
    error: ValidationError | RequestValidationError,
) -> tuple[str, str, str | None]:
    """Message, type and param of a body (or query) that is not what the route reads."""
    allowed: dict[str, list[str]] = {}
    given: dict[str, object] = {}
    if isinstance(error, ValidationError):
        found = [(e["loc"], e) for e in error.errors(include_url=False, include_context=False)]
    else:
        found = [(e["loc"][1:], e) for e in error.errors()]  # the first is: query, path
    for place, one in found:
        field = str(place[0]) if place else "body"
        given.setdefault(field, one["input"])
        expected = _TOO_LONG.sub(r"a list of at most \1 items", one["msg"])
        expected = expected.removeprefix("Input should be ")
        if expected not in allowed.setdefault(field, []):
            allowed[field].append(expected)
    lines = [
        _allowed_values_message(field, expected, given[field])
        for field, expected in list(allowed.items())[:5]
    ]
    message = f"{len(allowed)} validation error{'s'[: len(allowed) > 1]}: {'; '.join(lines)}"
    param = next(iter(allowed))
    return message, "Bad Request", None if param == "body" else param


def _allowed_values_message(field: str, allowed: list[str], given: object) -> str:
    if field == "body" and allowed == ["an object"]:
        return f"the body must be a JSON object, got a {type(given).__name__}"
    if field == "body" or allowed == ["Field required"]:
        return f"{field}: {allowed[0]}"
    return f"{field}: must be {' or '.join(allowed)}, got {_abbreviate(given)}"


def _abbreviate(given: object) -> str:
    """In short. Of what is large the size alone: repr would sort a million keys first."""
    if isinstance(given, dict | list) and len(given) > MAX_LISTED_ITEMS:
        kind = "a list" if isinstance(given, list) else "an object"
        return f"{kind} of {len(given)}"
    return reprlib.repr(given)
