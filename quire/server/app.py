"""ASGI app: collects the routes, the middleware around them and the lifespan.

A route file exports `router`. The engine's thread starts and ends with the app.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server import errors, user_middleware
from quire.server.app_state import VERSION, AppState
from quire.server.auth.api_keys import KeySet
from quire.server.auth.auth_middleware import AuthMiddleware, RequestIdMiddleware
from quire.server.auth.csrf_guard import CsrfGuard, is_loopback
from quire.server.formats import body_reader
from quire.server.formats.request_body import RequestBody
from quire.server.routes import (
    adapters,
    admin,
    audio,
    cancel,
    chat,
    completions,
    embeddings,
    generate,
    generative_scoring,
    health,
    messages,
    offline_docs,
    playground,
    pooling,
    responses,
    scoring,
    tei,
    tokenize,
    unsupported,
)
from quire.server.telemetry import dashboard_stream, instrumentation

log = logging.getLogger(__name__)

ROUTES: tuple[ModuleType, ...] = (
    chat,
    completions,
    tokenize,
    responses,
    messages,
    generate,
    embeddings,
    pooling,
    scoring,
    generative_scoring,
    tei,
    audio,
    unsupported,
    health,
    admin,
    adapters,
    cancel,
    playground,
    dashboard_stream,
)
"""Modules with a `router`, and BODIES if they read bodies themselves: path -> its classes."""
HEAD_MODULES = (health, admin)
"""Modules whose GET routes answer HEAD too, as monitors and load balancers send it."""


def create_app(state: AppState) -> FastAPI:
    """The app over one engine."""
    docs = not state.options.disable_fastapi_docs
    app = FastAPI(
        title="quire",
        lifespan=_lifespan,
        openapi_url="/openapi.json" if docs else None,
        docs_url=None if state.options.enable_offline_docs else "/docs",
        redoc_url=None if state.options.enable_offline_docs else "/redoc",
        redirect_slashes=False,
    )
    if docs and state.options.enable_offline_docs:
        for path in ("/docs", "/redoc"):
            app.add_route(path, _offline_docs, include_in_schema=False)
    app.state.app_state = state
    app.state.live = dashboard_stream.build_feeds(state.engine)
    app.state.health = health.HealthState(state.engine)
    app.state.responses = responses.build_response_store(state.options)
    app.state.body_budget = body_reader.build_body_budget(state.options.max_body_bytes)
    for module in ROUTES:
        app.router.routes.extend(module.router.routes)
    for module in HEAD_MODULES:
        app.router.routes.extend(_head_routes(module))
    errors.install_error_handlers(app, log_stack=state.options.log_error_stack)
    app.openapi = lambda: _build_openapi(app)  # type: ignore[method-assign]
    for route in app.routes:
        if isinstance(route, Route) and route.path == app.openapi_url:
            route.app = _after_building_document(route.app)
    if state.options.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware)
    app.state.keys = KeySet(state.options.api_key, state.options.api_key_file)
    if state.options.api_key or state.options.api_key_file:
        public = {"/metrics"} if state.options.public_metrics else set[str]()
        app.add_middleware(AuthMiddleware, ring=app.state.keys, public_paths=public)
    app.add_middleware(
        CsrfGuard,
        allowed=state.options.allowed_origins,
        is_local=state.options.uds is None and is_loopback(state.options.host),
    )
    if state.options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.options.allowed_origins,
            allow_methods=state.options.allowed_methods,
            allow_headers=state.options.allowed_headers,
            allow_credentials=state.options.allow_credentials,
        )
    for name in state.options.middleware:
        user_middleware.add_user_middleware(app, name)
    instrumentation.install_telemetry(
        app, state, [module.router for module in ROUTES]
    )  # last: it is the outermost
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state = app.state.app_state
    state.engine.start()
    if state.options.trust_request_chat_template:
        state.template_workers.prepare()
    if state.inputs.media is not None:
        state.inputs.media.pipeline.prepare_workers()
    tasks = [asyncio.create_task(app.state.keys.watch())]
    if state.adapters.enabled:
        await state.adapters.refresh()
        tasks.append(asyncio.create_task(state.adapters.follow()))
    elif state.options.lora_resolver_folder or state.options.lora_resolver_repos:
        log.warning("lora_resolver_folder and lora_resolver_repos have no effect: --enable-lora")
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await app.state.responses.close()
        state.template_workers.close()
        if state.inputs.media is not None:
            state.inputs.media.pipeline.close()
        if state.inputs.speech is not None:
            state.inputs.speech.reader.close()
        await state.engine.stop()


async def _offline_docs(http: Request) -> Response:
    document = await asyncio.to_thread(http.app.openapi)
    return HTMLResponse(offline_docs.render_docs_page(document))


def _head_routes(module: ModuleType) -> list[Route]:
    """Return a route for HEAD beside each GET route; the HTTP protocol drops the bodies."""
    found = []
    for route in module.router.routes:
        if "GET" in route.methods:
            head = Route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
            head.app = route.app
            found.append(head)
    return found


def _after_building_document(inner: ASGIApp) -> ASGIApp:
    """Return the app of the document's route, which gets the document from a thread.

    Building it takes 0.15 s, in which the event loop would send no tokens.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.to_thread(scope["app"].openapi)
        await inner(scope, receive, send)

    return serve


def _request_bodies() -> dict[str, tuple[type[RequestBody], ...]]:
    found: dict[str, tuple[type[RequestBody], ...]] = {}
    for module in ROUTES:
        found.update(vars(module).get("BODIES", {}))
    return found


def _build_openapi(app: FastAPI) -> dict[str, Any]:
    """The document of all routes. Routes read bodies themselves, so they are added here."""
    if app.openapi_schema is None:
        document = get_openapi(title="quire", version=VERSION, routes=app.routes)
        bodies = _request_bodies()
        kinds = sorted(
            {kind for group in bodies.values() for kind in group}, key=lambda k: k.__name__
        )
        refs, made = models_json_schema(
            [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(made["$defs"])
        for path, group in bodies.items():
            found = [refs[kind, "validation"] for kind in group]
            schema = found[0] if len(found) == 1 else {"anyOf": found}
            document["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema}},
            }
        from quire.server.formats import (
            openapi_models,
        )  # some fifty classes: only when they are needed

        openapi_models.add_response_schemas(document)
        app.openapi_schema = document
    return app.openapi_schema
