"""Formats a generation as a message of /v1/messages: as events, or whole.

    message_start
        content_block_start  content_block_delta ...  content_block_stop     of each block
    message_delta  message_stop

Blocks are thinking, text and tool_use, in the order of generation. An answer has at least one
block, if an empty one: clients read `content[0]`.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from quire.server.errors import CLIENT_CLOSED_REQUEST, build_anthropic_error, build_error_body
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


class MessagesFormatter:
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
        self._id_suffix = id.partition("_")[2]
        self._cached_tokens = 0
        self._open_block_type: str | None = None  # of the open block
        self._open_tool_index: int | None = None  # its place among the tool calls
        self._block_index = -1
        self._finish: ChoiceFinish | None = None
        self._pending_chunks: list[bytes] = []

    # -- as a stream ------------------------------------------------------------------------

    def format_start(self) -> bytes:
        """Nothing is sent before the prompt was looked up in the cache."""
        return b""

    def format_events(self, batch: list[GenerationEvent]) -> bytes:
        """The events of one turn."""
        for event in batch:
            if isinstance(event, ChoiceDelta):
                self._add_delta(event)
            elif isinstance(event, PromptEvent):
                self._start_message(event)
            elif isinstance(event, ChoiceFinish):
                self._finish = event
            else:
                self._stop_message(event)
        news, self._pending_chunks = self._pending_chunks, []
        return b"".join(news)

    def format_error(self, error: Exception) -> bytes:
        """The last event of a message that failed."""
        status, body = build_error_body(error)
        self._pending_chunks = []
        self._emit("error", build_anthropic_error(status, body["error"]["message"]))
        return b"".join(self._pending_chunks)

    # -- as one object ----------------------------------------------------------------------

    def format_full(self, response: FullResponse) -> dict[str, Any]:
        """The message. Raises HTTPException if it was aborted: there is no stop reason for it."""
        choice = response.choices[0]
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.text or not (choice.tool_calls or content):
            content.append({"type": "text", "text": choice.text, "citations": None})
        for i, call in enumerate(choice.tool_calls):
            content.append(
                self._tool_use_block(call, i) | {"input": _parse_arguments(call.arguments)}
            )
        usage = response.final.usage
        message = self._message | self._stop_fields(choice.finish_reason, choice.stop_reason)
        message["content"] = content
        message["usage"] = _usage_fields(
            usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        )
        if response.final.timing is not None:
            message["x_timing"] = response.final.timing
        return message

    # -- pieces -----------------------------------------------------------------------------

    def _start_message(self, opening: PromptEvent) -> None:
        self._cached_tokens = opening.cached_tokens
        usage = _usage_fields(len(opening.prompt_ids), opening.cached_tokens, 0)
        message = self._message | {"usage": usage}
        self._emit("message_start", {"type": "message_start", "message": message})

    def _add_delta(self, news: ChoiceDelta) -> None:
        if news.reasoning:
            self._open_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._emit_block_delta({"type": "thinking_delta", "thinking": news.reasoning})
        if news.text:
            self._open_block("text", {"type": "text", "text": "", "citations": None})
            self._emit_block_delta({"type": "text_delta", "text": news.text})
        if news.tool_call is not None:
            self._add_tool_call(news.tool_call)

    def _add_tool_call(self, call: DeltaToolCall) -> None:
        if self._open_block_type != "tool_use" or self._open_tool_index != call.tool_index:
            self._close_block()
            self._open_tool_index = call.tool_index
            self._open_block("tool_use", self._tool_use_block(call, call.tool_index))
        if call.arguments:
            self._emit_block_delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _tool_use_block(self, call: DeltaToolCall, place: int) -> dict[str, Any]:
        made = call.id or f"toolu_{self._id_suffix}_{place}"
        return {"type": "tool_use", "id": made, "name": call.name or "", "input": {}}

    def _open_block(self, kind: str, block: dict[str, Any]) -> None:
        if self._open_block_type == kind:
            return
        self._close_block()
        self._open_block_type = kind
        self._block_index += 1
        body = {"type": "content_block_start", "index": self._block_index, "content_block": block}
        self._emit("content_block_start", body)

    def _emit_block_delta(self, delta: dict[str, Any]) -> None:
        body = {"type": "content_block_delta", "index": self._block_index, "delta": delta}
        self._emit("content_block_delta", body)

    def _close_block(self) -> None:
        if self._open_block_type is not None:
            self._open_block_type = None
            body = {"type": "content_block_stop", "index": self._block_index}
            self._emit("content_block_stop", body)

    def _stop_message(self, closing: FinalEvent) -> None:
        finish = self._finish
        assert finish is not None, "a choice ends before its response does"
        if self._block_index < 0:
            self._open_block("text", {"type": "text", "text": "", "citations": None})
        self._close_block()
        usage = closing.usage
        body = {
            "type": "message_delta",
            "delta": self._stop_fields(finish.finish_reason, finish.stop_reason),
            "usage": _usage_fields(
                usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            ),
        }
        if closing.timing is not None:
            body["x_timing"] = closing.timing
        self._emit("message_delta", body)
        self._emit("message_stop", {"type": "message_stop"})

    def _stop_fields(self, reason: str, stop: int | str | None) -> dict[str, Any]:
        """The stop reason, as this API names it."""
        if reason == "abort":  # a status that official clients do not try again
            raise HTTPException(CLIENT_CLOSED_REQUEST, "the request was aborted")
        sequence = stop if isinstance(stop, str) else None
        response = _STOP_REASONS.get(reason, "end_turn") if sequence is None else "stop_sequence"
        return {"stop_reason": response, "stop_sequence": sequence}

    def _emit(self, kind: str, body: dict[str, Any]) -> None:
        self._pending_chunks.append(
            b"event: " + kind.encode() + b"\ndata: " + _encode(body) + b"\n\n"
        )


_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def _usage_fields(prompt: int, cached: int, completion: int) -> dict[str, int]:
    """Cached tokens are counted apart. No request "creates" cache entries."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; {} if they are no object."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
