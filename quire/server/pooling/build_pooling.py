"""Builds the engine's requests from a `PoolingRequest`, and the numbers from their results.

Work that may take long leaves the event loop: tokenizing releases the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config.engine_config import PoolingSection
from quire.core.pooling_params import PoolingParams
from quire.core.types import Request, Update
from quire.server.app_state import AppState
from quire.server.generation.build_requests import media_inputs, with_tenant
from quire.server.generation.media import load_marked, load_media
from quire.server.generation.off_loop import LONG_CHARS, run_off_loop
from quire.server.generation.request_context import RequestContext
from quire.server.generation.request_templates import (
    RenderedPrompts,
    render_conversation,
    render_request_templates,
)
from quire.server.generation.validate import check_model
from quire.server.pooling.pooling_request import Conversations, Inputs, Pairs, PoolingRequest
from quire.text.pooling_input import PoolingInput, PoolingInputProcessor, ScoreInputs
from quire.text.pooling_output import Array, combine, compute_scores
from quire.text.pooling_plan import PoolingInputOptions

LONG_NUMBERS = 50_000
"""Numbers of results that take milliseconds to put together."""
PROMPT_NAMES = {
    "search_query": ("query", "retrieval.query"),
    "query": ("search_query", "retrieval.query"),
    "retrieval.query": ("search_query", "query"),
    "search_document": ("document", "passage", "retrieval.passage"),
    "document": ("search_document", "passage", "retrieval.passage"),
    "retrieval.passage": ("search_document", "document", "passage"),
    "clustering": ("Clustering", "separation"),
    "separation": ("clustering", "Clustering"),
    "classification": ("Classification",),
}
"""`input_type` of APIs -> names of prompts in models' files, after the same name."""


@dataclass(frozen=True, slots=True)
class PreparedPooling:
    """Requests of one body, and how their results become its answer."""

    inputs: Sequence[PoolingInput]
    requests: Sequence[Request]
    """Of all inputs, in order."""
    pairs: ScoreInputs | None
    """How the results become scores; None: they are the vectors of the answer."""

    @property
    def prompt_tokens(self) -> int:
        return sum(one.num_tokens for one in self.inputs)

    def index_of(self, request_id: str) -> int:
        """The input of a request."""
        places = (
            place
            for place, one in enumerate(self.inputs)
            if any(request.id == request_id for request in one.requests)
        )
        return next(places)

    async def finish(self, updates: Mapping[str, Update]) -> tuple[list[Array], list[float]]:
        """Return the vectors or the scores. updates: the last one of each request, by its id."""
        numbers = (
            sum(len(one.pooled.data) for one in updates.values() if one.pooled is not None) // 4
        )
        return await run_off_loop(lambda: self._finish(updates), numbers, LONG_NUMBERS)

    def _finish(self, updates: Mapping[str, Update]) -> tuple[list[Array], list[float]]:
        arrays = []
        for one in self.inputs:
            found = [updates[request.id].pooled for request in one.requests]
            arrays.append(combine(one, [part for part in found if part is not None]))
        return (arrays, []) if self.pairs is None else ([], compute_scores(self.pairs, arrays))


async def build_inputs(
    state: AppState, request: PoolingRequest, context: RequestContext
) -> PreparedPooling:
    """Tokenize the inputs and make a request of each. Raises RequestError, TooLong, Unsupported."""
    source = request.source
    texts: RenderedPrompts = {}
    await load_marked(state, request, context.key_owner, context.body_bytes)
    if isinstance(source, Conversations):
        chats = await load_media(state, source.request, context.key_owner, context.body_bytes)
        source = replace(source, request=chats)
        request = replace(request, source=source)
        texts = await render_request_templates(state, source.request, context.key_owner)
    size = max(context.body_bytes, _count_chars(source))
    return await run_off_loop(lambda: _build(state, request, context, texts), size, LONG_CHARS)


def _count_chars(source: Inputs | Conversations | Pairs) -> int:
    if isinstance(source, Inputs):
        return sum(map(len, source.prompts))
    if isinstance(source, Conversations):
        return source.request.prompt_chars
    return sum(map(len, source.queries)) + sum(map(len, source.documents))


def _build(
    state: AppState, request: PoolingRequest, context: RequestContext, texts: RenderedPrompts
) -> PreparedPooling:
    assert state.pooling is not None, "validate_pooling has checked it"
    source, names = request.source, request.field_names
    options = PoolingInputOptions(truncation_side=request.truncation_side, cache_salt=request.salt)
    if not isinstance(source, Conversations):
        options = replace(options, marked=source.media)
    shared: dict[str, Any] = {
        "params": _params(state.pooling, request),
        "name": state.new_engine_id(context.public_id),
        "common": {
            "priority": context.priority,
            "arrived_at": context.arrived_at or time.monotonic(),
            "timed": request.timing,
            "adapter": check_model(state, context.key_owner, request.model),
        },
    }
    scores = None
    if isinstance(source, Pairs):
        scores = state.pooling.process_pairs(
            source.queries,
            source.documents,
            names=(names["query"], names["document"]),
            options=_pair_options(state.pooling, request, source, options),
            **shared,
        )
        inputs = scores.inputs
    elif isinstance(source, Inputs):
        options = replace(options, add_special_tokens=source.add_special_tokens)
        prompts = source.prompts
        if (marked := source.media) is not None:
            prompts = [marked.protect(one) if isinstance(one, str) else one for one in prompts]
        inputs = _process_prompts(
            state.pooling, prompts, names["prompt"], {**shared, "options": options}
        )
    else:
        chats = source.request
        each = chats.conversations
        tails = [render_conversation(state, chats, texts, place) for place in range(len(each))]
        media = [media_inputs(one, tail) for one, tail in zip(each, tails)]
        special = chats.add_special_tokens
        options = replace(options, add_special_tokens=special, use_prompts=False)
        lazily = state.pooling.iter_prompts(
            [tail.prompt for tail in tails],
            param=names["prompt"],
            options=options,
            media=media.__getitem__ if any(media) else None,
            **shared,
        )
        inputs = list(lazily)
    requests = [with_tenant(request, context) for one in inputs for request in one.requests]
    return PreparedPooling(inputs, requests, scores)


def _process_prompts(
    pooling: PoolingInputProcessor,
    prompts: Sequence[str | list[int] | tuple[str, str]],
    param: str,
    shared: dict[str, Any],
) -> list[PoolingInput]:
    given = [one for one in prompts if not isinstance(one, tuple)]
    if len(given) == len(prompts):
        return list(pooling.iter_prompts(given, param=param, **shared))
    inputs = []
    name = shared.pop("name")
    for place, one in enumerate(prompts):
        where = param if len(prompts) == 1 else f"{param}[{place}]"
        each = {**shared, "param": where, "name": f"{name}.{place}"}
        if isinstance(one, tuple):
            inputs += pooling.process_text_pairs([one], **each)
        else:
            inputs += pooling.iter_prompts([one], **each)
    return inputs


def _params(pooling: PoolingInputProcessor, request: PoolingRequest) -> PoolingParams:
    """The parameters, with limits and prefixes that this model has."""
    params = request.params.clone()
    if request.cuts and (params.truncate_prompt_tokens or 0) > pooling.max_model_len:
        params.truncate_prompt_tokens = -1
    if params.prompt_name is None and request.input_type is not None:
        params.prompt_name = find_prompt_name(pooling.section, request.input_type)
    return params


def find_prompt_name(section: PoolingSection, input_type: str) -> str | None:
    """The prompt of a model's files that an API's word means; None: there is none."""
    names = (input_type, *PROMPT_NAMES.get(input_type, ()))
    return next((one for one in names if one in section.prompts), None)


def _pair_options(
    pooling: PoolingInputProcessor,
    request: PoolingRequest,
    source: Pairs,
    options: PoolingInputOptions,
) -> PoolingInputOptions:
    """APIs that cut have limits for longer models: they are lowered to none."""
    limits = [source.max_tokens_per_query or 0, source.max_tokens_per_doc or 0]
    if request.cuts:
        limits = [0 if one >= pooling.max_model_len else one for one in limits]
    return replace(
        options,
        max_tokens_per_query=limits[0],
        max_tokens_per_doc=limits[1],
        instruction=source.instruction,
    )
