"""Transcripts: answers of a speech model as text and as segments, for all formats of the API."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.text.speech import TIME_STEP, SpeechTokens

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Piece:
    """The answer to one piece of a recording.

    start, end: seconds of the recording. avg_logprob: mean over the tokens. no_speech_prob: None if
    it was not asked for.
    """

    start: float
    end: float
    token_ids: Sequence[int]
    avg_logprob: float
    temperature: float
    no_speech_prob: float | None = None

    def words(self, tokens: SpeechTokens) -> list[int]:
        """Return the tokens of its text: without time stamps and other special ones."""
        return [token for token in self.token_ids if token < tokens.end]

    def compression_ratio(self, text: str) -> float:
        """Return how far its text compresses: far means that it repeats itself."""
        data = text.encode()
        return len(data) / len(zlib.compress(data)) if data else 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """Text between two time stamps, in seconds of the recording."""

    start: float
    end: float
    text: str
    token_ids: Sequence[int]
    piece: Piece


def segments_of(piece: Piece, tokens: SpeechTokens, decode: Decode) -> list[Segment]:
    """Return the segments of a piece. Text without time stamps reaches to the piece's borders."""
    found: list[Segment] = []
    start, words = piece.start, list[int]()

    def close(end: float) -> None:
        if words:
            found.append(Segment(start, max(end, start), decode(words), tuple(words), piece))
            words.clear()

    for token in piece.token_ids:
        if token >= tokens.first_time:
            time = min(piece.start + (token - tokens.first_time) * TIME_STEP, piece.end)
            close(time)
            start = time
        elif token < tokens.end:
            words.append(token)
    close(piece.end)
    return found


class TimedText(Protocol):
    """A segment or a word, in seconds of the recording."""

    @property
    def text(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def subtitles(segments: Sequence[TimedText], form: str) -> str:
    """Return segments or words as a file of subtitles. form: "srt" or "vtt"."""
    comma = "," if form == "srt" else "."
    blocks = ["WEBVTT\n"] if form == "vtt" else []
    for number, one in enumerate(segments, 1):
        times = f"{_clock(one.start, comma)} --> {_clock(one.end, comma)}"
        text = one.text.strip().replace("-->", "->")  # it would end the cue
        head = f"{number}\n" if form == "srt" else ""
        blocks.append(f"{head}{times}\n{text}\n")
    return "\n".join(blocks) + "\n"


def _clock(seconds: float, comma: str) -> str:
    """hours:minutes:seconds with milliseconds."""
    total = round(seconds * 1000)
    minutes, rest = divmod(total, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{comma}{rest % 1000:03}"
