"""POST /v1/chat/completions and its batch form: HTTP in, events out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.outputs import SampleLogprobs
from quire.server.asked import Conversation
from quire.server.body import read
from quire.server.events import (
    Choice,
    Closing,
    Delta,
    Event,
    Finish,
    Opening,
    ToolCall,
    Whole,
    paired,
)
from quire.server.forcing import choice_of
from quire.server.protocol import logprobs
from quire.server.protocol.chat import ChatBatchBody, ChatBody
from quire.server.protocol.shape import Head, add_closing, closing_chunk, encode
from quire.server.services import Services, services
from quire.server.sse import DONE, EventStream, answer, error_event, event
from quire.server.telling import Events, begin

router = APIRouter()
BODIES = {
    "/v1/chat/completions": (ChatBody,),
    "/v1/chat/completions/batch": (ChatBatchBody,),
}
MARK = "\x00text\x00"


@router.post("/v1/chat/completions", tags=["chat"])
async def create_chat_completion(http: Request) -> Response:
    """Go on with a conversation."""
    to = services(http)
    body = await read(http, ChatBody, to.options.max_body_bytes)
    events = await begin(to, body.to_asked(), http, "chatcmpl-")
    shape = ChatShape(to, events)
    if body.stream:
        return EventStream(events, shape, keep_alive_s=to.options.sse_keep_alive_interval)
    return await answer(events, shape)


@router.post("/v1/chat/completions/batch", tags=["chat"])
async def create_chat_completions(http: Request) -> Response:
    """Go on with several conversations; choice = conversation x n + sample."""
    to = services(http)
    body = await read(http, ChatBatchBody, to.options.max_body_bytes)
    events = await begin(to, body.to_asked(), http, "chatcmpl-")
    return await answer(events, ChatShape(to, events))


class ChatShape:
    """Events -> the answer in OpenAI's chat form, whole or in chunks."""

    media_type = "text/event-stream"
    end = DONE

    def __init__(self, to: Services, events: Events) -> None:
        asked = self._asked = events.asked
        name = "chat.completion.chunk" if asked.stream else "chat.completion"
        self._head = Head(events.id, name, to.names[0], to.fingerprint())
        self._usage = events.usage
        self._details = to.options.enable_prompt_tokens_details
        self._ends_with_usage = asked.include_usage or to.options.enable_force_include_usage
        self._shown = to.shown(as_ids=asked.tokens_as_ids)
        # Chunks that differ by their text alone are not made anew each time
        self._is_plain = not (asked.continuous_usage or asked.token_ids)
        self._begun: dict[int, tuple[bytes, bytes]] = {}
        self._openings: dict[int, Opening] = {}
        self._voices = [_Voice(to, one, echo=asked.echo) for one in asked.conversations]
        self._n = asked.n
        self._names_one = any(
            choice_of(asked, one).named is not None for one in asked.conversations
        )

    # -- whole ----------------------------------------------------------------------------------

    def whole(self, whole: Whole) -> dict[str, Any]:
        """The whole answer."""
        body = self._head.body([self._choice(one) for one in whole.choices])
        body["service_tier"] = None
        body["system_fingerprint"] = self._head.fingerprint
        body["usage"] = whole.closing.usage.shown(details=self._details)
        add_closing(body, whole.closing)
        self._add_prompts(body, whole.openings)
        return body

    def _add_prompts(self, body: dict[str, Any], openings: list[Opening]) -> None:
        """Of a batch: a list with one for each conversation."""
        steps = [
            None if one.prompt_logprobs is None else logprobs.for_prompt(one.prompt_logprobs)
            for one in openings
        ]
        ids = [list(one.prompt_ids) for one in openings]
        texts = [one.prompt_text for one in openings]
        is_batch = not isinstance(self._asked.source, Conversation)
        body["prompt_logprobs"] = steps if is_batch and any(steps) else steps[0]
        if self._asked.token_ids:
            body["prompt_token_ids"] = ids if is_batch else ids[0]
        if self._asked.prompt_text:
            body["prompt_text"] = texts if is_batch else texts[0]

    def _choice(self, one: Choice) -> dict[str, Any]:
        voice = self._voices[one.index // self._n]
        content = voice.echo + one.text
        message: dict[str, Any] = {
            "role": voice.role,
            "content": content or (None if one.tool_calls or one.reasoning else ""),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": one.reasoning or None,
            "reasoning_content": one.reasoning or None,
        }
        if one.tool_calls:
            message["tool_calls"] = [_call(call) for call in one.tool_calls]
        choice = {
            "index": one.index,
            "message": message,
            "logprobs": self._logprobs(one.token_ids, one.logprobs),
            "finish_reason": self._reason(one.reason),
            "stop_reason": one.stop_reason,
        }
        if one.notes:
            choice["x_notes"] = list(one.notes)
        if self._asked.token_ids:
            choice["token_ids"] = list(one.token_ids)
        return choice

    def _reason(self, reason: str) -> str:
        """As this dialect has it: a call that was asked for by its name is no news."""
        return "stop" if reason == "tool_calls" and self._names_one else reason

    def _logprobs(self, ids: Any, steps: SampleLogprobs | None) -> dict[str, Any] | None:
        if steps is None:
            return None
        most = self._asked.sampling.get("logprobs")
        return logprobs.for_chat(ids, steps, -1 if most is None else most, self._shown)

    # -- chunks ---------------------------------------------------------------------------------

    def begin(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        return error_event(error)

    def write(self, events: list[Event]) -> bytes:
        """The chunks of a turn."""
        if len(events) == 1 and self._is_plain:
            only = events[0]
            if type(only) is Delta and only.index in self._begun and _is_text(only):
                head, tail = self._begun[only.index]
                return head + encode(only.text) + tail
        return b"".join(self._chunks(events))

    def _chunks(self, events: list[Event]) -> list[bytes]:
        made: list[bytes] = []
        for one, finish in paired(events):
            if isinstance(one, Delta):
                made.append(self._delta(one, finish))
            elif isinstance(one, Finish):
                made.append(self._delta(Delta(one.index), one))
            elif isinstance(one, Opening):
                self._openings[one.place] = one
            else:
                made.append(self._closing(one))
        return made

    def _delta(self, one: Delta, finish: Finish | None) -> bytes:
        """What is new. Its text may be empty: a character or a stop string may not be whole yet."""
        first = b"" if one.index in self._begun else self._first(one.index)
        shown = self._logprobs(one.token_ids, one.logprobs)
        chunk = self._chunk(one.index, _news(one), shown, finish)
        if self._asked.token_ids:
            chunk["choices"][0]["token_ids"] = list(one.token_ids)
        return first + event(chunk)

    def _first(self, index: int) -> bytes:
        """The chunk that says who speaks."""
        bare = {"index": index, "delta": {"content": MARK}, "logprobs": None, "finish_reason": None}
        self._begun[index] = self._head.cut(bare, MARK)
        place = index // self._n
        voice, opening = self._voices[place], self._openings[place]
        chunk = self._chunk(index, {"role": voice.role, "content": voice.echo}, None, None)
        if self._asked.token_ids:
            chunk["prompt_token_ids"] = list(opening.prompt_ids)
        if self._asked.prompt_text:
            chunk["prompt_text"] = opening.prompt_text
        return event(chunk)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        shown: dict[str, Any] | None,
        finish: Finish | None,
    ) -> dict[str, Any]:
        reason = None if finish is None else self._reason(finish.reason)
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}
        chunk = self._head.body([choice])
        if finish is not None:
            choice["stop_reason"] = finish.stop_reason
            if finish.notes:
                choice["x_notes"] = list(finish.notes)
            chunk["system_fingerprint"] = self._head.fingerprint
        if self._asked.continuous_usage:
            chunk["usage"] = self._usage.shown(details=self._details)
        return chunk

    def _closing(self, one: Closing) -> bytes:
        chunk = closing_chunk(self._head, one, usage=self._ends_with_usage, details=self._details)
        return b"" if chunk is None else event(chunk)


def _is_text(delta: Delta) -> bool:
    return delta.logprobs is None and not delta.reasoning and delta.tool_call is None


def _news(one: Delta) -> dict[str, Any]:
    """The delta of a chunk. Keys without news are left out: clients look whether they are there."""
    news: dict[str, Any] = {}
    if one.reasoning:
        news["reasoning"] = news["reasoning_content"] = one.reasoning
    if one.tool_call is not None:
        news["tool_calls"] = [_piece(one.tool_call)]
    if one.text or not news:
        news["content"] = one.text
    return news


def _piece(call: ToolCall) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.name is not None:
        function["name"] = call.name
    shown: dict[str, Any] = {"index": call.place, "function": function}
    if call.id is not None:
        shown.update(id=call.id, type="function")
    return shown


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class _Voice:
    """Who speaks in the answer to a conversation, and what is repeated of its last message."""

    def __init__(self, to: Services, one: Conversation, *, echo: bool) -> None:
        last = one.messages[-1] if one.messages else {}
        goes_on = not one.add_generation_prompt and isinstance(last.get("role"), str)
        self.role: str = last["role"] if goes_on else to.options.response_role
        self.echo = _text_of(last) if echo and last.get("role") == self.role else ""


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(
        p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)
    )
