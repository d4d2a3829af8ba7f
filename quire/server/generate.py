"""POST /generate: the simple route of older servers, which scripts still ask.

    {"prompt": ..., "stream": false, fields of SamplingParams}  ->  {"text": [prompt + answer, ...]}

Streamed, each line is such an object with all that was said so far; an error is a line as well.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.server.asked import Asked, Prompts
from quire.server.body import read
from quire.server.errors import error_body
from quire.server.events import Delta, Event, Whole
from quire.server.protocol.fields import SamplingBody
from quire.server.services import services
from quire.server.sse import EventStream, answer
from quire.server.telling import begin

router = APIRouter()

_ONLY_TEXT = (
    *("logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids"),
    *("return_prompt_text", "stream_options", "x_timing"),
)
"""What the answer of this route has no place for."""


class GenerateBody(SamplingBody):
    """A prompt, and how it is to go on."""

    prompt: str
    logprobs: int | None = None

    def to_asked(self) -> Asked:
        self.refuse_later_features()
        for name in _ONLY_TEXT:
            given = getattr(self, name)
            if not (given is None or given is False or given == []):  # 0 asks for something
                message = f"{name}: /generate answers with text only; /v1/completions shows more"
                raise RequestError(message, param=name)
        special = self.add_special_tokens is not False
        return Asked(
            source=Prompts(prompts=[self.prompt], add_special_tokens=special),
            sampling=self.sampling(),
            max_tokens=16,
            **self.common(),
        )


BODIES = {"/generate": (GenerateBody,)}


@router.post("/generate", tags=["older servers"])
async def generate(http: Request) -> Response:
    """Go on with a prompt; it stands before each answer."""
    to = services(http)
    body = await read(http, GenerateBody, to.options.max_body_bytes)
    asked = body.to_asked()
    events = await begin(to, asked, http, "gen-")
    shape = _Lines(body.prompt, asked.n)
    if body.stream:
        return EventStream(events, shape)
    return await answer(events, shape)


class _Lines:
    """Events -> texts so far, a line each time."""

    media_type = "application/x-ndjson"
    end = b""

    def __init__(self, prompt: str, n: int) -> None:
        self._prompt = prompt
        self._texts = [prompt] * n

    def begin(self) -> bytes:
        return b""

    def write(self, batch: list[Event]) -> bytes:
        """All texts, if there is more of one."""
        news = False
        for event in batch:
            if isinstance(event, Delta) and event.text:
                self._texts[event.index] += event.text
                news = True
        return _line({"text": self._texts}) if news else b""

    def error(self, error: Exception) -> bytes:
        return _line(error_body(error)[1])

    def whole(self, said: Whole) -> dict[str, Any]:
        """The texts."""
        return {"text": [self._prompt + one.text for one in said.choices]}


def _line(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode() + b"\n"
