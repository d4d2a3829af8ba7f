"""What a generation says, as a message of /v1/messages: its events, or the whole of it.

    message_start
        content_block_start  content_block_delta ...  content_block_stop     of each block
    message_delta  message_stop

Blocks are thinking, text and tool_use, in the order in which they are said. An answer has at least
one block, if an empty one: clients read `content[0]`.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from quire.server.errors import CLIENT_GONE, error_body, message_error
from quire.server.events import Closing, Delta, Event, Finish, Opening, ToolCall, Whole

_encode = msgspec.json.Encoder().encode


class MessageShape:
    """Events -> one message."""

    media_type = "text/event-stream"
    end = b""

    def __init__(self, id: str, model: str) -> None:
        self._message: dict[str, Any] = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }
        self._base = id.partition("_")[2]
        self._cached = 0
        self._kind: str | None = None  # of the open block
        self._call: int | None = None  # its place among the tool calls
        self._place = -1
        self._finish: Finish | None = None
        self._news: list[bytes] = []

    # -- as a stream ------------------------------------------------------------------------

    def begin(self) -> bytes:
        """Nothing can be said before the prompt was looked up in the cache."""
        return b""

    def write(self, batch: list[Event]) -> bytes:
        """The events of one turn."""
        for event in batch:
            if isinstance(event, Delta):
                self._delta(event)
            elif isinstance(event, Opening):
                self._start(event)
            elif isinstance(event, Finish):
                self._finish = event
            else:
                self._stop(event)
        news, self._news = self._news, []
        return b"".join(news)

    def error(self, error: Exception) -> bytes:
        """The last event of a message that failed."""
        status, body = error_body(error)
        self._news = []
        self._emit("error", message_error(status, body["error"]["message"]))
        return b"".join(self._news)

    # -- as one object ----------------------------------------------------------------------

    def whole(self, said: Whole) -> dict[str, Any]:
        """The message. Raises HTTPException if it was aborted: there is no word for it."""
        choice = said.choices[0]
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.text or not (choice.tool_calls or content):
            content.append({"type": "text", "text": choice.text, "citations": None})
        for i, call in enumerate(choice.tool_calls):
            content.append(self._tool_use(call, i) | {"input": _object(call.arguments)})
        usage = said.closing.usage
        message = self._message | self._end(choice.reason, choice.stop_reason)
        message["content"] = content
        message["usage"] = _usage(usage.prompt, usage.cached, usage.completion)
        if said.closing.timing is not None:
            message["x_timing"] = said.closing.timing
        return message

    # -- pieces -----------------------------------------------------------------------------

    def _start(self, opening: Opening) -> None:
        self._cached = opening.cached
        usage = _usage(len(opening.prompt_ids), opening.cached, 0)
        message = self._message | {"usage": usage}
        self._emit("message_start", {"type": "message_start", "message": message})

    def _delta(self, news: Delta) -> None:
        if news.reasoning:
            self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._say({"type": "thinking_delta", "thinking": news.reasoning})
        if news.text:
            self._open("text", {"type": "text", "text": "", "citations": None})
            self._say({"type": "text_delta", "text": news.text})
        if news.tool_call is not None:
            self._tool_call(news.tool_call)

    def _tool_call(self, call: ToolCall) -> None:
        if self._kind != "tool_use" or self._call != call.place:
            self._close()
            self._call = call.place
            self._open("tool_use", self._tool_use(call, call.place))
        if call.arguments:
            self._say({"type": "input_json_delta", "partial_json": call.arguments})

    def _tool_use(self, call: ToolCall, place: int) -> dict[str, Any]:
        made = call.id or f"toolu_{self._base}_{place}"
        return {"type": "tool_use", "id": made, "name": call.name or "", "input": {}}

    def _open(self, kind: str, block: dict[str, Any]) -> None:
        if self._kind == kind:
            return
        self._close()
        self._kind = kind
        self._place += 1
        body = {"type": "content_block_start", "index": self._place, "content_block": block}
        self._emit("content_block_start", body)

    def _say(self, delta: dict[str, Any]) -> None:
        body = {"type": "content_block_delta", "index": self._place, "delta": delta}
        self._emit("content_block_delta", body)

    def _close(self) -> None:
        if self._kind is not None:
            self._kind = None
            body = {"type": "content_block_stop", "index": self._place}
            self._emit("content_block_stop", body)

    def _stop(self, closing: Closing) -> None:
        finish = self._finish
        assert finish is not None, "a choice ends before its response does"
        if self._place < 0:
            self._open("text", {"type": "text", "text": "", "citations": None})
        self._close()
        usage = closing.usage
        body = {
            "type": "message_delta",
            "delta": self._end(finish.reason, finish.stop_reason),
            "usage": _usage(usage.prompt, usage.cached, usage.completion),
        }
        if closing.timing is not None:
            body["x_timing"] = closing.timing
        self._emit("message_delta", body)
        self._emit("message_stop", {"type": "message_stop"})

    def _end(self, reason: str, stop: int | str | None) -> dict[str, Any]:
        """How it ended, in this dialect's words."""
        if reason == "abort":  # a status that official clients do not try again
            raise HTTPException(CLIENT_GONE, "the request was aborted")
        sequence = stop if isinstance(stop, str) else None
        said = _REASONS.get(reason, "end_turn") if sequence is None else "stop_sequence"
        return {"stop_reason": said, "stop_sequence": sequence}

    def _emit(self, kind: str, body: dict[str, Any]) -> None:
        self._news.append(b"event: " + kind.encode() + b"\ndata: " + _encode(body) + b"\n\n")


_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def _usage(prompt: int, cached: int, completion: int) -> dict[str, int]:
    """Cached tokens are counted apart. Nobody asked to have any cached, so none were "created"."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def _object(arguments: str) -> dict[str, Any]:
    """What a model wrote as arguments; {} if it is no object."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
