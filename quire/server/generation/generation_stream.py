"""Runs generations: turns the engine's updates into the events that APIs format.

    GenerationRequest ── start_generation() ──▶ GenerationStream ── process_updates() ──▶ events

Every route that generates calls start_generation(): it validates, prepares, submits the requests to
the engine and watches the client. A sequence that completes a stop string is ended here.
`GenerationStream.process_updates` runs for each token of each stream, so it is flat and builds only
what the request needs.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from typing import Protocol

from starlette.requests import Request

from quire.core.types import DraftCounts, Update
from quire.outputs import SampleLogprobs
from quire.server.app_state import AppState, get_key_owner, get_tenant
from quire.server.generation.beams import start_beam_search
from quire.server.generation.build_requests import PreparedGeneration, build_requests
from quire.server.generation.client_watch import ClientWatch
from quire.server.generation.events import (
    ChoiceDelta,
    ChoiceFinish,
    FinalEvent,
    FullResponse,
    GenerationEvent,
    PredictionUsage,
    PromptEvent,
    TokenUsage,
    collect_response,
)
from quire.server.generation.generation_request import GenerationRequest
from quire.server.generation.plan_answers import resolve_thinking_budget
from quire.server.generation.request_context import read_request_context
from quire.server.generation.validate import (
    check_generates,
    require_model,
    to_client_error,
    validate_request,
)
from quire.server.telemetry.request_timer import RequestTimer, get_request_timer
from quire.text.input_processor import PreparedRequest
from quire.text.output.output_processor import (
    RequestOutputProcessor,
    SequenceOutput,
    draft_metrics,
)

log = logging.getLogger(__name__)


async def start_generation(
    state: AppState,
    request: GenerationRequest,
    http: Request,
    prefix: str,
    *,
    detached: bool = False,
) -> GenerationStream:
    """Start a generation; the caller closes the stream. Raises QuireErrors; then nothing runs.

    detached: it continues when the client disconnects.
    """
    check_generates(state)
    await require_model(state, get_key_owner(http), request.model)
    request = resolve_thinking_budget(state, request)
    validate_request(state, request)
    timer = get_request_timer(http)
    if request.timing or state.options.enable_per_request_metrics:
        timer.enable()
    context = read_request_context(
        state,
        http,
        prefix,
        timer.received_at,
        priority=request.priority,
        request_id=request.request_id,
    )
    client_watch = ClientWatch(
        None if detached else http.receive,
        context.timeout_s,
        since=timer.received_at,
        tenant=get_tenant(http),
    )
    client_watch.register(state.active_requests, context.public_id)
    try:
        with client_watch.raise_when_ended():
            prepared = await build_requests(state, request, context)
            timer.record_submitted(context.public_id, prepared.requests)
            updates: UpdateSource
            if request.beams is None:
                requests = [one.request for one in prepared.requests]
                updates = await state.engine.generate(requests, context.rank)
            else:
                prepared, updates = await start_beam_search(state, request, prepared, context.rank)
    except BaseException:
        client_watch.stop()
        raise
    return GenerationStream(
        state, request, context.public_id, prepared, updates, client_watch, timer
    )


class UpdateSource(Protocol):
    """The interface of quire.engine.client.stream.RequestStream."""

    closed: bool

    def __aiter__(self) -> AsyncIterator[list[Update]]: ...
    def end_sequence(self, request_id: str, index: int) -> None: ...
    def close(self) -> None: ...


class _PromptState:
    """One prompt of the body and what is known of its answers."""

    __slots__ = (
        "first_choice",
        "is_open",
        "output_processor",
        "prepared",
        "prompt_index",
        "text_readers",
    )

    def __init__(
        self, place: int, prepared: PreparedRequest, assembler: RequestOutputProcessor
    ) -> None:
        self.prompt_index = place
        self.first_choice = place * prepared.params.n  # index of its first choice
        self.prepared = prepared
        self.output_processor = assembler
        self.is_open = False
        self.text_readers: list[Callable[[Sequence[int]], str]] | None = None
        """Set when it is open, if its tokens become text and nothing else."""

    def build_prompt_event(self) -> PromptEvent:
        output_processor = self.output_processor
        return PromptEvent(
            self.prompt_index,
            self.prepared.request.prompt,
            output_processor.num_cached_tokens,
            self.prepared.prompt_text,
            output_processor.prompt_logprobs,
            len(self.prepared.request.encoder_prompt),
            sum(one.length for one in self.prepared.request.media),
        )


class GenerationStream:
    """Events of a generation, in lists, one per turn. Iterate, or collect(); then close().

    `stream` and process_updates() are the same in two steps, for thousands of chunks a second.
    """

    def __init__(
        self,
        state: AppState,
        request: GenerationRequest,
        public_id: str,
        prepared: PreparedGeneration,
        updates: UpdateSource,
        client_watch: ClientWatch,
        timer: RequestTimer,
    ) -> None:
        self.id = public_id
        self.early_error_wait_s = state.early_error_wait_s
        self.request = request
        self.plan = prepared.plan
        self.requests = prepared.requests
        self.model_name = state.model_name(prepared.requests[0].request.adapter)
        self.usage = TokenUsage()
        self.stream = updates
        self.client_watch = client_watch
        self._timer = timer
        self._reports_metrics = state.options.enable_per_request_metrics
        self._prompts = [
            _PromptState(place, one, _build_output_processor(state, one))
            for place, one in enumerate(prepared.requests)
        ]
        self._by_id = {one.prepared.request.id: one for one in self._prompts}
        self._is_full = not request.stream
        self._prompt_only = request.prompt_only
        self._draft_counts: dict[int, DraftCounts] = {}  # by choice
        if request.sampling.get("prediction") is not None:
            self.usage.prediction = PredictionUsage()
        self._output_parsers = prepared.parsers
        if self._output_parsers and self._output_parsers[0].reasoning_tokens is not None:
            self.usage.reasoning_tokens = 0
        client_watch.is_in_engine = request.beams is None  # a search is more than its round
        client_watch.on_end(updates.close)

    @property
    def closed(self) -> bool:
        """The client disconnected, or close() was called."""
        return self.stream.closed

    def close(self) -> None:
        """Abort what has not ended. Harmless when called again."""
        self.client_watch.stop()
        self.stream.close()

    async def __aiter__(self) -> AsyncIterator[list[GenerationEvent]]:
        async for updates in self.stream:
            events = self.process_updates(updates)
            if events:
                yield events
        self.raise_if_ended()
        yield [self.build_final_event()]

    async def collect(self) -> FullResponse:
        """All of it, when it is complete. Raises ClientGone, DeadlinePassed, EngineError."""
        found: list[GenerationEvent] = []
        async for events in self:
            found += events
        return collect_response(found)

    def raise_if_ended(self) -> None:
        """Raise the reason of an early end, if there is one."""
        self.client_watch.raise_if_ended()

    def build_final_event(self) -> FinalEvent:
        """The last event."""
        timing = self._timer.breakdown() if self.request.timing else None
        counts, usage = self._draft_counts, self.usage
        if usage.prediction is not None:
            accepted = sum(sum(one.accepted) for one in counts.values())
            drafted = sum(one.tokens for one in counts.values())
            usage.prediction = PredictionUsage(accepted, drafted - accepted)
        metrics: dict[str, object] | None = None
        if self._reports_metrics and (times := self._timer.latency_metrics()) is not None:
            found = draft_metrics(next(iter(counts.values()), None))
            metrics = {**times, "speculative_decoding": found and asdict(found)}
        return FinalEvent(usage, timing, metrics)

    def process_updates(self, updates: Sequence[Update]) -> list[GenerationEvent]:
        """The events that these updates make. Raises RequestError and EngineError."""
        watched = self._timer
        if watched.is_enabled:
            watched.record_updates(updates)
        events: list[GenerationEvent] = []
        for update in updates:
            prompt = self._by_id[update.request_id]
            if prompt.text_readers is None or update.finish is not None:
                self._process_update(prompt, update, events)
            elif ids := update.token_ids:
                self.usage.completion_tokens += len(ids)
                index = update.index
                events.append(
                    ChoiceDelta(prompt.first_choice + index, prompt.text_readers[index](ids), ids)
                )
        if watched.logs_answers:
            watched.report_events(events)
        if watched.is_enabled and self._is_full:
            watched.record_waiting()
        return events

    def _process_update(
        self, prompt: _PromptState, update: Update, events: list[GenerationEvent]
    ) -> None:
        if update.finish == "error":
            raise to_client_error(update.to_exception(), self.request)
        if update.draft_counts is not None:
            self._draft_counts[prompt.first_choice + update.index] = update.draft_counts
        assembler = prompt.output_processor
        answer = assembler.process(update)
        for index in assembler.aborts:
            self.stream.end_sequence(update.request_id, index)
        if answer is None:
            return
        if not prompt.is_open:
            self._start_prompt(prompt, events)
        if self._is_full:
            self._emit_full(prompt, events)
        else:
            self._emit_delta(prompt.first_choice + answer.index, answer, events)

    def _start_prompt(self, prompt: _PromptState, events: list[GenerationEvent]) -> None:
        prompt.is_open = True
        if not self._prompt_only and self._output_parsers is None:
            prompt.text_readers = prompt.output_processor.direct_decoders()
        opening = prompt.build_prompt_event()
        self.usage.prompt_tokens += len(opening.prompt_ids) + opening.encoder_tokens
        self.usage.cached_tokens += opening.cached_tokens
        self.usage.media_tokens += opening.media_tokens
        events.append(opening)

    def _emit_delta(
        self, index: int, answer: SequenceOutput, events: list[GenerationEvent]
    ) -> None:
        """Emit the new part of a streamed answer."""
        text, ids, logprobs = answer.take()
        reason = answer.finish_reason
        self._emit_text(index, text, ids, logprobs, events, last=reason is not None)
        if reason is not None:
            self._emit_finish(index, reason, answer.stop_reason, events)

    def _emit_full(self, prompt: _PromptState, events: list[GenerationEvent]) -> None:
        """The answers that are returned of a prompt after all its sequences have ended."""
        for one in prompt.output_processor.final_outputs():
            index = prompt.first_choice + one.index
            self._emit_text(index, one.text, one.token_ids, one.logprobs, events, last=True)
            assert one.finish_reason is not None, one
            self._emit_finish(index, one.finish_reason, one.stop_reason, events)

    def _emit_text(
        self,
        index: int,
        text: str,
        ids: Sequence[int],
        logprobs: SampleLogprobs | None,
        events: list[GenerationEvent],
        *,
        last: bool,
    ) -> None:
        if self._prompt_only:
            events.append(ChoiceDelta(index))
            return
        self.usage.completion_tokens += len(ids)
        if self._output_parsers is None:
            events.append(ChoiceDelta(index, text, ids, logprobs))
            return
        splitter = self._output_parsers[index]
        thought = splitter.reasoning_tokens
        for delta in splitter.push(text, ids, last=last):
            events.append(
                ChoiceDelta(index, delta.text, ids, logprobs, delta.reasoning, delta.tool_call)
            )
            ids, logprobs = (), None  # they are reported once
        if thought is not None:
            more = (splitter.reasoning_tokens or 0) - thought
            self.usage.reasoning_tokens = (self.usage.reasoning_tokens or 0) + more
        if ids and (self.request.token_ids or logprobs is not None):
            events.append(ChoiceDelta(index, "", ids, logprobs))

    def _emit_finish(
        self, index: int, reason: str, stop_reason: int | str | None, events: list[GenerationEvent]
    ) -> None:
        notes: Sequence[str] = ()
        if self._output_parsers is not None:
            reason = self._output_parsers[index].finish(reason)
            notes = self._output_parsers[index].notes
        for note in notes:
            log.info("%s, choice %d: %s", self.id, index, note)
        events.append(ChoiceFinish(index, reason, stop_reason, notes))


def _build_output_processor(state: AppState, prepared: PreparedRequest) -> RequestOutputProcessor:
    return RequestOutputProcessor(
        prepared, state.tokenizer, stream_interval=state.options.stream_interval
    )
