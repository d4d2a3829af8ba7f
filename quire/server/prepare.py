"""Bodies -> requests of the engine. Both dialects become `Prepared` here, once.

Text work that may take long (a long prompt) leaves the event loop: tokenizing releases the GIL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from quire.core.params import RequestOutputKind, SamplingParams
from quire.errors import RequestError, Unsupported
from quire.server.protocol.chat import ChatBody, Templated
from quire.server.protocol.completions import CompletionBody
from quire.server.protocol.fields import SamplingBody
from quire.server.services import Services
from quire.text.inputs import Prepared

T = TypeVar("T")

LONG_CHARS = 20_000
"""Prompts beyond this are prepared in another thread."""


def render(to: Services, body: Templated) -> str:
    """The conversation as the text of a prompt. Raises RequestError."""
    variables = {**to.options.default_chat_template_kwargs, **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    template = to.text().template(to.chat_template, body.tools)
    try:
        return template.render(
            body.messages,
            body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            documents=body.documents,
            variables=variables,
        )
    except Unsupported as e:
        raise RequestError(str(e), param=e.param) from None  # a fault of the messages, to a client


async def prepare_chat(to: Services, body: ChatBody, public_id: str) -> list[Prepared]:
    """The one request of a conversation. The template writes special tokens itself."""
    params = sampling_params(to, body, max_tokens=None)

    def work() -> list[Prepared]:
        special = bool(body.add_special_tokens)
        return _prepared(to, body, params, public_id, [render(to, body)], special=special)

    return await _run(work, sum(len(str(m.get("content", ""))) for m in body.messages))


async def prepare_completion(to: Services, body: CompletionBody, public_id: str) -> list[Prepared]:
    """A request for each prompt."""
    params = sampling_params(to, body, max_tokens=16)
    prompts = body.prompts()

    def work() -> list[Prepared]:
        special = body.add_special_tokens is not False
        return _prepared(to, body, params, public_id, prompts, special=special)

    return await _run(work, sum(map(len, prompts)))


def sampling_params(to: Services, body: SamplingBody, *, max_tokens: int | None) -> SamplingParams:
    """What the body asks for, over the model's generation config, over the route's default."""
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    given = {"max_tokens": max_tokens, **to.defaults, **body.sampling()}
    return SamplingParams(**given, output_kind=kind, skip_clone=True)


def _prepared(
    to: Services,
    body: SamplingBody,
    params: SamplingParams,
    public_id: str,
    prompts: Sequence[str | list[int]],
    *,
    special: bool,
) -> list[Prepared]:
    if body.priority and not to.has_priorities:
        message = f"priority {body.priority} needs a server with --scheduling-policy priority"
        raise RequestError(message, param="priority")
    arrived_at = time.monotonic()
    side = body.truncation_side
    return [
        to.inputs.request(
            prompt,
            params,
            request_id=to.engine_id(public_id),
            priority=body.priority or 0,
            arrived_at=arrived_at,
            cache_salt=body.cache_salt,
            tokenization=None if side is None else {"truncation_side": side},
            add_special_tokens=special,
        )
        for prompt in prompts
    ]


async def _run(work: Callable[[], T], chars: int) -> T:
    return await asyncio.to_thread(work) if chars > LONG_CHARS else work()
