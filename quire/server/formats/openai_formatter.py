"""What the answers of chat and of completions share: common fields, usage, chunks of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from quire.server.app_state import AppState
from quire.server.formats.openai_envelope import (
    ResponseEnvelope,
    add_final_fields,
    build_final_chunk,
    encode,
    usage_in_stream,
)
from quire.server.formats.sse import DONE, encode_sse, encode_sse_error
from quire.server.generation.events import (
    ChoiceDelta,
    ChoiceFinish,
    FinalEvent,
    FullResponse,
    GenerationEvent,
    PromptEvent,
    pair_with_finish,
)
from quire.server.generation.generation_stream import GenerationStream

TEXT_PLACEHOLDER = "\x00text\x00"
"""In place of the text, where a chunk is encoded once for all texts."""


class OpenAIFormatter(ABC):
    """Events -> an answer in a form of OpenAI's API. kind: the name of its objects."""

    media_type = "text/event-stream"
    end = DONE

    def __init__(self, state: AppState, events: GenerationStream, kind: str) -> None:
        request = self._request = events.request
        self._n = request.n
        self._envelope = ResponseEnvelope(events.id, kind, events.model_name, state.fingerprint())
        self._usage = events.usage
        self._shows_prompt_details = state.options.enable_prompt_tokens_details
        self._ends_with_usage, self._has_usage_in_chunks = usage_in_stream(request, state.options)
        # Chunks that differ by their text alone are not made anew each time
        self._is_text_only = not (self._has_usage_in_chunks or request.token_ids)
        self._text_chunks: dict[int, tuple[bytes, bytes]] = {}
        self._prompts: dict[int, PromptEvent] = {}

    @abstractmethod
    def _format_delta(self, one: ChoiceDelta, finish: ChoiceFinish | None) -> bytes:
        """Format the new part. Its text is empty while a character or stop string is incomplete."""

    def _build_full(self, choices: list[dict[str, Any]], whole: FullResponse) -> dict[str, Any]:
        body = self._envelope.build_body(choices)
        body["service_tier"] = None
        body["system_fingerprint"] = self._envelope.fingerprint
        body["usage"] = whole.final.usage.as_dict(details=self._shows_prompt_details)
        add_final_fields(body, whole.final)
        return body

    def _build_chunk(self, choice: dict[str, Any], finish: ChoiceFinish | None) -> dict[str, Any]:
        chunk = self._envelope.build_body([choice])
        if finish is not None:
            chunk["system_fingerprint"] = self._envelope.fingerprint
        if self._has_usage_in_chunks:
            chunk["usage"] = self._usage.as_dict(details=self._shows_prompt_details)
        return chunk

    def format_start(self) -> bytes:
        return b""

    def format_error(self, error: Exception) -> bytes:
        return encode_sse_error(error)

    def format_events(self, events: list[GenerationEvent]) -> bytes:
        """The chunks of a turn."""
        if len(events) == 1 and self._is_text_only:
            only = events[0]
            if type(only) is ChoiceDelta and only.index in self._text_chunks and _is_text(only):
                head, tail = self._text_chunks[only.index]
                return head + encode(only.text) + tail
        return b"".join(self._format_chunks(events))

    def _format_chunks(self, events: list[GenerationEvent]) -> list[bytes]:
        made: list[bytes] = []
        for one, finish in pair_with_finish(events):
            if isinstance(one, ChoiceDelta):
                made.append(self._format_delta(one, finish))
            elif isinstance(one, ChoiceFinish):
                made.append(self._format_delta(ChoiceDelta(one.index), one))
            elif isinstance(one, PromptEvent):
                self._prompts[one.prompt_index] = one
            else:
                made.append(self._format_final(one))
        return made

    def _format_final(self, one: FinalEvent) -> bytes:
        chunk = build_final_chunk(
            self._envelope, one, usage=self._ends_with_usage, details=self._shows_prompt_details
        )
        return b"" if chunk is None else encode_sse(chunk)


def _is_text(delta: ChoiceDelta) -> bool:
    """Whether the news is text alone."""
    return delta.logprobs is None and not delta.reasoning and delta.tool_call is None
