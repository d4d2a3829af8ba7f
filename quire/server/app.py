"""The ASGI app: routes, lifespan, and what surrounds every route.

A route file exports `router`. The engine's thread starts and ends with the app.
"""

from __future__ import annotations

import asyncio
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

from quire.server import (
    admin,
    body,
    cancel,
    chat,
    completions,
    docs_page,
    errors,
    generate,
    health,
    later,
    live,
    messages,
    observe,
    outside,
    page,
    responses,
    tokens,
)
from quire.server.browsers import Browsers, is_loopback
from quire.server.guard import Guard, RequestIds
from quire.server.keys import KeyRing
from quire.server.protocol.base import Body
from quire.server.services import VERSION, Services

ROUTES: tuple[ModuleType, ...] = (
    chat,
    completions,
    tokens,
    responses,
    messages,
    generate,
    later,
    health,
    admin,
    cancel,
    page,
    live,
)
"""Modules with a `router`, and BODIES if they read bodies by their own hands: path -> its forms."""


def create_app(to: Services) -> FastAPI:
    """The app over one engine."""
    docs = not to.options.disable_fastapi_docs
    app = FastAPI(
        title="quire",
        lifespan=_lifespan,
        openapi_url="/openapi.json" if docs else None,
        docs_url=None if to.options.enable_offline_docs else "/docs",
        redoc_url=None if to.options.enable_offline_docs else "/redoc",
        redirect_slashes=False,
    )
    if docs and to.options.enable_offline_docs:
        app.add_route("/docs", _offline_docs, include_in_schema=False)
    app.state.services = to
    app.state.live = live.Feed(to.engine)
    app.state.health = health.Health(to.engine)
    app.state.responses = responses.store_of(to.options)
    app.state.room = body.room_for(to.options.max_body_bytes)
    for module in ROUTES:
        app.router.routes.extend(module.router.routes)
    errors.install(app, log_stack=to.options.log_error_stack)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    if to.options.enable_request_id_headers:
        app.add_middleware(RequestIds)
    app.state.keys = KeyRing(to.options.api_key, to.options.api_key_file)
    if to.options.api_key or to.options.api_key_file:
        app.add_middleware(Guard, ring=app.state.keys)
    app.add_middleware(
        Browsers,
        allowed=to.options.allowed_origins,
        is_local=to.options.uds is None and is_loopback(to.options.host),
    )
    if to.options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=to.options.allowed_origins,
            allow_methods=to.options.allowed_methods,
            allow_headers=to.options.allowed_headers,
            allow_credentials=to.options.allow_credentials,
        )
    for name in to.options.middleware:
        outside.add(app, name)
    observe.install(app, to, [module.router for module in ROUTES])  # last: it stands before all
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    engine = app.state.services.engine
    engine.start()
    watching = asyncio.create_task(app.state.keys.watch())
    try:
        yield
    finally:
        watching.cancel()
        await app.state.responses.close()
        app.state.services.renderers.close()
        await engine.stop()


async def _offline_docs(http: Request) -> Response:
    return HTMLResponse(docs_page.page(http.app.openapi()))


def _bodies() -> dict[str, tuple[type[Body], ...]]:
    found: dict[str, tuple[type[Body], ...]] = {}
    for module in ROUTES:
        found.update(vars(module).get("BODIES", {}))
    return found


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The document of all routes. Bodies are read by our own hands, so they are added here."""
    if app.openapi_schema is None:
        document = get_openapi(title="quire", version=VERSION, routes=app.routes)
        bodies = _bodies()
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
        from quire.server.protocol import answers  # some fifty classes: only if someone asks

        answers.describe(document)
        app.openapi_schema = document
    return app.openapi_schema
