"""POST /v1/chat/completions and its batch form: HTTP in, events out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.outputs import SampleLogprobs
from quire.server.app_state import AppState, get_app_state
from quire.server.formats import logprobs
from quire.server.formats.body_reader import read_body
from quire.server.formats.chat_request import BatchChatCompletionRequest, ChatCompletionRequest
from quire.server.formats.openai_formatter import TEXT_PLACEHOLDER, OpenAIFormatter
from quire.server.formats.sse import build_full_response, build_response, encode_sse
from quire.server.generation.events import (
    ChoiceDelta,
    ChoiceFinish,
    DeltaToolCall,
    FullChoice,
    FullResponse,
    PromptEvent,
)
from quire.server.generation.generation_request import Conversation
from quire.server.generation.generation_stream import GenerationStream, start_generation
from quire.server.telemetry.load_header import build_load_header

router = APIRouter()
BODIES = {
    "/v1/chat/completions": (ChatCompletionRequest,),
    "/v1/chat/completions/batch": (BatchChatCompletionRequest,),
}


@router.post("/v1/chat/completions", tags=["chat"])
async def create_chat_completion(http: Request) -> Response:
    """Continue a conversation."""
    state = get_app_state(http)
    body = await read_body(http, ChatCompletionRequest, state.options.max_body_bytes)
    load = await build_load_header(http)
    events = await start_generation(state, body.to_generation_request(), http, "chatcmpl-")
    formatter = ChatFormatter(state, events)
    return await build_response(
        events, formatter, headers=load, keep_alive_s=state.options.sse_keep_alive_interval
    )


@router.post("/v1/chat/completions/batch", tags=["chat"])
async def create_chat_completions(http: Request) -> Response:
    """Continue several conversations; choice = conversation x n + sample."""
    state = get_app_state(http)
    body = await read_body(http, BatchChatCompletionRequest, state.options.max_body_bytes)
    events = await start_generation(state, body.to_generation_request(), http, "chatcmpl-")
    return await build_full_response(events, ChatFormatter(state, events))


class ChatFormatter(OpenAIFormatter):
    """Events -> the answer in OpenAI's chat form, whole or in chunks."""

    def __init__(self, state: AppState, events: GenerationStream) -> None:
        request = events.request
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(state, events, kind)
        self._logprob_formatter = state.logprob_formatter(as_ids=request.tokens_as_ids)
        self._roles = [_Role(state, one, echo=request.echo) for one in request.conversations]
        self._names_function = events.plan.names_function

    # -- whole ----------------------------------------------------------------------------------

    def format_full(self, whole: FullResponse) -> dict[str, Any]:
        """The whole answer."""
        body = self._build_full([self._format_choice(one) for one in whole.choices], whole)
        self._add_prompt_fields(body, whole.prompts)
        return body

    def _add_prompt_fields(self, body: dict[str, Any], openings: list[PromptEvent]) -> None:
        """Add fields of the prompts; for a batch, a list with one for each conversation."""
        steps = [
            None
            if one.prompt_logprobs is None
            else logprobs.format_prompt_logprobs(one.prompt_logprobs)
            for one in openings
        ]
        ids = [list(one.prompt_ids) for one in openings]
        texts = [one.prompt_text for one in openings]
        is_batch = not isinstance(self._request.source, Conversation)
        body["prompt_logprobs"] = steps if is_batch and any(steps) else steps[0]
        body["prompt_token_ids"] = None
        if self._request.token_ids:
            body["prompt_token_ids"] = ids if is_batch else ids[0]
        if self._request.prompt_text:
            body["prompt_text"] = texts if is_batch else texts[0]

    def _format_choice(self, one: FullChoice) -> dict[str, Any]:
        role = self._roles[one.index // self._n]
        content = role.echo + one.text
        message: dict[str, Any] = {
            "role": role.role,
            "content": content or (None if one.tool_calls or one.reasoning else ""),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": one.reasoning or None,
            "reasoning_content": one.reasoning or None,
        }
        if one.tool_calls:
            message["tool_calls"] = [_tool_call_fields(call) for call in one.tool_calls]
        choice = {
            "index": one.index,
            "message": message,
            "logprobs": self._format_logprobs(one.token_ids, one.logprobs),
            "finish_reason": self._finish_reason(one.finish_reason),
            "stop_reason": one.stop_reason,
            "token_ids": list(one.token_ids) if self._request.token_ids else None,
        }
        if one.notes:
            choice["x_notes"] = list(one.notes)
        return choice

    def _finish_reason(self, reason: str) -> str:
        """In this API a call of the one function that was demanded is a normal stop."""
        return "stop" if reason == "tool_calls" and self._names_function else reason

    def _format_logprobs(self, ids: Any, steps: SampleLogprobs | None) -> dict[str, Any] | None:
        if steps is None:
            return None
        most = self._request.sampling.get("logprobs")
        return logprobs.format_chat_logprobs(
            ids, steps, -1 if most is None else most, self._logprob_formatter
        )

    # -- chunks ---------------------------------------------------------------------------------

    def _format_delta(self, one: ChoiceDelta, finish: ChoiceFinish | None) -> bytes:
        first = b"" if one.index in self._text_chunks else self._role_chunk(one.index)
        shown = self._format_logprobs(one.token_ids, one.logprobs)
        chunk = self._format_chunk(one.index, _delta_fields(one), shown, finish)
        if self._request.token_ids:
            chunk["choices"][0]["token_ids"] = list(one.token_ids)
        return first + encode_sse(chunk)

    def _role_chunk(self, index: int) -> bytes:
        """The chunk with the role."""
        bare = {
            "index": index,
            "delta": {"content": TEXT_PLACEHOLDER},
            "logprobs": None,
            "finish_reason": None,
        }
        self._text_chunks[index] = self._envelope.split_at(bare, TEXT_PLACEHOLDER)
        place = index // self._n
        role, opening = self._roles[place], self._prompts[place]
        chunk = self._format_chunk(index, {"role": role.role, "content": role.echo}, None, None)
        if self._has_usage_in_chunks:  # the first token comes in the next chunk
            prompt_tokens = self._usage.prompt_tokens
            chunk["usage"] |= {"completion_tokens": 0, "total_tokens": prompt_tokens}
        if self._request.token_ids:
            chunk["prompt_token_ids"] = list(opening.prompt_ids)
        if self._request.prompt_text:
            chunk["prompt_text"] = opening.prompt_text
        return encode_sse(chunk)

    def _format_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        shown: dict[str, Any] | None,
        finish: ChoiceFinish | None,
    ) -> dict[str, Any]:
        reason = None if finish is None else self._finish_reason(finish.finish_reason)
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}
        if finish is not None:
            choice["stop_reason"] = finish.stop_reason
            if finish.notes:
                choice["x_notes"] = list(finish.notes)
        return self._build_chunk(choice, finish)


def _delta_fields(one: ChoiceDelta) -> dict[str, Any]:
    """The delta of a chunk. Keys without news are left out: clients look whether they are there."""
    news: dict[str, Any] = {}
    if one.reasoning:
        news["reasoning"] = news["reasoning_content"] = one.reasoning
    if one.tool_call is not None:
        news["tool_calls"] = [_tool_call_delta_fields(one.tool_call)]
    if one.text or not news:
        news["content"] = one.text
    return news


def _tool_call_delta_fields(call: DeltaToolCall) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.name is not None:
        function["name"] = call.name
    shown: dict[str, Any] = {"index": call.tool_index, "function": function}
    if call.id is not None:
        shown.update(id=call.id, type="function")
    return shown


def _tool_call_fields(call: DeltaToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class _Role:
    """The role of the answer to a conversation, and what it repeats of the last message."""

    def __init__(self, state: AppState, one: Conversation, *, echo: bool) -> None:
        last = one.messages[-1] if one.messages else {}
        continues = not one.add_generation_prompt and isinstance(last.get("role"), str)
        self.role: str = last["role"] if continues else state.options.response_role
        self.echo = _text_of(last) if echo and last.get("role") == self.role else ""


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(
        p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)
    )
