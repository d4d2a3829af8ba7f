"""POST /v1/completions: prompts go on as plain text. Choice index = prompt's place x n + sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.body import read
from quire.server.events import Closing, Delta, Event, Finish, Opening, Whole, paired
from quire.server.protocol import logprobs
from quire.server.protocol.completions import CompletionBody
from quire.server.protocol.shape import Head, add_closing, closing_chunk, encode
from quire.server.services import Services, services
from quire.server.sse import DONE, EventStream, answer, error_event, event
from quire.server.telling import Events, begin

router = APIRouter()
BODIES = {"/v1/completions": (CompletionBody,)}
MARK = "\x00text\x00"


@router.post("/v1/completions", tags=["completions"])
async def create_completion(http: Request) -> Response:
    """Go on with one or more prompts."""
    to = services(http)
    body = await read(http, CompletionBody, to.options.max_body_bytes)
    events = await begin(to, body.to_asked(), http, "cmpl-")
    shape = CompletionShape(to, events)
    if body.stream:
        return EventStream(events, shape, keep_alive_s=to.options.sse_keep_alive_interval)
    return await answer(events, shape)


class CompletionShape:
    """Events -> the answer in OpenAI's completions form, whole or in chunks."""

    media_type = "text/event-stream"
    end = DONE

    def __init__(self, to: Services, events: Events) -> None:
        asked = self._asked = events.asked
        self._to = to
        self._n = asked.n
        self._head = Head(events.id, "text_completion", to.names[0], to.fingerprint())
        self._usage = events.usage
        self._details = to.options.enable_prompt_tokens_details
        self._ends_with_usage = asked.include_usage or to.options.enable_force_include_usage
        self._as_ids = asked.tokens_as_ids or to.options.return_tokens_as_token_ids
        self._has_logprobs = bool(
            asked.sampling.get("logprobs") is not None or asked.sampling.get("logprob_token_ids")
        )
        self._shows_prompt_logprobs = not asked.streams_prompt_logprobs
        self._is_plain = not (asked.continuous_usage or asked.token_ids)
        self._openings: dict[int, Opening] = {}
        self._begun: dict[int, logprobs.ForCompletion] = {}
        self._cuts: dict[int, tuple[bytes, bytes]] = {}

    # -- whole ----------------------------------------------------------------------------------

    def whole(self, whole: Whole) -> dict[str, Any]:
        """The whole answer."""
        self._openings = {one.place: one for one in whole.openings}
        choices = []
        for one in whole.choices:
            delta = Delta(one.index, one.text, one.token_ids, one.logprobs)
            choices.append(self._choice(delta, Finish(one.index, one.reason, one.stop_reason)))
        body = self._head.body(choices)
        body["service_tier"] = None
        body["system_fingerprint"] = self._head.fingerprint
        body["usage"] = whole.closing.usage.shown(details=self._details)
        add_closing(body, whole.closing)
        return body

    # -- chunks ---------------------------------------------------------------------------------

    def begin(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        return error_event(error)

    def write(self, events: list[Event]) -> bytes:
        """The chunks of a turn."""
        if len(events) == 1 and self._is_plain:
            only = events[0]
            if type(only) is Delta and only.logprobs is None and only.index in self._cuts:
                head, tail = self._cuts[only.index]
                return head + encode(only.text) + tail
        return b"".join(self._chunks(events))

    def _chunks(self, events: list[Event]) -> list[bytes]:
        made: list[bytes] = []
        for one, finish in paired(events):
            if isinstance(one, Delta):
                made.append(self._chunk(one, finish))
            elif isinstance(one, Finish):
                made.append(self._chunk(Delta(one.index), one))
            elif isinstance(one, Opening):
                self._openings[one.place] = one
            else:
                made.append(self._closing(one))
        return made

    def _chunk(self, one: Delta, finish: Finish | None) -> bytes:
        """What is new. Its text may be empty: a character or a stop string may not be whole yet."""
        chunk = self._head.body([self._choice(one, finish)])
        if finish is not None:
            chunk["system_fingerprint"] = self._head.fingerprint
        if self._asked.continuous_usage:
            chunk["usage"] = self._usage.shown(details=self._details)
        return event(chunk)

    def _closing(self, one: Closing) -> bytes:
        chunk = closing_chunk(self._head, one, usage=self._ends_with_usage, details=self._details)
        return b"" if chunk is None else event(chunk)

    def _choice(self, one: Delta, finish: Finish | None) -> dict[str, Any]:
        """The whole of a choice, or what is new of it; its first news has the echo."""
        opening = self._openings[one.index // self._n]
        first = one.index not in self._begun
        if first:
            self._begin(one.index)
        echo = self._echo(opening) if first and self._asked.echo else ""
        choice: dict[str, Any] = {
            "index": one.index,
            "text": echo + one.text,
            "logprobs": self._logprobs(one, opening if first else None),
            "finish_reason": None if finish is None else finish.reason,
            "stop_reason": None if finish is None else finish.stop_reason,
        }
        if self._shows_prompt_logprobs and opening.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.for_prompt(opening.prompt_logprobs)
        if self._asked.token_ids:
            choice["token_ids"] = list(one.token_ids)
            if first:
                choice["prompt_token_ids"] = list(opening.prompt_ids)
        if self._asked.prompt_text and first:
            choice["prompt_text"] = opening.prompt_text or self._decode(opening.prompt_ids)
        return choice

    def _begin(self, index: int) -> None:
        to = self._to  # and not us, who will have it
        self._begun[index] = logprobs.ForCompletion(
            self._as_ids, lambda one: to.text().decode([one])
        )
        bare = {
            "index": index,
            "text": MARK,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._asked.stream:
            self._cuts[index] = self._head.cut(bare, MARK)

    def _echo(self, opening: Opening) -> str:
        text = opening.prompt_text
        return self._decode(opening.prompt_ids) if text is None else text

    def _logprobs(self, one: Delta, prompt: Opening | None) -> dict[str, Any] | None:
        """Of the new tokens; after those of the prompt, if they are to be echoed."""
        if not self._has_logprobs:
            return None
        ids: list[int] = []
        steps: list[logprobs.Step] = []
        if prompt is not None and self._asked.echo and prompt.prompt_logprobs is not None:
            ids.extend(prompt.prompt_ids)
            steps.extend(step or None for step in prompt.prompt_logprobs)
        if one.logprobs is not None:
            ids.extend(one.token_ids)
            steps.extend(one.logprobs)
        return self._begun[one.index].take(ids, steps) if ids else None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._to.text().decode(list(ids))
