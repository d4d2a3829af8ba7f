"""`Asked` -> requests of the engine: templates, tokenizing, sampling parameters.

Text work that may take long (a long prompt) leaves the event loop: tokenizing releases the GIL.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quire.core.params import RequestOutputKind, SamplingParams
from quire.errors import RequestError, Unsupported
from quire.server.app_state import AppState
from quire.server.auth.api_keys import OPERATOR_OWNER, KeyOwner
from quire.server.generation import request_templates, tool_choice
from quire.server.generation.generation_request import Conversation, GenerationRequest, RawPrompts
from quire.server.generation.output_parsers import needs_output_parsers
from quire.server.generation.request_templates import RenderedPrompts
from quire.server.generation.response_format import build_content_constraint
from quire.server.generation.validate import with_client_field_names
from quire.text.input_processor import PreparedRequest
from quire.text.templates import jinja_sandbox

T = TypeVar("T")

LONG_CHARS = 8_000
"""Prompts beyond this take milliseconds, and are prepared in another thread."""
RENDER_CPU_BUDGET_S = 0.02
"""Of processor time in chat templates, for shorter ones: twenty messages take a fortieth."""
LONG_OUTPUT_TOKENS = 20_000
"""Tokens with their logprobs, beyond which an answer is put together in another thread."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a request goes by that is not in its body."""

    public_id: str
    priority: int = 0
    arrived_at: float = 0.0
    body_bytes: int = 0
    """Of the body, in bytes: long ones are prepared in another thread."""
    key_owner: KeyOwner = OPERATOR_OWNER
    """Whose key it came with."""
    deadline_at: float | None = None
    """When nobody waits any more."""


async def build_requests(
    to: AppState, asked: GenerationRequest, terms: RequestContext
) -> list[PreparedRequest]:
    """A request for each prompt. Raises RequestError, TooLong, Unsupported."""
    try:
        params = build_sampling_params(to, asked)
        texts = await request_templates.render_request_templates(to, asked)
        return await run_off_loop(
            lambda: _build_all(to, asked, params, terms, texts),
            max(asked.prompt_chars, terms.body_bytes),
            LONG_CHARS,
        )
    except RequestError as error:
        raise with_client_field_names(error, asked.field_names) from None


async def run_off_loop(work: Callable[[], T], size: int, most: int) -> T:
    """Do the work: here if it is short, else in a thread.

    Work whose chat template turns out to take long is begun here, and begun anew there.
    """
    if size <= most:
        with (
            suppress(jinja_sandbox.RenderDeadlineExceeded),
            jinja_sandbox.render_deadline(RENDER_CPU_BUDGET_S),
        ):
            return work()
    return await asyncio.to_thread(work)


def render_conversation(
    to: AppState, asked: GenerationRequest, texts: RenderedPrompts, place: int = 0
) -> str:
    """A conversation as the text of a prompt. texts: of those that brought a template.

    Raises RequestError.
    """
    text = texts.get(place)
    if text is None:
        text = _render_local(to, asked, asked.conversations[place])
    to.check_chars(len(text), "messages")
    return text


def _render_local(to: AppState, asked: GenerationRequest, one: Conversation) -> str:
    call = request_templates.build_template_arguments(to, asked, one)
    try:
        return (
            to.require_tokenizer().template(to.chat_template, call.tools).render(**call.as_kwargs())
        )
    except Unsupported as e:
        raise RequestError(str(e), param=e.param) from None  # a fault of the messages, to a client


def build_sampling_params(to: AppState, asked: GenerationRequest) -> SamplingParams:
    """What is asked for, over the model's generation config, over the dialect's default."""
    kind = RequestOutputKind.DELTA if asked.stream else RequestOutputKind.FINAL_ONLY
    given: dict[str, Any] = {"max_tokens": asked.max_tokens, **to.defaults, **asked.sampling}
    if given["max_tokens"] == 0:
        word = asked.field_names.get("max_tokens", "max_tokens")
        raise RequestError(f"{word} must be >= 1, got 0", param=word)
    if asked.beams is not None:
        given["n"] = 1  # the width of the search is no matter of one request
    if needs_output_parsers(to, asked):
        given["skip_special_tokens"] = False  # they are marks; who reads them takes them out
    return SamplingParams(**given, output_kind=kind, skip_clone=True)


def _build_all(
    to: AppState,
    asked: GenerationRequest,
    params: SamplingParams,
    terms: RequestContext,
    texts: RenderedPrompts,
) -> list[PreparedRequest]:
    source = asked.source
    prompts: Sequence[str | list[int]]
    form = build_content_constraint(to, asked)
    if isinstance(source, RawPrompts):
        prompts, special = source.prompts, source.add_special_tokens
        ruled = [
            tool_choice.build_prompt_constraints(to, prompt, form, params) for prompt in prompts
        ]
    else:
        places = range(len(asked.conversations))
        prompts = made = [render_conversation(to, asked, texts, place) for place in places]
        special = any(one.add_special_tokens for one in asked.conversations)
        each = zip(asked.conversations, made)
        ruled = [
            tool_choice.build_chat_constraints(to, asked, one, text, form, params)
            for one, text in each
        ]
    side = asked.truncation_side
    ready = [
        to.inputs.process(
            prompt,
            params,
            request_id=to.new_engine_id(terms.public_id),
            priority=terms.priority,
            arrived_at=terms.arrived_at or time.monotonic(),
            cache_salt=asked.salt,
            tokenization=None if side is None else {"truncation_side": side},
            add_special_tokens=special,
            timed=asked.timing,
            constraint=rules.constraint,
            thinking=rules.thinking,
        )
        for prompt, rules in zip(prompts, ruled)
    ]
    return [_with_tenant(one, terms) for one in ready]


def _with_tenant(one: PreparedRequest, terms: RequestContext) -> PreparedRequest:
    """The request as its tenant's: with what that may have, and a part of the cache of its own."""
    holder, request = terms.key_owner, one.request
    if not holder.tenant and terms.deadline_at is None:
        return one
    salt = request.salt
    if holder.cache_salt:
        salt = hashlib.sha256(holder.cache_salt + request.salt).digest()
    owned = replace(
        request,
        tenant=holder.tenant,
        tenant_limits=holder.limits,
        salt=salt,
        deadline_at=terms.deadline_at,
    )
    return replace(one, request=owned)
