"""Finds when a recording says the tokens of its transcribed pieces: one more prompt of each in the
engine.
Its tokens are those of the answer; it generates nothing, and its source is in the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from starlette.requests import Request

from quire.core.types import ALIGN, Pooled, Pooling
from quire.engine.client.pooling import pool
from quire.server.app_state import AppState
from quire.server.generation.build_requests import build_requests
from quire.server.generation.generation_request import GenerationRequest
from quire.server.generation.request_context import watch_request
from quire.text.word_times import token_times


async def align_tokens(
    state: AppState,
    http: Request,
    request: GenerationRequest,
    answers: Sequence[Sequence[int]],
    positions: Sequence[int],
    prefix: str,
) -> list[list[float]]:
    """Return the seconds at which the recording says each token of each answer. Raises QuireErrors.

    request: with the prompt of each answer, which has at least one token. positions: those of each
    source that have sound.
    """
    with watch_request(state, http, prefix) as context:
        prepared = await build_requests(state, request, context)
        requests = [
            replace(
                one.request,
                prompt=(*one.request.prompt, *answer),
                pooling=Pooling(ALIGN, dimensions=length, skip_tokens=len(one.request.prompt)),
                forced=None,
                read_prefix_cache=False,
            )
            for one, answer, length in zip(prepared.requests, answers, positions, strict=True)
        ]
        updates = await pool(state.engine, requests, context.rank)
        return await asyncio.to_thread(lambda: [_times(one.pooled) for one in updates])


def _times(found: Pooled | None) -> list[float]:
    assert found is not None, "pool() returns results alone"
    return token_times(np.frombuffer(found.data, "<f4").reshape(found.shape))
