"""OpenAI batch files: one request per input line, one answer per output line, in the same order.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "quire-...", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}

A line that cannot be parsed or is refused gets an answer with an error; the other lines are run.
The caller passes a function that answers a request.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.cli.remote_server import ServerReply
from quire.errors import QuireError, RequestError

SendRequest = Callable[[str, dict[str, Any]], Awaitable[ServerReply]]
"""Answers one request: path and body."""

LOOKAHEAD_FACTOR = 8
"""Lines that are read before the oldest is answered, as a multiple of the running requests."""
INVALID_LINE_MESSAGE = (
    "method must be POST, url a path like /v1/chat/completions, body a JSON object"
)
ALLOWED_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/chat/completions/batch", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank"),
    *("/v2/embed", "/embeddings", "/score", "/rerank", "/pooling", "/classify"),
    *("/generate", "/tokenize", "/detokenize"),
)
"""The file is untrusted: routes that operate on the server are excluded."""


@dataclass(frozen=True, slots=True)
class BatchRequestInput:
    """One parsed line of the input."""

    custom_id: str
    path: str
    body: dict[str, Any]


def parse_line(line: str) -> BatchRequestInput:
    """Parse a line. Raises RequestError."""
    try:
        line.encode()
        found = json.loads(line)
    except UnicodeEncodeError:
        raise RequestError("the line is not UTF-8") from None
    except RecursionError:
        raise RequestError("the line is not JSON: it is nested too deep") from None
    except ValueError as error:
        raise RequestError(f"the line is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError("the line is not a JSON object")
    path, body = found.get("url"), found.get("body")
    if str(found.get("method", "POST")).upper() != "POST":
        raise RequestError(INVALID_LINE_MESSAGE, param="method")
    if not isinstance(path, str) or not path.startswith("/") or not isinstance(body, dict):
        raise RequestError(INVALID_LINE_MESSAGE)
    if path not in ALLOWED_PATHS:
        raise RequestError(f"url must be one of {', '.join(ALLOWED_PATHS)}", param="url")
    if body.get("stream"):
        raise RequestError("a batch does not stream: leave out stream", param="stream")
    if body.get("encoding_format") in ("bytes", "bytes_only"):
        message = "a batch has JSON answers: use encoding_format float or base64"
        raise RequestError(message, param="encoding_format")
    return BatchRequestInput(_custom_id_of(found), path, body)


def _custom_id_of(found: Any) -> str:
    if isinstance(found, dict) and isinstance(found.get("custom_id"), str):
        return str(found["custom_id"])
    raise RequestError("custom_id must be text", param="custom_id")


async def run_requests(
    lines: Iterable[str], ask: SendRequest, *, at_once: int
) -> AsyncIterator[dict[str, Any]]:
    """Yield one answer per line, in order; at most `at_once` requests run."""
    seats = asyncio.Semaphore(at_once)
    pending: deque[asyncio.Task[dict[str, Any]]] = deque()
    try:
        for line in _non_empty_lines(lines):
            pending.append(asyncio.create_task(_run_line(line, ask, seats)))
            if len(pending) >= at_once * LOOKAHEAD_FACTOR:
                yield await pending.popleft()
            else:
                await asyncio.sleep(0)  # let requests begin while a long file is read
        while pending:
            yield await pending.popleft()
    finally:
        for task in pending:
            task.cancel()


def _non_empty_lines(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line.strip())


async def _run_line(line: str, ask: SendRequest, seats: asyncio.Semaphore) -> dict[str, Any]:
    custom_id = _find_custom_id(line)
    try:
        wanted = parse_line(line)
        async with seats:
            reply = await ask(wanted.path, wanted.body)
    except QuireError as error:
        param = error.param if isinstance(error, RequestError) else None
        kind = "invalid_request_error" if isinstance(error, RequestError) else "server_error"
        return build_output_line(
            custom_id, None, {"message": str(error), "type": kind, "param": param}
        )
    return build_output_line(custom_id, reply, _reply_error(reply))


def _find_custom_id(line: str) -> str | None:
    """Return the id of a line that may be invalid otherwise."""
    try:
        return _custom_id_of(json.loads(line))
    except (ValueError, RecursionError, QuireError):
        return None


def _reply_error(reply: ServerReply) -> Any:
    if reply.status == 200:
        return None
    inner = reply.body.get("error") if isinstance(reply.body, dict) else None
    return inner if inner is not None else {"message": str(reply.body)[:300], "type": "error"}


def build_output_line(
    custom_id: str | None, reply: ServerReply | None, error: Any
) -> dict[str, Any]:
    """Format a line of the output."""
    response = None
    if reply is not None:
        response = {
            "status_code": reply.status,
            "request_id": reply.request_id or f"batch-req-{uuid.uuid4().hex}",
            "body": reply.body,
        }
    return {
        "id": f"quire-{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
