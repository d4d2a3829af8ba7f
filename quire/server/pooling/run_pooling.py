"""Runs pooling requests: checks them, makes the engine's requests, collects their results.

    PoolingRequest ── run_pooling() ──▶ PoolingResults

One item that fails ends the whole request, and aborts the rest of it; so does a client that
disconnects. The error names the item.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request as HTTPRequest

from quire.core.types import Update
from quire.engine.client.stream import RequestStream, StreamGroup
from quire.errors import RequestError
from quire.server.app_state import AppState, get_key_owner, get_tenant
from quire.server.formats.ignored_fields import IgnoredField
from quire.server.formats.vector_encoding import VectorEncoding
from quire.server.generation.client_watch import ClientWatch, RequestCancelled
from quire.server.generation.request_context import read_request_context
from quire.server.generation.validate import require_model, with_client_field_names
from quire.server.pooling.build_pooling import (
    PreparedPooling,
    build_inputs,
    find_prompt_name,
)
from quire.server.pooling.pooling_request import PoolingRequest
from quire.server.pooling.validate_pooling import require_pooling, validate_pooling
from quire.server.telemetry.request_timer import RequestTimer, get_request_timer
from quire.text.pooling_output import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingResults:
    """Results of a request, one for each input, or for each pair."""

    id: str
    model: str
    """The name of the model that the request named."""
    vectors: Sequence[Array] = ()
    scores: Sequence[float] = ()
    """Of pairs, in place of vectors."""
    prompt_tokens: int
    cached_tokens: int
    timing: Mapping[str, object] | None = None
    """Times of the parts of the request; None without `x_timing`."""
    ignored: Sequence[IgnoredField] = ()
    created: int = field(default_factory=lambda: int(time.time()))


async def run_pooling(
    state: AppState,
    request: PoolingRequest,
    http: HTTPRequest,
    prefix: str,
    encodings: Sequence[VectorEncoding] = (),
) -> PoolingResults:
    """Run a request to its end. Raises QuireErrors; then nothing of it runs.

    The body must have been read. prefix: of the public id. encodings: the forms of vectors that are
    to be made of the results.
    """
    await require_model(state, get_key_owner(http), request.model)
    validate_pooling(state, request, encodings)
    timer = get_request_timer(http)
    if request.timing:
        timer.enable()
    context = read_request_context(
        state,
        http,
        prefix,
        timer.received_at,
        priority=request.priority,
        request_id=request.request_id,
    )
    watch = ClientWatch(
        http.receive, context.timeout_s, since=timer.received_at, tenant=get_tenant(http)
    )
    watch.register(state.active_requests, context.public_id)
    try:
        with watch.raise_when_ended():
            prepared = await build_inputs(state, request, context)
            timer.record_pooling_submitted(context.public_id, prepared.requests)
            stream = await state.engine.generate(prepared.requests, context.rank)
        found = await _collect(stream, prepared, watch, timer)
        vectors, scores = await prepared.finish(found)
    except RequestError as error:
        raise with_client_field_names(error, request.field_names) from None
    finally:
        watch.stop()
    return PoolingResults(
        model=state.model_name(prepared.requests[0].adapter),
        id=context.public_id,
        vectors=vectors,
        scores=scores,
        prompt_tokens=prepared.prompt_tokens,
        cached_tokens=sum(update.cached_tokens for update in found.values()),
        timing=timer.breakdown() if request.timing else None,
        ignored=_ignored_fields(state, request),
    )


def _ignored_fields(state: AppState, request: PoolingRequest) -> list[IgnoredField]:
    """Those of the body, and the word for a prompt that the model does not have."""
    found = [*request.ignored]
    word = request.input_type
    if word is not None and find_prompt_name(require_pooling(state).section, word) is None:
        found.append(IgnoredField(request.field_names.get("input_type", "input_type"), True))
    return found


async def _collect(
    stream: RequestStream | StreamGroup,
    prepared: PreparedPooling,
    watch: ClientWatch,
    timer: RequestTimer,
) -> dict[str, Update]:
    """The last update of each request, by its id. Raises the error of the first that fails."""
    found: dict[str, Update] = {}
    watch.is_in_engine = True
    watch.on_end(stream.close)
    try:
        async for updates in stream:
            if timer.is_enabled:
                timer.record_updates(updates)
            for update in updates:
                if update.finish is None:
                    continue
                if update.pooled is None:
                    raise _item_error(prepared, update)
                found[update.request_id] = update
            if timer.is_enabled:
                timer.record_waiting()
        watch.raise_if_ended()
    finally:
        stream.close()
    return found


def _item_error(prepared: PreparedPooling, update: Update) -> Exception:
    """The error of an item that has no result."""
    if update.finish != "error":
        return RequestCancelled("the request was aborted")
    error = update.to_exception()
    if len(prepared.inputs) == 1:
        return error
    message = f"item {prepared.index_of(update.request_id)}: {error}"
    if isinstance(error, RequestError):
        return RequestError(message, param=error.param)
    return type(error)(message)
