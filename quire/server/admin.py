"""What is served: models, version; and what operates on the server.

Who operates needs a switch: --enable-dev-routes for what touches everyone's requests,
--enable-profiler-routes for traces. Without it the route says which, and does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from quire.errors import RequestError, Unsupported
from quire.server import cancel, strict
from quire.server.body import read, read_bytes
from quire.server.chat import create_chat_completion
from quire.server.completions import create_completion
from quire.server.protocol.base import Body, Texts
from quire.server.protocol.chat import ChatBody
from quire.server.protocol.completions import CompletionBody
from quire.server.services import VERSION, Services, services
from quire.server.sse import json_response

router = APIRouter()

Mode = Literal["abort", "wait", "keep"]


class AbortBody(Body):
    """Requests to end: ids of answers, or the X-Request-Id that was sent."""

    request_ids: Texts


BODIES: dict[str, tuple[type[Body], ...]] = {
    "/abort_requests": (AbortBody,),
    "/invocations": (ChatBody, CompletionBody),
}

# -- models and version -----------------------------------------------------------------------


@router.get("/v1/models", tags=["models"])
async def list_models(http: Request) -> Response:
    """The names this server answers to."""
    to = services(http)
    return json_response({"object": "list", "data": [_card(to, name) for name in to.names]})


@router.get("/v1/models/{name:path}", tags=["models"])
async def show_model(http: Request, name: str) -> Response:
    """One of them."""
    to = services(http)
    to.check_model(name)
    return json_response(_card(to, name))


def _card(to: Services, name: str) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": to.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": to.created,
        "owned_by": "quire",
        "root": to.root,
        "parent": None,
        "max_model_len": to.max_model_len,
        "permission": [permission],
    }


@router.get("/version", tags=["health"])
async def version() -> Response:
    """Of quire."""
    return json_response({"version": VERSION})


# -- operating on the engine ------------------------------------------------------------------


def _operated(http: Request) -> Services:
    """The services, if this server may be operated on by its clients."""
    to = services(http)
    if not to.options.enable_dev_routes:
        raise HTTPException(403, "this route is closed: start with --enable-dev-routes to open it")
    return to


@router.post("/sleep", tags=["operating"])
async def sleep(http: Request, level: int = 1, mode: Mode = "abort") -> Response:
    """Stop making steps. Level 1 also gives the KV cache back; level 0 only pauses."""
    await _operated(http).engine.sleep(level, mode)
    return Response()


@router.post("/wake_up", tags=["operating"])
async def wake_up(http: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
    """Undo /sleep, all of it or for these tags: weights, kv_cache, scheduling."""
    await _operated(http).engine.wake_up(tags)
    return Response()


@router.get("/is_sleeping", tags=["operating"])
async def is_sleeping(http: Request) -> Response:
    """Whether anything of the engine sleeps."""
    return json_response({"is_sleeping": _operated(http).engine.asleep})


@router.post("/pause", tags=["operating"])
async def pause(http: Request, mode: Mode = "abort", clear_cache: bool = False) -> Response:
    """Make no steps until /resume; new requests wait. keep: those that run are frozen."""
    await _operated(http).engine.pause(mode, clear_cache=clear_cache)
    return json_response({"status": "paused"})


@router.post("/resume", tags=["operating"])
async def resume(http: Request) -> Response:
    """Go on after /pause."""
    await _operated(http).engine.resume()
    return json_response({"status": "resumed"})


@router.get("/is_paused", tags=["operating"])
async def is_paused(http: Request) -> Response:
    """Whether no steps are made."""
    return json_response({"is_paused": _operated(http).engine.paused})


@router.post("/reset_prefix_cache", tags=["operating"])
async def reset_prefix_cache(
    http: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> Response:
    """Forget cached prefixes. reset_running_requests: end what runs first.

    reset_external: there is no cache outside the engine to forget.
    """
    engine = _operated(http).engine
    if not await engine.reset_prefix_cache(reset_running=reset_running_requests):
        message = "requests hold blocks of the cache; wait, or send reset_running_requests=true"
        raise HTTPException(409, message)
    return Response()


@router.post("/abort_requests", tags=["operating"])
async def abort_requests(http: Request) -> Response:
    """End requests of whatever client, in whatever process. Their answers end with "abort"."""
    to = _operated(http)
    body = await read(http, AbortBody, to.options.max_body_bytes)
    ignored = body.ignored()
    if to.options.strict:
        strict.refuse(ignored)
    aborted = await cancel.end(to, body.request_ids, tenant=None)
    return json_response({"aborted": aborted}, strict.headers(ignored))


@router.get("/server_info", tags=["operating"])
async def server_info(http: Request) -> Response:
    """What runs here: version, model, options of the server, counts of the engine."""
    to = _operated(http)
    return json_response(
        {
            "version": VERSION,
            "model": {
                "names": to.names,
                "root": to.root,
                "max_model_len": to.max_model_len,
                "generation_defaults": dict(to.defaults),
            },
            "server_options": _without_secrets(asdict(to.options)),
            "engine": asdict(await to.engine.stats()),
        }
    )


def _without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    return {**options, "api_key": [f"({len(options['api_key'])} keys)"]}


# -- profiles ---------------------------------------------------------------------------------


def _profiled(http: Request) -> Services:
    to = services(http)
    if not to.options.enable_profiler_routes:
        message = "this route is closed: start with --enable-profiler-routes to open it"
        raise HTTPException(403, message)
    return to


@router.post("/start_profile", tags=["operating"])
async def start_profile(http: Request) -> Response:
    """Record what the engine does, until /stop_profile."""
    with _conflicts():
        await _profiled(http).engine.start_profile()
    return Response()


@router.post("/stop_profile", tags=["operating"])
async def stop_profile(http: Request) -> Response:
    """Write the trace."""
    with _conflicts():
        return json_response({"path": await _profiled(http).engine.stop_profile()})


@contextmanager
def _conflicts() -> Iterator[None]:
    """What the engine refuses now, it would do at another time."""
    try:
        yield
    except Unsupported:
        raise
    except RequestError as error:
        raise HTTPException(409, str(error)) from None


# -- one door for all -------------------------------------------------------------------------


@router.post("/invocations", tags=["older servers"])
async def invocations(http: Request) -> Response:
    """What the body is for says where it goes: messages to chat, a prompt to completions."""
    raw = await read_bytes(http, services(http).options.max_body_bytes)
    body = AnyBody.model_validate_json(raw)
    given = body.model_extra or {}
    if "messages" in given:
        return await create_chat_completion(_again(http, raw))
    if "prompt" in given:
        return await create_completion(_again(http, raw))
    message = "/invocations takes messages (a chat) or a prompt (a completion)"
    if _POOLING.intersection(given):
        raise Unsupported(f"{message}: models that give vectors or scores are not built yet")
    raise RequestError(message, param="messages")


class AnyBody(Body):
    """An object of whatever kind."""


_POOLING = frozenset({"input", "query", "queries", "documents", "text_1", "data_1", "items"})


def _again(http: Request, raw: bytes) -> Request:
    """The request, with its body to be read once more."""
    unread = [raw]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await http.receive()

    return Request(http.scope, receive)
