"""Requests under way: the engine's updates -> the events that dialects shape.

    Asked ── begin() ──▶ Events ── read(updates) ──▶ [Opening, Delta, Finish ...]

Every route that generates comes through begin(): it checks, prepares, hands the requests to the
engine and watches over the client. A sequence whose text is complete (a stop string) is ended here.
`Events.read` runs for each token of each stream, so it is flat, and makes nothing nobody asked for.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from starlette.requests import Request

from quire.core.types import Update
from quire.outputs import SampleLogprobs
from quire.server import admit, beams, forcing
from quire.server.asked import Asked
from quire.server.events import (
    Closing,
    Delta,
    Event,
    Finish,
    Opening,
    Splitter,
    Usage,
    Whole,
    gather,
)
from quire.server.prepare import Terms, prepare
from quire.server.presence import Presence
from quire.server.services import Services, holder_of, tenant_of
from quire.server.timing import Watch, watch
from quire.text.assemble import Answer, Assembler
from quire.text.inputs import Prepared

log = logging.getLogger(__name__)


async def begin(
    to: Services, asked: Asked, http: Request, prefix: str, *, detached: bool = False
) -> Events:
    """Start what is asked for. Whoever called closes the Events.

    detached: it goes on when the client leaves. Raises QuireErrors; then nothing runs.
    """
    asked = forcing.settled(to, asked)
    admit.check(to, asked)
    watched = watch(http)
    if asked.timing or to.options.enable_per_request_metrics:
        watched.time()
    seconds = admit.deadline_s(http.headers)
    terms = _terms(to, asked, http, prefix, watched, seconds)
    presence = Presence(
        None if detached else http.receive,
        seconds,
        since=watched.received_at,
        tenant=tenant_of(http),
    )
    presence.enter(to.under_way, terms.public_id)
    try:
        with presence.waiting():
            prepared = await prepare(to, asked, terms)
            watched.handed(terms.public_id, prepared)
            stream: Updates
            if asked.beams is None:
                stream = await to.engine.generate([one.request for one in prepared])
            else:
                prepared, stream = await beams.search(to, asked, prepared)
    except BaseException:
        presence.leave()
        raise
    return Events(to, asked, terms.public_id, prepared, stream, presence, watched)


def _terms(
    to: Services,
    asked: Asked,
    http: Request,
    prefix: str,
    watched: Watch,
    seconds: float | None,
) -> Terms:
    said = http.headers.get("content-length", "")
    return Terms(
        to.public_id(prefix, http, asked.request_id),
        admit.priority(to, asked, http.headers),
        watched.received_at,
        int(said) if said.isdecimal() else 0,
        holder_of(http),
        None if seconds is None else watched.received_at + seconds,
    )


class Updates(Protocol):
    """The face of quire.engine.client.Stream."""

    closed: bool

    def __aiter__(self) -> AsyncIterator[list[Update]]: ...
    def end_sequence(self, request_id: str, index: int) -> None: ...
    def close(self) -> None: ...


class _Prompt:
    """One prompt of the body and what is known of its answers."""

    __slots__ = ("assembler", "base", "flows", "is_open", "place", "prepared")

    def __init__(self, place: int, prepared: Prepared, assembler: Assembler) -> None:
        self.place = place
        self.base = place * prepared.params.n  # index of its first choice
        self.prepared = prepared
        self.assembler = assembler
        self.is_open = False
        self.flows: list[Callable[[Sequence[int]], str]] | None = None
        """Set when it is open, if text is all that is made of its tokens (Assembler.flows)."""

    def opening(self) -> Opening:
        assembler = self.assembler
        return Opening(
            self.place,
            self.prepared.request.prompt,
            assembler.cached,
            self.prepared.prompt_text,
            assembler.prompt_logprobs,
        )


class Events:
    """What a generation says, in lists, one per turn. Iterate, or take the whole; then close().

    `stream` and read() are the same in two steps, for who writes thousands of chunks a second.
    """

    def __init__(
        self,
        to: Services,
        asked: Asked,
        public_id: str,
        prepared: Sequence[Prepared],
        stream: Updates,
        presence: Presence,
        watched: Watch,
    ) -> None:
        self.id = public_id
        self.asked = asked
        self.prepared = prepared
        self.usage = Usage()
        self.stream = stream
        self.presence = presence
        self._watch = watched
        self._has_metrics = to.options.enable_per_request_metrics
        self._prompts = [
            _Prompt(place, one, _assembler(to, one)) for place, one in enumerate(prepared)
        ]
        self._by_id = {one.prepared.request.id: one for one in self._prompts}
        self._whole = not asked.stream
        self._prompt_only = asked.prompt_only
        self._splitters: list[Splitter] | None = to.splitters(asked, prepared)
        if self._splitters and self._splitters[0].reasoning_tokens is not None:
            self.usage.reasoning = 0
        presence.in_engine = asked.beams is None  # a search is more than its round
        presence.on_end(self.stream.close)

    @property
    def closed(self) -> bool:
        """It was given up: the client went, or close() was called."""
        return self.stream.closed

    def close(self) -> None:
        """Abort what has not ended. Harmless when called again."""
        self.presence.leave()
        self.stream.close()

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        async for updates in self.stream:
            events = self.read(updates)
            if events:
                yield events
        self.check()
        yield [self.closing()]

    async def whole(self) -> Whole:
        """All of it, when it is complete. Raises ClientGone, DeadlinePassed, EngineError."""
        found: list[Event] = []
        async for events in self:
            found += events
        return gather(found)

    def check(self) -> None:
        """Raise why it ended before its time, if it did."""
        self.presence.check()

    def closing(self) -> Closing:
        """The last event."""
        timing = self._watch.shown() if self.asked.timing else None
        return Closing(self.usage, timing, self._watch.metrics() if self._has_metrics else None)

    def read(self, updates: Sequence[Update]) -> list[Event]:
        """The events that these updates make. Raises RequestError and EngineError."""
        watched = self._watch
        if watched.timed:
            watched.took(updates)
        events: list[Event] = []
        for update in updates:
            prompt = self._by_id[update.request_id]
            if prompt.flows is None or update.finish is not None:
                self._read(prompt, update, events)
            elif ids := update.token_ids:
                self.usage.completion += len(ids)
                index = update.index
                events.append(Delta(prompt.base + index, prompt.flows[index](ids), ids))
        if watched.logs_answers:
            watched.said(events)
        if watched.timed and self._whole:
            watched.waits()
        return events

    def _read(self, prompt: _Prompt, update: Update, events: list[Event]) -> None:
        if update.finish == "error":
            raise admit.blamed(update.exception(), self.asked)
        assembler = prompt.assembler
        answer = assembler.read(update)
        for index in assembler.aborts:
            self.stream.end_sequence(update.request_id, index)
        if answer is None:
            return
        if not prompt.is_open:
            self._open(prompt, events)
        if self._whole:
            self._tell_all(prompt, events)
        else:
            self._tell(prompt.base + answer.index, answer, events)

    def _open(self, prompt: _Prompt, events: list[Event]) -> None:
        prompt.is_open = True
        if not self._prompt_only and self._splitters is None:
            prompt.flows = prompt.assembler.flows()
        opening = prompt.opening()
        self.usage.prompt += len(opening.prompt_ids)
        self.usage.cached += opening.cached
        events.append(opening)

    def _tell(self, index: int, answer: Answer, events: list[Event]) -> None:
        """What is new of a streamed answer."""
        text, ids, logprobs = answer.take()
        reason = answer.finish_reason
        self._say(index, text, ids, logprobs, events, last=reason is not None)
        if reason is not None:
            self._finish(index, reason, answer.stop_reason, events)

    def _tell_all(self, prompt: _Prompt, events: list[Event]) -> None:
        """The answers that are returned of a prompt whose sequences have all ended."""
        for one in prompt.assembler.best():
            index = prompt.base + one.index
            self._say(index, one.text, one.token_ids, one.logprobs, events, last=True)
            assert one.finish_reason is not None, one
            self._finish(index, one.finish_reason, one.stop_reason, events)

    def _say(
        self,
        index: int,
        text: str,
        ids: Sequence[int],
        logprobs: SampleLogprobs | None,
        events: list[Event],
        *,
        last: bool,
    ) -> None:
        if self._prompt_only:
            events.append(Delta(index))
            return
        self.usage.completion += len(ids)
        if self._splitters is None:
            events.append(Delta(index, text, ids, logprobs))
            return
        splitter = self._splitters[index]
        thought = splitter.reasoning_tokens
        for said in splitter.push(text, ids, last=last):
            events.append(Delta(index, said.text, ids, logprobs, said.reasoning, said.tool_call))
            ids, logprobs = (), None  # they are told once
        if thought is not None:
            more = (splitter.reasoning_tokens or 0) - thought
            self.usage.reasoning = (self.usage.reasoning or 0) + more
        if ids and (self.asked.token_ids or logprobs is not None):
            events.append(Delta(index, "", ids, logprobs))

    def _finish(
        self, index: int, reason: str, stop_reason: int | str | None, events: list[Event]
    ) -> None:
        notes: Sequence[str] = ()
        if self._splitters is not None:
            reason = self._splitters[index].finish(reason)
            notes = self._splitters[index].notes
        for note in notes:
            log.info("%s, choice %d: %s", self.id, index, note)
        events.append(Finish(index, reason, stop_reason, notes))


def _assembler(to: Services, prepared: Prepared) -> Assembler:
    return Assembler(prepared, to.tokenizer, stream_interval=to.options.stream_interval)
