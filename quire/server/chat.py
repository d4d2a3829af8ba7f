"""POST /v1/chat/completions: HTTP in, events out. No model, scheduler or torch in sight."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.outputs import CompletionOutput, RequestOutput
from quire.server.body import read
from quire.server.generation import Generation, begin
from quire.server.prepare import prepare_chat
from quire.server.protocol import logprobs
from quire.server.protocol.chat import ChatBody
from quire.server.protocol.shape import Shape, Usage, usage_of
from quire.server.services import Services, services
from quire.server.sse import EventStream, answer, event

router = APIRouter()


@router.post("/v1/chat/completions", tags=["chat"])
async def create_chat_completion(http: Request) -> Response:
    """Go on with a conversation."""
    to = services(http)
    body = await read(http, ChatBody, to.options.max_body_bytes)
    body.check()
    to.check_model(body.model)
    public_id = to.public_id("chatcmpl", http, body.request_id)
    prepared = await prepare_chat(to, body, public_id)
    generation = await begin(to.engine, prepared, to.tokenizer)
    chat = _Chat(to, body, public_id)
    if body.stream:
        return EventStream(chat.events(generation), generation.close)
    return await answer(http, generation, chat.completion)


class _Chat:
    """Outputs -> the answer to one body, whole or in chunks."""

    def __init__(self, to: Services, body: ChatBody, public_id: str) -> None:
        self._body = body
        name = "chat.completion.chunk" if body.stream else "chat.completion"
        self._shape = Shape(public_id, name, to.names[0])
        self._usage = Usage(to.options.enable_prompt_tokens_details)
        self._as_ids = bool(
            body.return_tokens_as_token_ids or to.options.return_tokens_as_token_ids
        )
        last = body.messages[-1] if body.messages else {}
        goes_on = not body.add_generation_prompt and isinstance(last.get("role"), str)
        self._role = last["role"] if goes_on else to.options.response_role
        self._echo = _text_of(last) if body.echo and last.get("role") == self._role else ""

    def completion(self, results: list[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""
        result = results[0]
        body = self._shape.body([self._choice(one) for one in result.outputs])
        body["service_tier"] = None
        body["system_fingerprint"] = None
        body["usage"] = usage_of(results, details=self._usage.details).shown()
        steps = result.prompt_logprobs
        body["prompt_logprobs"] = None if steps is None else logprobs.for_prompt(steps)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = result.prompt_token_ids
        return body

    def _choice(self, one: CompletionOutput) -> dict[str, Any]:
        choice = {
            "index": one.index,
            "message": {
                "role": self._role,
                "content": self._echo + one.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": self._logprobs(one),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(one.token_ids)
        return choice

    def _logprobs(self, one: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs or one.logprobs is None:
            return None
        most = self._body.top_logprobs or 0
        return logprobs.for_chat(one.token_ids, one.logprobs, most, self._as_ids)

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The chunks, as events."""
        begun: set[int] = set()
        async for news in generation:
            chunks: list[bytes] = []
            for _, output in news:
                for one in output.outputs:
                    if one.index not in begun:
                        chunks.append(self._first(one.index, output, new=not begun))
                        begun.add(one.index)
                    chunks.append(self._delta(one))
            yield b"".join(chunks)
        if self._body.include_usage and not generation.closed:
            yield event({**self._shape.body([]), "usage": self._usage.shown()})

    def _first(self, index: int, output: RequestOutput, *, new: bool) -> bytes:
        if new:
            self._usage.prompt = len(output.prompt_token_ids or ())
            self._usage.cached = output.num_cached_tokens or 0
        delta = {"role": self._role, "content": self._echo}
        chunk = self._chunk(index, delta, None, None)
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        return event(chunk)

    def _delta(self, one: CompletionOutput) -> bytes:
        """What is new. Its text may be empty: a character or a stop string may not be whole yet."""
        self._usage.completion += len(one.token_ids)
        delta, shown = {"content": one.text}, self._logprobs(one)
        chunk = self._chunk(one.index, delta, shown, one.finish_reason)
        choice = chunk["choices"][0]
        if one.finish_reason is not None:
            choice["stop_reason"] = one.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = list(one.token_ids)
        return event(chunk)

    def _chunk(
        self, index: int, delta: dict[str, Any], shown: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        chunk = self._shape.body(
            [{"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish}]
        )
        if self._body.continuous_usage:
            chunk["usage"] = self._usage.shown()
        return chunk


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(
        p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)
    )
