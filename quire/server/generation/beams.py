"""Beam search over the engine client: rounds of one-token requests, shown as a stream.

quire.engine.client.beam_search chooses the beams. To the rest of the server the search is a stream
that yields everything at its end: one update for each beam, the best first. A round costs a message
to the engine and one back, for all prompts together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from quire.core.params import BeamSearchParams
from quire.core.types import Request, Update
from quire.engine.client.beam_search import Beam, BeamSearch
from quire.engine.client.engine_pool import EnginePool
from quire.engine.client.stream import RequestStream, StreamGroup
from quire.server.app_state import AppState
from quire.server.generation.build_requests import PreparedGeneration
from quire.server.generation.client_watch import RequestCancelled
from quire.server.generation.generation_request import GenerationRequest
from quire.text.input_processor import InputProcessor, PreparedRequest


async def start_beam_search(
    state: AppState,
    request: GenerationRequest,
    prepared: PreparedGeneration,
    rank: int | None,
) -> tuple[PreparedGeneration, BeamSearchStream]:
    """Start a search for each prompt. Returns its requests with one sequence for each beam.

    rank: of the engine that runs them; None: any.
    """
    assert request.beams is not None
    searches = [
        _build_search(state.inputs, one, request.n, request.beams.length_penalty)
        for one in prepared.requests
    ]
    stream = BeamSearchStream(state.engine, searches, rank)
    await stream.start()
    widened = [_with_beam_width(one, request.n) for one in prepared.requests]
    return prepared._replace(requests=widened), stream


def _build_search(
    inputs: InputProcessor, one: PreparedRequest, width: int, penalty: float
) -> BeamSearch:
    request, params = one.request, one.params
    wanted = BeamSearchParams(
        beam_width=width,
        max_tokens=request.stop.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        length_penalty=penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        allowed_token_ids=params.allowed_token_ids,
    )
    return BeamSearch(
        request,
        wanted,
        eos_ids=inputs.eos_ids,
        max_new_tokens=inputs.room_behind(request),
        vocab=inputs.vocab_size,
    )


def _with_beam_width(one: PreparedRequest, width: int) -> PreparedRequest:
    params = one.params.clone()
    params.n = width
    return replace(one, request=replace(one.request, n=width), params=params)


class BeamSearchStream:
    """An UpdateSource that yields one batch of updates, when all searches are over."""

    def __init__(
        self, client: EnginePool, searches: Sequence[BeamSearch], rank: int | None
    ) -> None:
        self._client, self._rank = client, rank
        self._searches = searches
        self._search_by_request: dict[str, BeamSearch] = {}
        self._cached_tokens: dict[str, int] = {}  # of each search's prompt
        self._round_stream: RequestStream | StreamGroup | None = None
        self._is_read = False
        self._release_task: asyncio.Task[None] | None = None
        self.closed = False

    async def start(self) -> None:
        """Hand the first round to the engine. Raises what generate() raises."""
        try:
            self._round_stream = await self._next_round()
        except BaseException:
            await self._release_held()  # it may have been answered while the client went away
            raise

    def __aiter__(self) -> BeamSearchStream:
        return self

    async def __anext__(self) -> list[Update]:
        if self._is_read or self.closed:
            raise StopAsyncIteration
        self._is_read = True
        try:
            while self._round_stream is not None:
                await self._apply_round(self._round_stream)
                self._round_stream = None if self.closed else await self._next_round()
        finally:
            await self._release_held()
        if self.closed:
            raise StopAsyncIteration
        return [update for one in self._searches for update in self._final_updates(one)]

    def end_sequence(self, request_id: str, index: int) -> None:
        """Beams have no stop strings; nothing runs any more when their text is read."""

    def close(self) -> None:
        """Give the searches up. Harmless when called again."""
        if self._round_stream is not None:
            self._round_stream.close()
        if not self._is_read and not self.closed:  # else the reader lets go
            self._release_task = asyncio.get_running_loop().create_task(self._release_held())
        self.closed = True

    async def _next_round(self) -> RequestStream | StreamGroup | None:
        """Request one more token of every live beam; None when all searches are over."""
        live = [one for one in self._searches if not one.is_finished]
        requests: list[Request] = []
        for one in live:
            request = one.next_requests()
            self._search_by_request.update((request.id, one) for request in request)
            requests += request
        if not requests:
            return None
        stream = await self._client.generate(requests, self._rank)
        await self._client.abort([parent for one in live for parent in one.take_releasable()])
        return stream

    async def _apply_round(self, stream: RequestStream | StreamGroup) -> None:
        try:
            async for updates in stream:
                for update in updates:
                    if update.finish == "abort":  # by its id, in another process
                        raise RequestCancelled("the request was cancelled")
                    one = self._search_by_request[update.request_id]
                    self._cached_tokens.setdefault(one.name, update.cached_tokens)
                    one.add_update(update)
        finally:
            stream.close()
        self._search_by_request.clear()
        if not self.closed:
            for one in self._searches:
                one.raise_error()

    async def _release_held(self) -> None:
        """The last round's requests are held by the engine until they are aborted."""
        await self._client.abort([held for one in self._searches for held in one.requests_to_end()])

    def _final_updates(self, one: BeamSearch) -> list[Update]:
        cached = self._cached_tokens.get(one.name, 0)
        return [
            Update(
                one.name, index, self._output_tokens(beam), beam.finish_reason, cached_tokens=cached
            )
            for index, beam in enumerate(one.best_beams())
        ]

    def _output_tokens(self, beam: Beam) -> Sequence[int]:
        """Its tokens as the engine reports them: with the token that ended the sequence."""
        is_shown = beam.stop_reason is None or beam.tokens[-1:] == (beam.stop_reason,)
        return beam.tokens if is_shown else (*beam.tokens, beam.stop_reason or 0)
