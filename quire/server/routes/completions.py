"""POST /v1/completions: continues prompts as text. Choice index = prompt index x n + sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.app_state import AppState, get_app_state
from quire.server.formats import logprobs
from quire.server.formats.body_reader import read_body
from quire.server.formats.completion_request import CompletionRequest
from quire.server.formats.openai_formatter import TEXT_PLACEHOLDER, OpenAIFormatter
from quire.server.formats.sse import build_response, encode_sse
from quire.server.generation.events import (
    ChoiceDelta,
    ChoiceFinish,
    FullResponse,
    PromptEvent,
)
from quire.server.generation.generation_stream import GenerationStream, start_generation
from quire.server.telemetry.load_header import build_load_header

router = APIRouter()
BODIES = {"/v1/completions": (CompletionRequest,)}
NULL_FIELDS = {"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None}
"""Of a choice that is not streamed, where they were not requested."""


@router.post("/v1/completions", tags=["completions"])
async def create_completion(http: Request) -> Response:
    """Continue one or more prompts."""
    state = get_app_state(http)
    body = await read_body(http, CompletionRequest, state.options.max_body_bytes)
    load = await build_load_header(http)
    events = await start_generation(state, body.to_generation_request(), http, "cmpl-")
    formatter = CompletionFormatter(state, events)
    return await build_response(
        events, formatter, headers=load, keep_alive_s=state.options.sse_keep_alive_interval
    )


class CompletionFormatter(OpenAIFormatter):
    """Events -> the answer in OpenAI's completions form, whole or in chunks."""

    def __init__(self, state: AppState, events: GenerationStream) -> None:
        super().__init__(state, events, "text_completion")
        request = events.request
        self._app_state = state
        self._shows_tokens_as_ids = (
            request.tokens_as_ids or state.options.return_tokens_as_token_ids
        )
        self._has_logprobs = bool(
            request.sampling.get("logprobs") is not None
            or request.sampling.get("logprob_token_ids")
        )
        self._shows_prompt_logprobs = not request.streams_prompt_logprobs
        self._logprob_formatters: dict[int, logprobs.CompletionLogprobFormatter] = {}

    # -- whole ----------------------------------------------------------------------------------

    def format_full(self, whole: FullResponse) -> dict[str, Any]:
        """The whole answer."""
        self._prompts = {one.prompt_index: one for one in whole.prompts}
        choices = []
        for one in whole.choices:
            delta = ChoiceDelta(one.index, one.text, one.token_ids, one.logprobs)
            finish = ChoiceFinish(one.index, one.finish_reason, one.stop_reason)
            choices.append({**NULL_FIELDS, **self._format_choice(delta, finish)})
        return self._build_full(choices, whole)

    # -- chunks ---------------------------------------------------------------------------------

    def _format_delta(self, one: ChoiceDelta, finish: ChoiceFinish | None) -> bytes:
        return encode_sse(self._build_chunk(self._format_choice(one, finish), finish))

    def _format_choice(self, one: ChoiceDelta, finish: ChoiceFinish | None) -> dict[str, Any]:
        """The whole of a choice, or what is new of it; its first news has the echo."""
        opening = self._prompts[one.index // self._n]
        first = one.index not in self._logprob_formatters
        if first:
            self._start_choice(one.index)
        echo = self._echo_text(opening) if first and self._request.echo else ""
        choice: dict[str, Any] = {
            "index": one.index,
            "text": echo + one.text,
            "logprobs": self._format_logprobs(one, opening if first else None),
            "finish_reason": None if finish is None else finish.finish_reason,
            "stop_reason": None if finish is None else finish.stop_reason,
        }
        if self._shows_prompt_logprobs and opening.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.format_prompt_logprobs(opening.prompt_logprobs)
        if self._request.token_ids:
            choice["token_ids"] = list(one.token_ids)
            if first:
                choice["prompt_token_ids"] = list(opening.prompt_ids)
        if self._request.prompt_text and first:
            choice["prompt_text"] = opening.prompt_text or self._decode(opening.prompt_ids)
        return choice

    def _start_choice(self, index: int) -> None:
        state = self._app_state  # and not self: that would be a cycle
        self._logprob_formatters[index] = logprobs.CompletionLogprobFormatter(
            self._shows_tokens_as_ids, lambda one: state.require_tokenizer().decode([one])
        )
        bare = {
            "index": index,
            "text": TEXT_PLACEHOLDER,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._request.stream:
            self._text_chunks[index] = self._envelope.split_at(bare, TEXT_PLACEHOLDER)

    def _echo_text(self, opening: PromptEvent) -> str:
        text = opening.prompt_text
        return self._decode(opening.prompt_ids) if text is None else text

    def _format_logprobs(
        self, one: ChoiceDelta, prompt: PromptEvent | None
    ) -> dict[str, Any] | None:
        """Logprobs of the new tokens, after those of the prompt if it is echoed."""
        if not self._has_logprobs:
            return None
        ids: list[int] = []
        steps: list[logprobs.TokenCandidates] = []
        if prompt is not None and self._request.echo and prompt.prompt_logprobs is not None:
            ids.extend(prompt.prompt_ids)
            steps.extend(step or None for step in prompt.prompt_logprobs)
        if one.logprobs is not None:
            ids.extend(one.token_ids)
            steps.extend(one.logprobs)
        return self._logprob_formatters[one.index].format_next(ids, steps) if ids else None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._app_state.require_tokenizer().decode(list(ids))
