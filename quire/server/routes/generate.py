"""POST /generate: the simple route of older servers, which scripts still use.

    {"prompt": ..., "stream": false, fields of SamplingParams}  ->  {"text": [prompt + answer, ...]}

Streamed, each line is such an object with the text so far; an error is a line as well.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.server.app_state import get_app_state
from quire.server.errors import build_error_body
from quire.server.formats.body_reader import read_body
from quire.server.formats.sampling_fields import SamplingFields
from quire.server.formats.sse import build_response
from quire.server.generation.events import ChoiceDelta, FullResponse, GenerationEvent
from quire.server.generation.generation_request import GenerationRequest, RawPrompts
from quire.server.generation.generation_stream import start_generation

router = APIRouter()

_REFUSED_FIELDS = (
    *("logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids"),
    *("return_prompt_text", "stream_options", "x_timing"),
)
"""What the answer of this route has no place for."""


class GenerateRequest(SamplingFields):
    """A prompt, and how to continue it."""

    prompt: str
    logprobs: int | None = None

    def to_generation_request(self) -> GenerationRequest:
        self.refuse_unsupported_features()
        for name in _REFUSED_FIELDS:
            given = getattr(self, name)
            if not (given is None or given is False or given == []):  # 0 has a meaning
                message = f"{name}: /generate answers with text only; /v1/completions shows more"
                raise RequestError(message, param=name)
        special = self.add_special_tokens is not False
        return GenerationRequest(
            source=RawPrompts(prompts=[self.prompt], add_special_tokens=special),
            sampling=self.sampling_values(),
            max_tokens=16,
            **self.generation_request_fields(),
        )


BODIES = {"/generate": (GenerateRequest,)}


@router.post("/generate", tags=["older servers"])
async def generate(http: Request) -> Response:
    """Continue a prompt; each text begins with it."""
    state = get_app_state(http)
    body = await read_body(http, GenerateRequest, state.options.max_body_bytes)
    request = body.to_generation_request()
    events = await start_generation(state, request, http, "gen-")
    formatter = _GenerateFormatter(body.prompt, request.n)
    return await build_response(events, formatter)


class _GenerateFormatter:
    """Events -> texts so far, a line each time."""

    media_type = "application/x-ndjson"
    end = b""

    def __init__(self, prompt: str, n: int) -> None:
        self._prompt = prompt
        self._texts = [prompt] * n

    def format_start(self) -> bytes:
        return b""

    def format_events(self, batch: list[GenerationEvent]) -> bytes:
        """All texts, if there is more of one."""
        news = False
        for event in batch:
            if isinstance(event, ChoiceDelta) and event.text:
                self._texts[event.index] += event.text
                news = True
        return _encode_line({"text": self._texts}) if news else b""

    def format_error(self, error: Exception) -> bytes:
        return _encode_line(build_error_body(error)[1])

    def format_full(self, response: FullResponse) -> dict[str, Any]:
        """The texts."""
        return {"text": [self._prompt + one.text for one in response.choices]}


def _encode_line(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode() + b"\n"
