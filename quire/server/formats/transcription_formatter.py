"""Answers of the speech routes: plain, with segments, as subtitles, and as a stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.server.app_state import AppState
from quire.server.formats.openai_envelope import ResponseEnvelope
from quire.server.formats.sse import DONE, encode_sse, encode_sse_error
from quire.server.generation.events import (
    ChoiceDelta,
    ChoiceFinish,
    FinalEvent,
    GenerationEvent,
)
from quire.server.generation.generation_stream import GenerationStream
from quire.server.generation.transcribe import Transcript
from quire.text.languages import LANGUAGE_NAMES
from quire.text.speech import SpeechTokens, Task
from quire.text.transcript import Decode, Segment, segments_of, subtitles

SEEK_FRAMES_PER_SECOND = 100


def usage(seconds: float) -> dict[str, Any]:
    """What a recording counts as."""
    return {"type": "duration", "seconds": math.ceil(seconds)}


class TranscriptFormatter:
    """Writes a whole transcript."""

    def __init__(self, made: Transcript, tokens: SpeechTokens, decode: Decode) -> None:
        self._made, self._tokens, self._decode = made, tokens, decode
        self.text = "".join(decode(one.words(tokens)) for one in made.pieces).strip()

    def segments(self) -> list[Segment]:
        """All segments, in order."""
        pieces = self._made.pieces
        return [one for piece in pieces for one in segments_of(piece, self._tokens, self._decode)]

    def subtitles(self, form: str, *, words: bool = False) -> str:
        """form: "srt" or "vtt". words: each is a subtitle of its own."""
        return subtitles(self._made.words if words else self.segments(), form)

    def format_json(self) -> dict[str, Any]:
        return {"text": self.text, "usage": usage(self._made.seconds)}

    def format_verbose(self, task: Task, granularities: Sequence[str] = ()) -> dict[str, Any]:
        """granularities: "segment", which is the default, and "word"."""
        language = self._made.language or "en"
        parts: dict[str, Any] = {}
        if "word" in granularities:
            parts["words"] = [
                {"word": one.text.strip(), "start": round(one.start, 2), "end": round(one.end, 2)}
                for one in self._made.words
            ]
        if not granularities or "segment" in granularities:
            parts["segments"] = [self._segment(i, one) for i, one in enumerate(self.segments())]
        return {
            "task": task,
            "language": LANGUAGE_NAMES.get(language, language),
            "duration": round(self._made.seconds, 3),
            "text": self.text,
            **parts,
            "usage": usage(self._made.seconds),
        }

    def _segment(self, number: int, one: Segment) -> dict[str, Any]:
        piece = one.piece
        return {
            "id": number,
            "seek": round(piece.start * SEEK_FRAMES_PER_SECOND),
            "start": round(one.start, 2),
            "end": round(one.end, 2),
            "text": one.text,
            "tokens": list(one.token_ids),
            "temperature": piece.temperature,
            "avg_logprob": piece.avg_logprob,
            "compression_ratio": piece.compression_ratio(one.text),
            "no_speech_prob": piece.no_speech_prob or 0.0,
        }


class TranscriptStreamFormatter:
    """Events -> chunks in the order of the recording, whichever piece is ahead.

    Each chunk is an event of OpenAI's API (`type`) and a chunk of vLLM's (`object`) at once.
    """

    media_type = "text/event-stream"
    end = DONE

    def __init__(
        self, state: AppState, events: GenerationStream, task: Task, seconds: float
    ) -> None:
        kind = "transcription.chunk" if task == "transcribe" else "translation.chunk"
        self._envelope = ResponseEnvelope(events.id, kind, events.model_name, state.fingerprint())
        request = events.request
        self._has_usage, self._usage_in_chunks = request.include_usage, request.continuous_usage
        self._seconds = seconds
        self._current = 0  # the piece whose text is sent as it comes
        self._waiting: dict[int, str] = {}  # text of later pieces
        self._finished: set[int] = set()
        self._text = ""

    def format_start(self) -> bytes:
        return b""

    def format_error(self, error: Exception) -> bytes:
        return encode_sse_error(error)

    def format_events(self, events: list[GenerationEvent]) -> bytes:
        """The chunks of a turn."""
        final = False
        for one in events:
            if isinstance(one, ChoiceDelta):
                self._waiting[one.index] = self._waiting.get(one.index, "") + one.text
            elif isinstance(one, ChoiceFinish):
                self._finished.add(one.index)
            final = final or isinstance(one, FinalEvent)
        text = self._waiting.pop(self._current, "")
        while self._current in self._finished:
            self._current += 1
            text += self._waiting.pop(self._current, "")
        text = text if self._text else text.lstrip()
        self._text += text
        made = self._chunk("transcript.text.delta", text) if text else b""
        return made + self._done() if final else made

    def _chunk(self, kind: str, text: str, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        chunk = self._envelope.build_body([choice])
        chunk["type"] = kind
        if finish is None:
            chunk["delta"] = text
        else:
            chunk["text"] = self._text
        if self._usage_in_chunks or (finish is not None and self._has_usage):
            chunk["usage"] = usage(self._seconds)
        return encode_sse(chunk)

    def _done(self) -> bytes:
        return self._chunk("transcript.text.done", "", "stop")
