"""POST /v1/completions: prompts go on as plain text. Choice index = prompt's place x n + sample."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from quire.server.body import read
from quire.server.generation import Generation, begin
from quire.server.prepare import prepare_completion
from quire.server.protocol import logprobs
from quire.server.protocol.completions import CompletionBody
from quire.server.protocol.shape import Shape, Usage, usage_of
from quire.server.services import Services, services
from quire.server.sse import EventStream, answer, event
from quire.text.inputs import Prepared

router = APIRouter()


@router.post("/v1/completions", tags=["completions"])
async def create_completion(http: Request) -> Response:
    """Go on with one or more prompts."""
    to = services(http)
    body = await read(http, CompletionBody, to.options.max_body_bytes)
    body.check()
    to.check_model(body.model)
    public_id = to.public_id("cmpl", http, body.request_id)
    prepared = await prepare_completion(to, body, public_id)
    generation = await begin(to.engine, prepared, to.tokenizer)
    completion = _Completion(to, body, public_id, prepared)
    if body.stream:
        return EventStream(completion.events(generation), generation.close)
    return await answer(http, generation, completion.whole)


class _Completion:
    """Outputs -> the answer to one body, whole or in chunks."""

    def __init__(
        self, to: Services, body: CompletionBody, public_id: str, prepared: Sequence[Prepared]
    ) -> None:
        self._to = to
        self._body = body
        self._n = body.n or 1
        self._only_prompt = body.max_tokens == 0
        self._shape = Shape(public_id, "text_completion", to.names[0])
        self._usage = Usage(to.options.enable_prompt_tokens_details)
        self._as_ids = bool(
            body.return_tokens_as_token_ids or to.options.return_tokens_as_token_ids
        )
        self._echoes = [self._echo_of(p) if body.echo else "" for p in prepared]
        self._prompt_steps: dict[int, PromptLogprobs] = {}  # by place; only the first news has them
        self._begun: dict[int, logprobs.ForCompletion] = {}  # by index of the choice

    def _echo_of(self, prepared: Prepared) -> str:
        if prepared.prompt_text is not None:
            return prepared.prompt_text
        return self._to.text().decode(list(prepared.request.prompt))

    def whole(self, results: list[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            self._choice(place, result, one)
            for place, result in enumerate(results)
            for one in result.outputs
        ]
        usage = usage_of(results, details=self._usage.details)
        if self._only_prompt:
            usage.completion = 0
        body = self._shape.body(choices)
        body["service_tier"] = None
        body["system_fingerprint"] = None
        body["usage"] = usage.shown()
        return body

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The chunks, as events."""
        prompts: set[int] = set()
        async for news in generation:
            chunks: list[bytes] = []
            for place, output in news:
                if place not in prompts:
                    prompts.add(place)
                    self._usage.prompt += len(output.prompt_token_ids or ())
                    self._usage.cached += output.num_cached_tokens or 0
                for one in output.outputs:
                    chunks.append(self._delta(place, output, one))
            yield b"".join(chunks)
        if self._body.include_usage and not generation.closed:
            yield event({**self._shape.body([]), "usage": self._usage.shown()})

    def _delta(self, place: int, output: RequestOutput, one: CompletionOutput) -> bytes:
        """What is new. Its text may be empty: a character or a stop string may not be whole yet."""
        if not self._only_prompt:
            self._usage.completion += len(one.token_ids)
        chunk = self._shape.body([self._choice(place, output, one)])
        if self._body.continuous_usage:
            chunk["usage"] = self._usage.shown()
        return event(chunk)

    def _choice(self, place: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        """The whole of a choice, or what is new of it; its first news has the echo."""
        index = place * self._n + one.index
        if output.prompt_logprobs is not None:
            self._prompt_steps.setdefault(place, output.prompt_logprobs)
        first = index not in self._begun
        if first:
            self._begun[index] = logprobs.ForCompletion(self._as_ids, self._decode)
        text = "" if self._only_prompt else one.text
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echoes[place] + text if first else text,
            "logprobs": self._logprobs(place, output if first else None, one),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.for_prompt(self._prompt_steps[place])
        if self._body.return_token_ids:
            choice["token_ids"] = [] if self._only_prompt else list(one.token_ids)
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _logprobs(
        self, place: int, prompt: RequestOutput | None, one: CompletionOutput
    ) -> dict[str, Any] | None:
        """Of the new tokens; after those of the prompt, if they are to be echoed."""
        if self._body.logprobs is None:
            return None
        ids: list[int] = []
        steps: list[logprobs.Step] = []
        if prompt is not None and self._body.echo:
            ids.extend(prompt.prompt_token_ids or ())
            steps.extend(step or None for step in self._prompt_steps[place])
        if not self._only_prompt and one.logprobs is not None:
            ids.extend(one.token_ids)
            steps.extend(one.logprobs)
        return self._begun[place * self._n + one.index].take(ids, steps) if ids else None

    def _decode(self, token_id: int) -> str:
        return self._to.text().decode([token_id])
