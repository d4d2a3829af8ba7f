"""Routes of the model list and the version, and routes that operate the server.

Operation needs a switch: --enable-dev-routes for what affects all requests,
--enable-profiler-routes for traces. Without it the route answers with the name of the switch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from quire.engine.messages import AdapterCard
from quire.errors import RequestError, Unsupported
from quire.server.app_state import VERSION, AppState, get_app_state, get_key_owner
from quire.server.formats import ignored_fields
from quire.server.formats.body_reader import read_body, read_json_bytes
from quire.server.formats.chat_request import ChatCompletionRequest
from quire.server.formats.completion_request import CompletionRequest
from quire.server.formats.embedding_request import EmbeddingRequest
from quire.server.formats.pooling_request_body import ClassifyRequest
from quire.server.formats.request_body import RequestBody, StringList
from quire.server.formats.scoring_request import RerankRequest, ScoreRequest
from quire.server.formats.sse import build_json_response
from quire.server.formats.tei_request import TEIEmbedRequest
from quire.server.generation.validate import check_model
from quire.server.routes import cancel, embeddings, pooling, scoring, tei
from quire.server.routes.chat import create_chat_completion
from quire.server.routes.completions import create_completion

router = APIRouter()

Mode = Literal["abort", "wait", "keep"]


class AbortRequestsBody(RequestBody):
    """Requests to end: ids of answers, or the X-Request-Id that was sent."""

    request_ids: StringList


BODIES: dict[str, tuple[type[RequestBody], ...]] = {
    "/abort_requests": (AbortRequestsBody,),
    "/invocations": (
        *(ChatCompletionRequest, CompletionRequest, EmbeddingRequest, ClassifyRequest),
        *(ScoreRequest, RerankRequest, TEIEmbedRequest),
    ),
}

# -- models and version -----------------------------------------------------------------------


@router.get("/v1/models", tags=["models"])
async def list_models(http: Request) -> Response:
    """The names this server answers to: those of adapters that the key may use too."""
    state, tenant = get_app_state(http), get_key_owner(http).tenant
    return build_json_response(
        {
            "object": "list",
            "data": [
                *(_build_model_card(state, name) for name in state.served_model_names),
                *(_build_adapter_card(state, card) for card in state.adapters.cards(tenant)),
            ],
        }
    )


@router.get("/v1/models/{name:path}", tags=["models"])
async def show_model(http: Request, name: str) -> Response:
    """Show one model."""
    state = get_app_state(http)
    owner = get_key_owner(http)
    check_model(state, owner, name)
    for card in state.adapters.cards(owner.tenant):
        if card.name == name:
            return build_json_response(_build_adapter_card(state, card))
    return build_json_response(_build_model_card(state, name))


def _build_adapter_card(state: AppState, card: AdapterCard) -> dict[str, Any]:
    model = _build_model_card(state, card.name)
    permission = [{**one, "created": card.created} for one in model["permission"]]
    return {
        **model,
        "created": card.created,
        "root": card.folder,
        "parent": card.base_model_name or state.served_model_names[0],
        "permission": permission,
    }


def _build_model_card(state: AppState, name: str) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": state.created,
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
    card = {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "quire",
        "root": state.root,
        "parent": None,
        "max_model_len": state.max_model_len,
        "vocab_size": state.inputs.vocab_size,
        "weights": state.describe_weights(),
        "permission": [permission],
    }
    tasks = ["generate"] if state.generates else []
    if state.pooling is not None:
        section = state.pooling.section
        tasks += section.tasks
        card["pooling"] = {
            "methods": section.methods,
            "size": section.size,
            "normalize": section.normalize,
            "matryoshka": section.matryoshka,
            "labels": section.labels,
        }
    return {**card, "tasks": tasks}


@router.get("/version", tags=["health"])
async def version() -> Response:
    """Show the version of quire."""
    return build_json_response({"version": VERSION})


# -- operating on the engine ------------------------------------------------------------------


def _require_dev_routes(http: Request) -> AppState:
    """The services, if this server may be operated on by its clients."""
    state = get_app_state(http)
    if not state.options.enable_dev_routes:
        raise HTTPException(403, "this route is closed: start with --enable-dev-routes to open it")
    return state


@router.post("/sleep", tags=["operating"])
async def sleep(http: Request, level: int = 1, mode: Mode = "abort") -> Response:
    """Stop making steps. Level 1 also gives the KV cache back; level 0 only pauses."""
    await _require_dev_routes(http).engine.sleep(level, mode)
    return Response()


@router.post("/wake_up", tags=["operating"])
async def wake_up(http: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
    """Undo /sleep, all of it or for these tags: weights, kv_cache, scheduling."""
    await _require_dev_routes(http).engine.wake_up(tags)
    return Response()


@router.get("/is_sleeping", tags=["operating"])
async def is_sleeping(http: Request) -> Response:
    """Whether anything of the engine sleeps."""
    return build_json_response({"is_sleeping": _require_dev_routes(http).engine.is_sleeping})


@router.post("/pause", tags=["operating"])
async def pause(http: Request, mode: Mode = "abort", clear_cache: bool = False) -> Response:
    """Make no steps until /resume; new requests wait. keep: those that run are frozen."""
    await _require_dev_routes(http).engine.pause(mode, clear_cache=clear_cache)
    return build_json_response({"status": "paused"})


@router.post("/resume", tags=["operating"])
async def resume(http: Request) -> Response:
    """Continue after /pause."""
    await _require_dev_routes(http).engine.resume()
    return build_json_response({"status": "resumed"})


@router.get("/is_paused", tags=["operating"])
async def is_paused(http: Request) -> Response:
    """Whether no steps are made."""
    return build_json_response({"is_paused": _require_dev_routes(http).engine.is_paused})


@router.post("/drain_engine", tags=["operating"])
async def drain_engine(
    http: Request, engine: int = 0, timeout: Annotated[float, Query(ge=0, le=86400)] = 30.0
) -> Response:
    """Send an engine no new requests. Its streams continue on others after so many seconds.

    engine: its rank, as in /metrics. Without another engine that answers, it still gets requests.
    """
    engines = _require_dev_routes(http).engine
    engines.drain(engines.engine_of(engine), timeout)
    return build_json_response({"status": "draining"})


@router.post("/undrain_engine", tags=["operating"])
async def undrain_engine(http: Request, engine: int = 0) -> Response:
    """Undo /drain_engine."""
    engines = _require_dev_routes(http).engine
    engines.drain(engines.engine_of(engine), None)
    return build_json_response({"status": "serving"})


@router.post("/reset_prefix_cache", tags=["operating"])
async def reset_prefix_cache(
    http: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> Response:
    """Forget cached prefixes. reset_running_requests: end what runs first.

    reset_external: has no effect, since tiers always forget too.
    """
    engine = _require_dev_routes(http).engine
    if not await engine.reset_prefix_cache(reset_running=reset_running_requests):
        message = "requests hold blocks of the cache; wait, or send reset_running_requests=true"
        raise HTTPException(409, message)
    return Response()


@router.post("/reset_mm_cache", tags=["operating"])
async def reset_mm_cache(http: Request) -> Response:
    """Forget processed images, video and audio of this API process."""
    media = _require_dev_routes(http).inputs.media
    if media is not None:
        media.reset_cache()
    return Response()


@router.post("/reset_encoder_cache", tags=["operating"])
async def reset_encoder_cache(http: Request) -> Response:
    """Forget what the encoder made of images, video and audio."""
    await _require_dev_routes(http).engine.reset_encoder_cache()
    return Response()


@router.post("/abort_requests", tags=["operating"])
async def abort_requests(http: Request) -> Response:
    """End requests of whatever client, in whatever process. Their answers end with "abort"."""
    state = _require_dev_routes(http)
    body = await read_body(http, AbortRequestsBody, state.options.max_body_bytes)
    ignored = body.ignored_fields()
    if state.options.strict:
        ignored_fields.refuse_unknown(ignored)
    aborted = await cancel.cancel_requests(state, body.request_ids, tenant=None)
    return build_json_response({"aborted": aborted}, ignored_fields.ignored_headers(ignored))


@router.get("/server_info", tags=["operating"])
async def server_info(http: Request) -> Response:
    """Show version, model, options of the server, and counts of the engine."""
    state = _require_dev_routes(http)
    return build_json_response(
        {
            "version": VERSION,
            "model": {
                "names": state.served_model_names,
                "root": state.root,
                "max_model_len": state.max_model_len,
                "generation_defaults": dict(state.defaults),
            },
            "server_options": _without_secrets(asdict(state.options)),
            "engines": [asdict(one) for one in await state.engine.stats()],
        }
    )


def _without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    return {**options, "api_key": [f"({len(options['api_key'])} keys)"]}


# -- profiles ---------------------------------------------------------------------------------


def _require_profiler_routes(http: Request) -> AppState:
    state = get_app_state(http)
    if not state.options.enable_profiler_routes:
        message = "this route is closed: start with --enable-profiler-routes to open it"
        raise HTTPException(403, message)
    return state


@router.post("/start_profile", tags=["operating"])
async def start_profile(http: Request) -> Response:
    """Record what the engine does, until /stop_profile."""
    with _conflicts_as_409():
        await _require_profiler_routes(http).engine.start_profile()
    return Response()


@router.post("/stop_profile", tags=["operating"])
async def stop_profile(http: Request) -> Response:
    """Write the trace."""
    with _conflicts_as_409():
        return build_json_response(
            {"paths": await _require_profiler_routes(http).engine.stop_profile()}
        )


@contextmanager
def _conflicts_as_409() -> Iterator[None]:
    """Answer 409 to a call that the engine refuses in its present state."""
    try:
        yield
    except Unsupported:
        raise
    except RequestError as error:
        raise HTTPException(409, str(error)) from None


# -- /invocations -----------------------------------------------------------------------------


@router.post("/invocations", tags=["older servers"])
async def invocations(http: Request) -> Response:
    """The body and the model select the route: messages go to chat, a prompt to completions."""
    state = get_app_state(http)
    raw = await read_json_bytes(http, state.options.max_body_bytes)
    given = InvocationsBody.model_validate_json(raw).model_extra or {}
    route = _select_route(state, given.keys())
    if route is None:
        known = ", ".join(("messages", "prompt", *_POOLING_ROUTES, "query and documents"))
        raise RequestError(f"/invocations takes a body with one of {known}", param="messages")
    return await route(_with_body(http, raw))


class InvocationsBody(RequestBody):
    """An object of whatever kind."""


_Route = Callable[[Request], Awaitable[Response]]
_POOLING_ROUTES: Mapping[str, _Route] = {
    "queries": scoring.create_score,
    "data_1": scoring.create_score,
    "text_1": scoring.create_score,
    "input": embeddings.create_embedding,
    "inputs": tei.embed,
}
"""Field that only bodies of a route have -> the route."""
_LABEL_ROUTES: Mapping[str, _Route] = {"input": pooling.classify, "inputs": tei.predict}
_TOKEN_ROUTES: Mapping[str, _Route] = {"input": pooling.create_pooling, "inputs": tei.embed_all}
_TASK_ROUTES = {
    "classify": _LABEL_ROUTES,
    "token_classify": _TOKEN_ROUTES,
    "token_embed": _TOKEN_ROUTES,
}
"""The same, for models with another task than to embed."""


def _select_route(state: AppState, fields: Collection[str]) -> _Route | None:
    if state.generates and "messages" in fields:
        return create_chat_completion
    if "prompt" in fields:
        return create_completion
    if "query" in fields:
        return scoring.create_rerank
    task = "embed" if state.pooling is None else state.pooling.section.tasks[0]
    routes = {**_POOLING_ROUTES, **_TASK_ROUTES.get(task, {})}
    if "messages" in fields:
        return routes["input"]
    return next((route for name, route in routes.items() if name in fields), None)


def _with_body(http: Request, raw: bytes) -> Request:
    """The request, with its body to be read once more."""
    unread = [raw]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await http.receive()

    return Request(http.scope, receive)
