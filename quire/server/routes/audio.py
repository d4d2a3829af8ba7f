"""Speech: POST /v1/audio/transcriptions and /v1/audio/translations, of models that transcribe."""

from __future__ import annotations

from contextlib import ExitStack

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.server.app_state import get_app_state
from quire.server.errors import BodyTooLarge
from quire.server.formats import ignored_fields
from quire.server.formats.body_reader import read_bytes
from quire.server.formats.multipart import parse_form
from quire.server.formats.sse import EventStreamResponse, build_json_response
from quire.server.formats.transcription_formatter import (
    TranscriptFormatter,
    TranscriptStreamFormatter,
)
from quire.server.formats.transcription_request import TranscriptionForm
from quire.server.generation.transcribe import Transcriber, require_speech
from quire.text.speech import Task

router = APIRouter()

MAX_FILE_BYTES = 25 << 20
"""Of the audio file."""
MAX_FIELD_BYTES = 1 << 20
"""Of the rest of the form."""

_SCHEMA = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        **TranscriptionForm.model_json_schema()["properties"],
    },
}
_OPENAPI = {
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _SCHEMA}}}
}


@router.post("/v1/audio/transcriptions", tags=["speech"], openapi_extra=_OPENAPI)
async def transcribe(http: Request) -> Response:
    """The text of a recording, in its language."""
    return await _answer(http, "transcribe")


@router.post("/v1/audio/translations", tags=["speech"], openapi_extra=_OPENAPI)
async def translate(http: Request) -> Response:
    """The text of a recording, in English."""
    return await _answer(http, "translate")


async def _answer(http: Request, task: Task) -> Response:
    state = get_app_state(http)
    _, tokens = require_speech(state)
    limit = min(MAX_FILE_BYTES + MAX_FIELD_BYTES, state.options.max_body_bytes)
    body = await read_bytes(http, limit)
    form, file = TranscriptionForm.from_parts(
        parse_form(http.headers.get("content-type", ""), body)
    )
    if len(file) > MAX_FILE_BYTES:
        raise BodyTooLarge(f"the audio file must have at most {MAX_FILE_BYTES} bytes")
    transcriber = Transcriber(state, http, form, task)
    del body
    with ExitStack() as held:
        recording = await transcriber.read(file, held.enter_context(transcriber.hold_memory()))
        if form.stream:
            stream = await transcriber.stream(recording)
            return EventStreamResponse(
                stream,
                TranscriptStreamFormatter(state, stream, task, recording.seconds),
                keep_alive_s=state.options.sse_keep_alive_interval,
                on_end=held.pop_all().close,
            )
        made = await transcriber.transcribe(recording)
    formatter = TranscriptFormatter(made, tokens, state.require_tokenizer().decode)
    headers = ignored_fields.ignored_headers(form.ignored_fields())
    if form.response_format == "text":
        return PlainTextResponse(formatter.text + "\n", headers=headers)
    if form.response_format in ("srt", "vtt"):
        kind = "text/vtt" if form.response_format == "vtt" else "application/x-subrip"
        text = formatter.subtitles(form.response_format, words=form.words)
        return Response(text, media_type=kind, headers=headers)
    whole = formatter.format_json()
    if form.response_format == "verbose_json":
        whole = formatter.format_verbose(task, form.timestamp_granularities)
    return build_json_response(whole, headers)
