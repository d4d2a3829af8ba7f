"""Formats a generation as a response of /v1/responses: as events, and as the object they end in.

The order, with a sequence number on each:

    response.created  response.in_progress
    output_item.added                              of each item
        content_part.added  *.delta ...  *.done  content_part.done      message, reasoning
        function_call_arguments.delta ...  .done                        function_call
    output_item.done
    response.completed | response.incomplete | response.failed

A response that is not streamed takes the same path, so that both end in one object.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.server.errors import build_error_body
from quire.server.formats import logprobs
from quire.server.generation.events import (
    ChoiceDelta,
    ChoiceFinish,
    DeltaToolCall,
    FinalEvent,
    FullResponse,
    GenerationEvent,
    PromptEvent,
)

_encode = msgspec.json.Encoder().encode
_TEXT_DELTA_PREFIX = b"event: response.output_text.delta\ndata: "

STATUS_BY_FINISH_REASON = {"length": "incomplete", "abort": "cancelled", "repetition": "incomplete"}
"""By reason of the finish; any other is a whole answer."""


@dataclass(slots=True)
class _OutputItem:
    """The item that is being generated."""

    kind: str
    id: str
    output_index: int
    text_pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    def text(self) -> str:
        return "".join(self.text_pieces)

    def content_part(self, *, whole: bool) -> dict[str, Any]:
        """Its content part, empty or whole."""
        text = self.text() if whole else ""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        as_dict = self.logprobs if whole else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": as_dict}

    def as_dict(self, status: str) -> dict[str, Any]:
        """The item, empty while in progress."""
        whole = status != "in_progress"
        body: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            body |= {"call_id": self.call_id, "name": self.name}
            return body | {"arguments": self.text() if whole else ""}
        content = [self.content_part(whole=True)] if whole else []
        if self.kind == "reasoning":
            return body | {"summary": [], "content": content, "encrypted_content": None}
        return body | {"role": "assistant", "content": content}


class ResponsesFormatter:
    """Events -> one response. The keys of `response` are settled by the route but for the result.

    top_logprobs: alternatives to show of each token; None shows no logprobs at all. done: called
    once, when a stream has been written to its end.
    """

    media_type = "text/event-stream"
    end = b""

    def __init__(
        self,
        response: dict[str, Any],
        *,
        top_logprobs: int | None = None,
        tokens: logprobs.LogprobFormatter | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        self.response = response
        self._top_logprobs = top_logprobs
        self._logprob_formatter = tokens
        self._on_done = done
        self._id_suffix = str(response["id"]).partition("_")[2]
        self._sequence_number = 0
        self._is_started = False
        self._item: _OutputItem | None = None
        self._open_tool_index: int | None = None  # the index of the running tool call
        self._finish_reason = ""
        self._pending_logprobs: list[
            dict[str, Any]
        ] = []  # logprobs of tokens whose text is held back
        self._pending_chunks: list[bytes] = []

    # -- as a stream ------------------------------------------------------------------------

    def format_start(self) -> bytes:
        """The first events, before any of the engine."""
        self.start()
        return b"".join(self.take_chunks())

    def format_events(self, batch: list[GenerationEvent]) -> bytes:
        """The events of one turn."""
        self.start()
        news = self.add_events(batch)
        self._notify_if_ended()
        return b"".join(news)

    def format_error(self, error: Exception) -> bytes:
        """The last event of a response that failed."""
        self.start()
        self.fail(error)
        self._notify_if_ended()
        return b"".join(self.take_chunks())

    def _notify_if_ended(self) -> None:
        if self.is_ended and self._on_done is not None:
            done, self._on_done = (
                self._on_done,
                None,
            )  # it refers to this formatter: break the cycle
            done()

    # -- as one object ----------------------------------------------------------------------

    def format_full(self, response: FullResponse) -> dict[str, Any]:
        """The response, once everything is known."""
        batch: list[GenerationEvent] = [*response.prompts]
        for one in response.choices:
            if one.reasoning:
                batch.append(ChoiceDelta(one.index, reasoning=one.reasoning))
            batch.append(
                ChoiceDelta(one.index, one.text, token_ids=one.token_ids, logprobs=one.logprobs)
            )
            batch += [ChoiceDelta(one.index, tool_call=call) for call in one.tool_calls]
            batch.append(ChoiceFinish(one.index, one.finish_reason, one.stop_reason))
        self.add_events([*batch, response.final])
        return self.response

    # -- one step of either -----------------------------------------------------------------

    @property
    def is_ended(self) -> bool:
        """Whether the response was completed, was cancelled, or failed."""
        return self.response["status"] not in ("queued", "in_progress")

    def start(self) -> None:
        """Say that it begins, once."""
        if not self._is_started:
            self._is_started = True
            self._emit_lifecycle("created")
            self._emit_lifecycle(str(self.response["status"]))

    def add_events(self, batch: list[GenerationEvent]) -> list[bytes]:
        """Take a turn's events in; what they are for the client."""
        for event in batch:
            if isinstance(event, ChoiceDelta):
                self._add_delta(event)
            elif isinstance(event, ChoiceFinish):
                self._set_finish_reason(event)
            elif isinstance(event, FinalEvent):
                self._complete(event)
            elif isinstance(event, PromptEvent) and self.response["status"] == "queued":
                self.response["status"] = "in_progress"
                self._emit_lifecycle("in_progress")
        return self.take_chunks()

    def take_chunks(self) -> list[bytes]:
        """Events that were made and not yet taken."""
        news, self._pending_chunks = self._pending_chunks, []
        return news

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        fields = build_error_body(error)[1]["error"]
        self._end_item("incomplete")
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": fields["message"]}
        self._emit_lifecycle("failed")

    def cancel(self) -> None:
        """End it because the client cancelled it."""
        self._end_item("incomplete")
        self.response["status"] = "cancelled"
        self._emit_lifecycle("incomplete")

    def _add_delta(self, news: ChoiceDelta) -> None:
        if news.reasoning:
            self._add_text("reasoning", news.reasoning, [])
        elif self._top_logprobs is not None:
            self._pending_logprobs += self._format_logprobs(news)
        if news.text:
            shown, self._pending_logprobs = self._pending_logprobs, []
            self._add_text("message", news.text, shown)
        if news.tool_call is not None:
            self._add_tool_call(news.tool_call)

    def _add_text(self, kind: str, text: str, shown: list[dict[str, Any]]) -> None:
        item = self._item
        if item is None or item.kind != kind:
            item = self._begin_item(kind)
        item.text_pieces.append(text)
        if kind == "reasoning":
            self._emit_item_event("reasoning_text.delta", item, content_index=0, delta=text)
            return
        item.logprobs += shown
        self._pending_chunks.append(
            _TEXT_DELTA_PREFIX + _encode(self._text_delta(item, text, shown)) + b"\n\n"
        )

    def _text_delta(
        self, item: _OutputItem, text: str, shown: list[dict[str, Any]]
    ) -> dict[str, object]:
        """The event that comes thousands of times: as _emit() makes it, in one piece."""
        number = self._sequence_number
        self._sequence_number = number + 1
        return {
            "type": "response.output_text.delta",
            "sequence_number": number,
            "item_id": item.id,
            "output_index": item.output_index,
            "content_index": 0,
            "delta": text,
            "logprobs": shown,
        }

    def _add_tool_call(self, call: DeltaToolCall) -> None:
        item = self._item
        if item is None or item.kind != "function_call" or self._open_tool_index != call.tool_index:
            self._open_tool_index = call.tool_index
            item = self._begin_item("function_call", call)
        if call.arguments:
            item.text_pieces.append(call.arguments)
            self._emit_item_event("function_call_arguments.delta", item, delta=call.arguments)

    def _begin_item(self, kind: str, call: DeltaToolCall | None = None) -> _OutputItem:
        self._end_item("completed")
        place = len(self.response["output"])
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = self._item = _OutputItem(kind, f"{prefix}_{self._id_suffix}_{place}", place)
        if call is not None:
            item.call_id = call.id or f"call_{self._id_suffix}_{place}"
            item.name = call.name or ""
        self._emit(
            "response.output_item.added", output_index=place, item=item.as_dict("in_progress")
        )
        if kind != "function_call":
            part = item.content_part(whole=False)
            self._emit_item_event("content_part.added", item, content_index=0, part=part)
        return item

    def _end_item(self, status: str) -> None:
        item, self._item = self._item, None
        if item is None:
            return
        if item.kind == "function_call":
            self._emit_item_event(
                "function_call_arguments.done", item, name=item.name, arguments=item.text()
            )
        else:
            part, fields = item.content_part(whole=True), {"text": item.text(), "content_index": 0}
            if item.kind == "message":
                self._emit_item_event("output_text.done", item, logprobs=item.logprobs, **fields)
            else:
                self._emit_item_event("reasoning_text.done", item, **fields)
            self._emit_item_event("content_part.done", item, content_index=0, part=part)
        shown = item.as_dict(status)
        self.response["output"].append(shown)
        self._emit("response.output_item.done", output_index=item.output_index, item=shown)

    def _set_finish_reason(self, end: ChoiceFinish) -> None:
        self._finish_reason = end.finish_reason
        status = STATUS_BY_FINISH_REASON.get(end.finish_reason, "completed")
        kinds = [one["type"] for one in self.response["output"]]
        kinds += [] if self._item is None else [self._item.kind]
        if set(kinds) <= {"reasoning"}:
            self._begin_item("message")  # an answer has a message, if an empty one
        if self._item is not None and self._item.kind == "message":
            self._item.logprobs += self._pending_logprobs
        self._end_item("completed" if status == "completed" else "incomplete")

    def _complete(self, closing: FinalEvent) -> None:
        status = STATUS_BY_FINISH_REASON.get(self._finish_reason, "completed")
        self.response["status"] = status
        if self._finish_reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        usage = closing.usage
        self.response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0}
            | ({} if usage.prediction is None else usage.prediction.as_dict()),
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if closing.timing is not None:
            self.response["x_timing"] = closing.timing
        self._emit_lifecycle("completed" if status == "completed" else "incomplete")

    def _format_logprobs(self, news: ChoiceDelta) -> list[dict[str, Any]]:
        if self._top_logprobs is None or self._logprob_formatter is None or news.logprobs is None:
            return []
        shown = logprobs.format_chat_logprobs(
            news.token_ids, news.logprobs, self._top_logprobs, self._logprob_formatter
        )
        found: list[dict[str, Any]] = shown["content"]
        return found

    # -- events -----------------------------------------------------------------------------

    def _emit_lifecycle(self, what: str) -> None:
        self._emit(f"response.{what}", response=self.response)

    def _emit_item_event(self, what: str, item: _OutputItem, **fields: object) -> None:
        self._emit(f"response.{what}", item_id=item.id, output_index=item.output_index, **fields)

    def _emit(self, kind: str, **fields: object) -> None:
        body = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        self._pending_chunks.append(
            b"event: " + kind.encode() + b"\ndata: " + _encode(body) + b"\n\n"
        )


def build_response_body(
    *, id: str, model: str, stored: bool, asked: Mapping[str, Any], used: Mapping[str, Any]
) -> dict[str, Any]:
    """The response before any output.

    asked: the request's body, echoed; used: values of fields that the body leaves out.
    """
    echoed = {name: asked.get(name) for name in _ECHOED_NAMES}
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if asked.get("background") else "in_progress",
        "background": bool(asked.get("background")),
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **echoed,
        "metadata": asked.get("metadata") or {},
        "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
        "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
        "service_tier": "default",
        "store": stored,
        "text": asked.get("text") or {"format": {"type": "text"}},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "top_logprobs": asked.get("top_logprobs") or 0,
        "truncation": asked.get("truncation") or "disabled",
        **used,
    }


_ECHOED_NAMES = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
ECHOED_FIELDS = frozenset(
    {
        *_ECHOED_NAMES,
        *("background", "metadata", "parallel_tool_calls", "reasoning", "text", "tool_choice"),
        *("tools", "top_logprobs", "truncation"),
    }
)
"""Fields of the request that its response shows. The input, which may be long, is none of them."""
