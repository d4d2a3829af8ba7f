"""Media of conversations: takes them out of the messages, and prepares them before templates run.

Only chat routes have media. Fetching and processing happen here, on the event loop and in worker
processes; the rest of a request is prepared afterwards.
"""

from __future__ import annotations

from dataclasses import replace

from quire.errors import RequestError, Unsupported
from quire.media.processor_cache import framed_digest
from quire.server.app_state import AppState
from quire.server.auth.api_keys import KeyOwner
from quire.server.formats.torch_archive import read_tensor
from quire.server.generation.generation_request import Conversation, GenerationRequest, LoadedMedia
from quire.server.generation.off_loop import LONG_CHARS, run_off_loop
from quire.text.media_prompt import MediaReader


async def load_media(
    state: AppState, request: GenerationRequest, owner: KeyOwner, body_bytes: int
) -> GenerationRequest:
    """Return the request with the media of its conversations, ready.

    Raises RequestError, MediaUnavailable, Unsupported, Overloaded, EngineError.
    """
    reader = state.inputs.media
    _check_kwargs(request, reader)
    if reader is None or not request.conversations:
        return request
    loaded = [
        await _load(reader, request, one, owner, max(request.prompt_chars, body_bytes))
        for one in request.conversations
    ]
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
            one.messages, read_tensor=read_tensor if takes_embeds else None
        ),
        size,
        LONG_CHARS,
    )
    salt = (request.salt or "").encode("utf-8", "replace")
    items = await reader.prepare(
        found.parts,
        root=framed_digest(owner.tenant, owner.cache_salt, salt),
        kwargs=request.processor_kwargs,
        io_kwargs=request.media_io_kwargs,
    )
    return replace(one, messages=found.messages, media=LoadedMedia(found, items))


def _check_kwargs(request: GenerationRequest, reader: MediaReader | None) -> None:
    given = {
        "mm_processor_kwargs": request.processor_kwargs,
        "media_io_kwargs": request.media_io_kwargs,
    }
    for name, value in given.items():
        if not value:
            continue
        if reader is None:
            raise Unsupported(f"{name}: this model reads text only", param=name)
        if not reader.pipeline.settings.trusts_kwargs:
            message = f"{name}: the server was not started with --trust-request-mm-kwargs"
            raise RequestError(message, param=name)
