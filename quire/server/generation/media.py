"""Media of requests: takes them out of messages and texts, and prepares them before templates run.

Fetching and processing happen here, on the event loop and in worker processes; the rest of a
request is prepared afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from quire.errors import RequestError, Unsupported
from quire.media.processor_cache import framed_digest
from quire.server.app_state import AppState
from quire.server.auth.api_keys import KeyOwner
from quire.server.formats.torch_archive import read_tensor
from quire.server.generation.generation_request import Conversation, GenerationRequest, LoadedMedia
from quire.server.generation.off_loop import LONG_CHARS, run_off_loop
from quire.server.pooling.pooling_request import Conversations, Pairs, PoolingRequest
from quire.text.marked_media import check_bytes
from quire.text.media_prompt import MediaReader

T = TypeVar("T")

_READ_TENSOR = partial(read_tensor, most_axes=5, integers=True)
"""Images of several bands and frames, in a batch of one, have five axes; sizes are integers."""


async def load_media(
    state: AppState, request: GenerationRequest, owner: KeyOwner, body_bytes: int
) -> GenerationRequest:
    """Return the request with the media of its conversations, ready.

    Raises RequestError, MediaUnavailable, Unsupported, Overloaded, EngineError.
    """
    reader = state.inputs.media
    _check_kwargs(reader, request.processor_kwargs, request.media_io_kwargs)
    if reader is None or not request.conversations:
        return request
    size = max(request.prompt_chars, body_bytes)
    loaded = await _gather(
        (partial(_load, reader, request, one, owner, size) for one in request.conversations), reader
    )
    check_bytes(
        [item for one in loaded if one.media is not None for item in one.media.items], "messages"
    )
    single = isinstance(request.source, Conversation)
    return replace(request, source=loaded[0] if single else loaded)


async def _load(
    reader: MediaReader,
    request: GenerationRequest,
    one: Conversation,
    owner: KeyOwner,
    size: int,
) -> Conversation:
    takes_embeds = reader.pipeline.settings.takes_embeds
    found = await run_off_loop(
        lambda: reader.read_conversation(
            one.messages, read_tensor=_READ_TENSOR if takes_embeds else None
        ),
        size,
        LONG_CHARS,
    )
    items = await reader.prepare(
        found.parts,
        root=_cache_root(owner, request.salt),
        names=owner.uuid_scope,
        share=owner.share,
        kwargs=request.processor_kwargs,
        io_kwargs=request.media_io_kwargs,
    )
    return replace(one, messages=found.messages, media=LoadedMedia(found, items))


async def load_marked(
    state: AppState, request: PoolingRequest, owner: KeyOwner, body_bytes: int
) -> None:
    """Prepare the media of texts with marks.

    Raises RequestError, MediaUnavailable, Unsupported, Overloaded, EngineError.
    """
    source, reader = request.source, state.inputs.media
    _check_kwargs(reader, request.processor_kwargs, request.media_io_kwargs)
    if isinstance(source, Conversations) or source.media is None:
        return
    marked = source.media
    takes_embeds = reader is not None and reader.pipeline.settings.takes_embeds
    await run_off_loop(
        lambda: marked.bind(reader, read_tensor=_READ_TENSOR if takes_embeds else None),
        body_bytes,
        LONG_CHARS,
    )
    assert reader is not None, "bind() has checked it"
    sides = (source.queries, source.documents) if isinstance(source, Pairs) else (source.prompts,)
    texts = dict.fromkeys(one for side in sides for one in side if isinstance(one, str))
    groups = [numbers for text in texts if (numbers := marked.marked(text))]

    async def load(numbers: list[int]) -> None:
        items = await reader.prepare(
            marked.parts(numbers),
            root=_cache_root(owner, request.salt),
            names=owner.uuid_scope,
            share=owner.share,
            kwargs=request.processor_kwargs,
            io_kwargs=request.media_io_kwargs,
        )
        marked.put(numbers, items)

    await _gather((partial(load, numbers) for numbers in groups), reader)


def _cache_root(owner: KeyOwner, salt: str | None) -> bytes:
    return framed_digest(owner.tenant, owner.cache_salt, (salt or "").encode("utf-8", "replace"))


async def _gather(works: Iterable[Callable[[], Awaitable[T]]], reader: MediaReader) -> list[T]:
    """Return the results of works in order; as many run at once as there are workers, and one.

    The error of one ends the others.
    """
    slots = asyncio.Semaphore(reader.pipeline.settings.workers + 1)

    async def run(work: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await work()

    tasks = [asyncio.ensure_future(run(one)) for one in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _check_kwargs(
    reader: MediaReader | None,
    processor_kwargs: Mapping[str, Any] | None,
    io_kwargs: Mapping[str, Any] | None,
) -> None:
    given = {"mm_processor_kwargs": processor_kwargs, "media_io_kwargs": io_kwargs}
    for name, value in given.items():
        if not value:
            continue
        if reader is None:
            raise Unsupported(f"{name}: this model reads text only", param=name)
        if not reader.pipeline.settings.trusts_kwargs:
            message = f"{name}: the server was not started with --trust-request-mm-kwargs"
            raise RequestError(message, param=name)
