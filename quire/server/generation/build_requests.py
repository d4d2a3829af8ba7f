"""Builds the engine's requests from a `GenerationRequest`: prompts, parameters, constraints.

Work that may take long (a long prompt) leaves the event loop: tokenizing releases the GIL.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.types import Request
from quire.errors import RequestError, context_overflow
from quire.server.app_state import AppState
from quire.server.formats.torch_archive import read_tensor
from quire.server.generation import output_parsers
from quire.server.generation.events import OutputParser
from quire.server.generation.generation_request import (
    Conversation,
    GenerationRequest,
    RawPrompts,
)
from quire.server.generation.media import load_media
from quire.server.generation.off_loop import LONG_CHARS, run_off_loop
from quire.server.generation.plan_answers import plan_answers
from quire.server.generation.request_context import RequestContext
from quire.server.generation.request_templates import (
    RenderedPrompts,
    render_conversation,
    render_request_templates,
)
from quire.server.generation.validate import check_model, with_client_field_names
from quire.text.input_processor import PreparedRequest
from quire.text.media_prompt import MediaInputs
from quire.text.output.answer_parser import PromptTail
from quire.text.prompts import Prompt
from quire.tool_grammar.answer_plan import AnswerPlan
from quire.tool_grammar.prompt_constraints import PromptConstraints

LONG_SCHEMA_CHARS = 2_000
"""The same for bodies with a schema or tools, which take up to 10 us a character."""


class PreparedGeneration(NamedTuple):
    """Requests for the engine, one for each prompt, and how their answers are read."""

    plan: AnswerPlan
    requests: list[PreparedRequest]
    parsers: list[OutputParser] | None
    """One for each choice; None: all text is content."""


async def build_requests(
    state: AppState, request: GenerationRequest, context: RequestContext
) -> PreparedGeneration:
    """Plan the answers and build a request for each prompt.

    Raises: RequestError, Unsupported.
    """
    size = max(request.prompt_chars, context.body_bytes)
    try:
        most = LONG_SCHEMA_CHARS if request.structure or request.tools else LONG_CHARS
        plan = await run_off_loop(lambda: plan_answers(state, request), size, most)
        params = _sampling_params(state, request, plan)
        request = await load_media(state, request, context.key_owner, context.body_bytes)
        rendered = await render_request_templates(state, request, context.key_owner)
        return await run_off_loop(
            lambda: _prepare(state, request, plan, params, context, rendered), size, LONG_CHARS
        )
    except RequestError as error:
        raise with_client_field_names(error, request.field_names) from None


def _sampling_params(
    state: AppState, request: GenerationRequest, plan: AnswerPlan
) -> SamplingParams:
    """The client's values, over the model's generation config, over the default of the API."""
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    given: dict[str, Any] = {"max_tokens": request.max_tokens, **state.defaults, **request.sampling}
    if given["max_tokens"] == 0:
        word = request.field_names.get("max_tokens", "max_tokens")
        raise RequestError(f"{word} must be >= 1, got 0", param=word)
    if request.beams is not None:
        given["n"] = 1  # the width of the search is no matter of one request
    if plan.parses_output:
        given["skip_special_tokens"] = False  # they are marks; the parser takes them out
    return SamplingParams(**given, output_kind=kind, skip_clone=True)


def _prepare(
    state: AppState,
    request: GenerationRequest,
    plan: AnswerPlan,
    params: SamplingParams,
    context: RequestContext,
    rendered: RenderedPrompts,
) -> PreparedGeneration:
    source = request.source
    if isinstance(source, RawPrompts):
        tails: list[PromptTail] = []
        prompts: list[tuple[Prompt, PromptTail | None, MediaInputs | None]] = [
            (
                _raw_prompt(one, source.suffix),
                PromptTail(one) if isinstance(one, str) else None,
                None,
            )
            for one in source.prompts
        ]
        prompts[:0] = [({"prompt_embeds": read_tensor(one)}, None, None) for one in source.embeds]
    else:
        chats = request.conversations
        tails = [render_conversation(state, request, rendered, i) for i in range(len(chats))]
        prompts = [(tail.prompt, tail, media_inputs(one, tail)) for one, tail in zip(chats, tails)]
    requests = [
        _build_request(state, request, params, context, prompt, plan.constraints(tail), media)
        for prompt, tail, media in prompts
    ]
    parsers = output_parsers.build_output_parsers(plan, tails, request.n)
    return PreparedGeneration(plan, requests, parsers)


def media_inputs(one: Conversation, tail: PromptTail) -> MediaInputs | None:
    """Return the media of a rendered conversation. None: it has neither media nor placeholders."""
    items = () if one.media is None else one.media.items
    return MediaInputs(items, tail.literals, True) if items or tail.literals else None


def encode_conversation(
    state: AppState, request: GenerationRequest, texts: RenderedPrompts
) -> list[int]:
    """Return the ids of the prompt of a conversation, with all tokens of its media."""
    (one,) = request.conversations
    tail = render_conversation(state, request, texts)
    media = media_inputs(one, tail)
    special = one.add_special_tokens
    if media is None or state.inputs.media is None:
        return state.require_tokenizer().encode(tail.prompt, add_special_tokens=special)
    placed = state.inputs.media.place(tail.prompt, None, media, add_special_tokens=special)
    return list(placed.ids)


def _raw_prompt(prompt: str | list[int] | Mapping[str, Any], suffix: str | None) -> Prompt:
    if not suffix or isinstance(prompt, Mapping):
        return prompt
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {key: prompt, "suffix": suffix}


def _build_request(
    state: AppState,
    request: GenerationRequest,
    params: SamplingParams,
    context: RequestContext,
    prompt: Prompt,
    constraints: PromptConstraints,
    media: MediaInputs | None,
) -> PreparedRequest:
    side = request.truncation_side
    prepared = state.inputs.process(
        prompt,
        params,
        request_id=state.new_engine_id(context.public_id),
        priority=context.priority,
        arrived_at=context.arrived_at or time.monotonic(),
        cache_salt=request.salt,
        tokenization=None if side is None else {"truncation_side": side},
        add_special_tokens=request.add_special_tokens,
        timed=request.timing,
        constraint=constraints.constraint,
        thinking=constraints.thinking,
        adapter=check_model(
            state, context.key_owner, request.model
        ),  # again: it may be unloaded meanwhile
        media=media,
    )
    _check_max_tokens(state, request, len(prepared.request.prompt))
    owned = with_tenant(prepared.request, context)
    return prepared if owned is prepared.request else replace(prepared, request=owned)


def _check_max_tokens(state: AppState, request: GenerationRequest, prompt: int) -> None:
    """Raise TooLong if max_tokens is more than the prompt leaves of the context.

    Defaults, of the API or of the model's generation config, are lowered to what is left.
    """
    asked = request.sampling.get("max_tokens")
    if asked is None or prompt + asked <= state.max_model_len:
        return
    raise context_overflow(
        state.max_model_len,
        f"you requested {prompt + asked} tokens ({prompt} in the prompt, {asked} in the output)",
        param="max_tokens",
        remedy="reduce max_tokens or the length of the prompt",
    )


def with_tenant(request: Request, context: RequestContext) -> Request:
    """Add the tenant of the key: its limits, and a part of the prefix cache of its own."""
    owner = context.key_owner
    if not owner.tenant and context.deadline_at is None:
        return request
    salt = request.salt
    if owner.cache_salt:
        salt = hashlib.sha256(owner.cache_salt + request.salt).digest()
    return replace(
        request,
        tenant=owner.tenant,
        tenant_limits=owner.limits,
        salt=salt,
        deadline_at=context.deadline_at,
    )
