"""What a generation says, as a response of /v1/responses: its events, and the object they end in.

The order, with a sequence number on each:

    response.created  response.in_progress
    output_item.added                              of each item
        content_part.added  *.delta ...  *.done  content_part.done      message, reasoning
        function_call_arguments.delta ...  .done                        function_call
    output_item.done
    response.completed | response.incomplete | response.failed

The one idea: an unstreamed answer goes through the same hands, so that both end in one object.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.server.errors import error_body
from quire.server.events import Closing, Delta, Event, Finish, Opening, ToolCall, Whole
from quire.server.protocol import logprobs

_encode = msgspec.json.Encoder().encode
_DELTA = b"event: response.output_text.delta\ndata: "

STATUS = {"length": "incomplete", "abort": "cancelled", "repetition": "incomplete"}
"""By reason of the finish; any other is a whole answer."""


@dataclass(slots=True)
class _Item:
    """The item that is being said."""

    kind: str
    id: str
    place: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    def text(self) -> str:
        return "".join(self.pieces)

    def part(self, *, whole: bool) -> dict[str, Any]:
        """Its content part, empty or whole."""
        text = self.text() if whole else ""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        shown = self.logprobs if whole else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": shown}

    def shown(self, status: str) -> dict[str, Any]:
        """The item, empty while in progress."""
        whole = status != "in_progress"
        body: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            body |= {"call_id": self.call_id, "name": self.name}
            return body | {"arguments": self.text() if whole else ""}
        content = [self.part(whole=True)] if whole else []
        if self.kind == "reasoning":
            return body | {"summary": [], "content": content, "encrypted_content": None}
        return body | {"role": "assistant", "content": content}


class ResponseShape:
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
        tokens: logprobs.Shown | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        self.response = response
        self._top = top_logprobs
        self._tokens = tokens
        self._done = done
        self._base = str(response["id"]).partition("_")[2]
        self._number = 0
        self._begun = False
        self._item: _Item | None = None
        self._call: int | None = None  # the place of the tool call that is being said
        self._reason = ""
        self._held: list[dict[str, Any]] = []  # logprobs of tokens whose text is held back
        self._news: list[bytes] = []

    # -- as a stream ------------------------------------------------------------------------

    def begin(self) -> bytes:
        """What is said before the engine says anything."""
        self.open()
        return b"".join(self.take())

    def write(self, batch: list[Event]) -> bytes:
        """The events of one turn."""
        self.open()
        news = self.push(batch)
        self._tell_if_ended()
        return b"".join(news)

    def error(self, error: Exception) -> bytes:
        """The last event of a response that failed."""
        self.open()
        self.fail(error)
        self._tell_if_ended()
        return b"".join(self.take())

    def _tell_if_ended(self) -> None:
        if self.ended and self._done is not None:
            done, self._done = self._done, None  # whose it is has us
            done()

    # -- as one object ----------------------------------------------------------------------

    def whole(self, said: Whole) -> dict[str, Any]:
        """The response, once everything is known."""
        batch: list[Event] = [*said.openings]
        for one in said.choices:
            if one.reasoning:
                batch.append(Delta(one.index, reasoning=one.reasoning))
            batch.append(Delta(one.index, one.text, token_ids=one.token_ids, logprobs=one.logprobs))
            batch += [Delta(one.index, tool_call=call) for call in one.tool_calls]
            batch.append(Finish(one.index, one.reason, one.stop_reason))
        self.push([*batch, said.closing])
        return self.response

    # -- one step of either -----------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """It was completed, cancelled, or failed."""
        return self.response["status"] not in ("queued", "in_progress")

    def open(self) -> None:
        """Say that it begins, once."""
        if not self._begun:
            self._begun = True
            self._lifecycle("created")
            self._lifecycle(str(self.response["status"]))

    def push(self, batch: list[Event]) -> list[bytes]:
        """Take a turn's events in; what they are for the client."""
        for event in batch:
            if isinstance(event, Delta):
                self._delta(event)
            elif isinstance(event, Finish):
                self._finish(event)
            elif isinstance(event, Closing):
                self._close(event)
            elif isinstance(event, Opening) and self.response["status"] == "queued":
                self.response["status"] = "in_progress"
                self._lifecycle("in_progress")
        return self.take()

    def take(self) -> list[bytes]:
        """Events that were made and not yet taken."""
        news, self._news = self._news, []
        return news

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        said = error_body(error)[1]["error"]
        self._end_item("incomplete")
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": said["message"]}
        self._lifecycle("failed")

    def cancel(self) -> None:
        """End it because the client wants no more."""
        self._end_item("incomplete")
        self.response["status"] = "cancelled"
        self._lifecycle("incomplete")

    def _delta(self, news: Delta) -> None:
        if news.reasoning:
            self._say("reasoning", news.reasoning, [])
        elif self._top is not None:
            self._held += self._logprobs(news)
        if news.text:
            shown, self._held = self._held, []
            self._say("message", news.text, shown)
        if news.tool_call is not None:
            self._tool_call(news.tool_call)

    def _say(self, kind: str, text: str, shown: list[dict[str, Any]]) -> None:
        item = self._item
        if item is None or item.kind != kind:
            item = self._begin_item(kind)
        item.pieces.append(text)
        if kind == "reasoning":
            self._of_item("reasoning_text.delta", item, content_index=0, delta=text)
            return
        item.logprobs += shown
        self._news.append(_DELTA + _encode(self._text_delta(item, text, shown)) + b"\n\n")

    def _text_delta(self, item: _Item, text: str, shown: list[dict[str, Any]]) -> dict[str, object]:
        """The event that comes thousands of times: as _emit() makes it, in one piece."""
        number = self._number
        self._number = number + 1
        return {
            "type": "response.output_text.delta",
            "sequence_number": number,
            "item_id": item.id,
            "output_index": item.place,
            "content_index": 0,
            "delta": text,
            "logprobs": shown,
        }

    def _tool_call(self, call: ToolCall) -> None:
        item = self._item
        if item is None or item.kind != "function_call" or self._call != call.place:
            self._call = call.place
            item = self._begin_item("function_call", call)
        if call.arguments:
            item.pieces.append(call.arguments)
            self._of_item("function_call_arguments.delta", item, delta=call.arguments)

    def _begin_item(self, kind: str, call: ToolCall | None = None) -> _Item:
        self._end_item("completed")
        place = len(self.response["output"])
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = self._item = _Item(kind, f"{prefix}_{self._base}_{place}", place)
        if call is not None:
            item.call_id = call.id or f"call_{self._base}_{place}"
            item.name = call.name or ""
        self._emit("response.output_item.added", output_index=place, item=item.shown("in_progress"))
        if kind != "function_call":
            part = item.part(whole=False)
            self._of_item("content_part.added", item, content_index=0, part=part)
        return item

    def _end_item(self, status: str) -> None:
        item, self._item = self._item, None
        if item is None:
            return
        if item.kind == "function_call":
            self._of_item(
                "function_call_arguments.done", item, name=item.name, arguments=item.text()
            )
        else:
            part, said = item.part(whole=True), {"text": item.text(), "content_index": 0}
            if item.kind == "message":
                self._of_item("output_text.done", item, logprobs=item.logprobs, **said)
            else:
                self._of_item("reasoning_text.done", item, **said)
            self._of_item("content_part.done", item, content_index=0, part=part)
        shown = item.shown(status)
        self.response["output"].append(shown)
        self._emit("response.output_item.done", output_index=item.place, item=shown)

    def _finish(self, end: Finish) -> None:
        self._reason = end.reason
        status = STATUS.get(end.reason, "completed")
        kinds = [one["type"] for one in self.response["output"]]
        kinds += [] if self._item is None else [self._item.kind]
        if set(kinds) <= {"reasoning"}:
            self._begin_item("message")  # an answer has a message, if an empty one
        if self._item is not None and self._item.kind == "message":
            self._item.logprobs += self._held
        self._end_item("completed" if status == "completed" else "incomplete")

    def _close(self, closing: Closing) -> None:
        status = STATUS.get(self._reason, "completed")
        self.response["status"] = status
        if self._reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        usage = closing.usage
        self.response["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
            "total_tokens": usage.prompt + usage.completion,
        }
        if closing.timing is not None:
            self.response["x_timing"] = closing.timing
        self._lifecycle("completed" if status == "completed" else "incomplete")

    def _logprobs(self, news: Delta) -> list[dict[str, Any]]:
        if self._top is None or self._tokens is None or news.logprobs is None:
            return []
        shown = logprobs.for_chat(news.token_ids, news.logprobs, self._top, self._tokens)
        found: list[dict[str, Any]] = shown["content"]
        return found

    # -- events -----------------------------------------------------------------------------

    def _lifecycle(self, what: str) -> None:
        self._emit(f"response.{what}", response=self.response)

    def _of_item(self, what: str, item: _Item, **said: object) -> None:
        self._emit(f"response.{what}", item_id=item.id, output_index=item.place, **said)

    def _emit(self, kind: str, **said: object) -> None:
        body = {"type": kind, "sequence_number": self._number, **said}
        self._number += 1
        self._news.append(b"event: " + kind.encode() + b"\ndata: " + _encode(body) + b"\n\n")


def response_body(
    *, id: str, model: str, stored: bool, asked: Mapping[str, Any], used: Mapping[str, Any]
) -> dict[str, Any]:
    """The response before anything was said.

    asked: the request's body, told back as it came; used: what holds where it said nothing.
    """
    told = {name: asked.get(name) for name in _TOLD_BACK}
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
        **told,
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


_TOLD_BACK = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
SHOWN = frozenset(
    {
        *_TOLD_BACK,
        *("background", "metadata", "parallel_tool_calls", "reasoning", "text", "tool_choice"),
        *("tools", "top_logprobs", "truncation"),
    }
)
"""Fields of the request that its response shows. The input, which may be long, is none of them."""
