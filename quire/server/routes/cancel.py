"""Cancels requests by id: DELETE /v1/requests/{id} for one's own, /abort_requests for all.

Until the engine has accepted a request only its API process has it; from then on the engine has it,
whichever process gets the call. So both are called. A request that the engine ends has an answer:
its text so far, with finish reason "abort".
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import EngineAway
from quire.server.app_state import AppState, get_app_state, get_tenant
from quire.server.formats.sse import build_json_response

router = APIRouter()

ID_PREFIXES = (
    *("", "chatcmpl-", "cmpl-", "resp_", "msg_", "gen-"),
    *("embd-", "pool-", "classify-", "score-", "rerank-", "predict-", "generative-scoring-"),
)
"""Prefixes of the X-Request-Id in the ids of answers."""


@router.delete("/v1/requests/{request_id:path}", tags=["requests"])
async def cancel_request(http: Request, request_id: str) -> Response:
    """End what runs under the id of an answer, or under the X-Request-Id that was sent.

    Only what the same key has started: requests of others, like ended ones, are not found.
    """
    if not await cancel_requests(get_app_state(http), [request_id], get_tenant(http)):
        raise HTTPException(404, f"no request {request_id!r:.100} of yours is running")
    return build_json_response({"id": request_id, "object": "request", "cancelled": True})


async def cancel_requests(state: AppState, ids: Iterable[str], tenant: bytes | None) -> int:
    """End a tenant's requests (None: of all tenants), in all processes. Returns their number."""
    names = [prefix + one for one in ids for prefix in ID_PREFIXES]
    here = state.active_requests.cancel(names, tenant)
    await asyncio.sleep(0)  # they send their own aborts to the engine first
    try:
        return here + await state.engine.abort_named(names, tenant)
    except EngineAway:
        if not here:
            raise
        return here
