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
from quire.server import forcing, templates
from quire.server.admit import reworded
from quire.server.asked import Asked, Conversation, Prompts
from quire.server.bound import bound
from quire.server.keys import OPERATOR, Holder
from quire.server.services import Services
from quire.server.splitting import splits
from quire.server.templates import Texts
from quire.text import sandbox
from quire.text.inputs import Prepared

T = TypeVar("T")

LONG_CHARS = 8_000
"""Prompts beyond this take milliseconds, and are prepared in another thread."""
LONG_S = 0.02
"""Of processor time in chat templates, for shorter ones: twenty messages take a fortieth."""
LONG_ANSWER = 20_000
"""Tokens with their logprobs, beyond which an answer is put together in another thread."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request goes by that is not in its body."""

    public_id: str
    priority: int = 0
    arrived_at: float = 0.0
    size: int = 0
    """Of the body, in bytes: long ones are prepared in another thread."""
    holder: Holder = OPERATOR
    """Whose key it came with."""
    deadline_at: float | None = None
    """When nobody waits any more."""


async def prepare(to: Services, asked: Asked, terms: Terms) -> list[Prepared]:
    """A request for each prompt. Raises RequestError, TooLong, Unsupported."""
    try:
        params = sampling_params(to, asked)
        texts = await templates.brought(to, asked)
        return await off_loop(
            lambda: _prepared(to, asked, params, terms, texts),
            max(asked.chars, terms.size),
            LONG_CHARS,
        )
    except RequestError as error:
        raise reworded(error, asked.words) from None


async def off_loop(work: Callable[[], T], size: int, most: int) -> T:
    """Do the work: here if it is short, else in a thread.

    Work whose chat template turns out to take long is begun here, and begun anew there.
    """
    if size <= most:
        with suppress(sandbox.TakesLong), sandbox.in_a_hurry(LONG_S):
            return work()
    return await asyncio.to_thread(work)


def render(to: Services, asked: Asked, texts: Texts, place: int = 0) -> str:
    """A conversation as the text of a prompt. texts: of those that brought a template.

    Raises RequestError.
    """
    text = texts.get(place)
    if text is None:
        text = _rendered(to, asked, asked.conversations[place])
    to.check_chars(len(text), "messages")
    return text


def _rendered(to: Services, asked: Asked, one: Conversation) -> str:
    call = templates.call(to, asked, one)
    try:
        return to.text().template(to.chat_template, call.tools).render(**call.words())
    except Unsupported as e:
        raise RequestError(str(e), param=e.param) from None  # a fault of the messages, to a client


def sampling_params(to: Services, asked: Asked) -> SamplingParams:
    """What is asked for, over the model's generation config, over the dialect's default."""
    kind = RequestOutputKind.DELTA if asked.stream else RequestOutputKind.FINAL_ONLY
    given: dict[str, Any] = {"max_tokens": asked.max_tokens, **to.defaults, **asked.sampling}
    if given["max_tokens"] == 0:
        word = asked.words.get("max_tokens", "max_tokens")
        raise RequestError(f"{word} must be >= 1, got 0", param=word)
    if asked.beams is not None:
        given["n"] = 1  # the width of the search is no matter of one request
    if splits(to, asked):
        given["skip_special_tokens"] = False  # they are marks; who reads them takes them out
    return SamplingParams(**given, output_kind=kind, skip_clone=True)


def _prepared(
    to: Services, asked: Asked, params: SamplingParams, terms: Terms, texts: Texts
) -> list[Prepared]:
    source = asked.source
    prompts: Sequence[str | list[int]]
    form = bound(to, asked)
    if isinstance(source, Prompts):
        prompts, special = source.prompts, source.add_special_tokens
        ruled = [forcing.rules_of_prompt(to, prompt, form, params) for prompt in prompts]
    else:
        places = range(len(asked.conversations))
        prompts = made = [render(to, asked, texts, place) for place in places]
        special = any(one.add_special_tokens for one in asked.conversations)
        each = zip(asked.conversations, made)
        ruled = [forcing.rules(to, asked, one, text, form, params) for one, text in each]
    side = asked.truncation_side
    ready = [
        to.inputs.request(
            prompt,
            params,
            request_id=to.engine_id(terms.public_id),
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
    return [_owned(one, terms) for one in ready]


def _owned(one: Prepared, terms: Terms) -> Prepared:
    """The request as its tenant's: with what that may have, and a part of the cache of its own."""
    holder, request = terms.holder, one.request
    if not holder.tenant and terms.deadline_at is None:
        return one
    salt = request.salt
    if holder.salt:
        salt = hashlib.sha256(holder.salt + request.salt).digest()
    owned = replace(
        request,
        tenant=holder.tenant,
        terms=holder.terms,
        salt=salt,
        deadline_at=terms.deadline_at,
    )
    return replace(one, request=owned)
