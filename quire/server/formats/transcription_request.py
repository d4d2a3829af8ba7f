"""The form of POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.errors import RequestError, Unsupported
from quire.server.formats.ignored_fields import IgnoredField, find_ignored
from quire.server.formats.multipart import FormPart
from quire.server.formats.request_body import HARMLESS_FIELDS, MAX_UNKNOWN_FIELDS, Integer
from quire.server.generation.generation_request import BeamSearchOptions

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
LISTS = ("timestamp_granularities", "include")
"""Fields that may come several times, under names with []."""
UNSUPPORTED = {
    "hotwords": "this model takes no hot words: put them into prompt",
    "known_speaker_names": "speakers are not distinguished",
    "known_speaker_references": "speakers are not distinguished",
}
DEFAULT_BEAMS = 5


class TranscriptionForm(BaseModel):
    """Fields of the form, which are texts: numbers and booleans are read from them."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    model: str | None = None
    language: str | None = None
    to_language: str | None = None
    prompt: str = Field("", max_length=1 << 16)
    response_format: ResponseFormat = "json"
    timestamp_granularities: list[Literal["segment", "word"]] = []
    include: list[str] = []
    stream: bool = False
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
    temperature: float | None = Field(
        None,
        description="Without it decoding is greedy, and pieces that fail are sampled again at "
        "higher temperatures.",
    )
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    seed: Integer | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: Integer | None = None
    use_beam_search: bool = False
    n: Integer | None = None
    length_penalty: float | None = None

    @classmethod
    def from_parts(cls, parts: Sequence[FormPart]) -> tuple[TranscriptionForm, bytes]:
        """Return the fields and the file. Raises RequestError, Unsupported, ValidationError."""
        fields: dict[str, Any] = {}
        file = None
        for part in parts:
            name = part.name.removesuffix("[]")
            if name == "file":
                if file is not None:
                    raise RequestError("the form must have one file", param="file")
                file = part.data
                continue
            text = part.data.decode("utf-8", "replace")
            if name in LISTS:
                fields.setdefault(name, []).append(text)
            elif text or name == "prompt":  # an empty field is not given
                fields[name] = text
        if not file:
            raise RequestError("file is missing: send the audio file in this field", param="file")
        form = cls.model_validate(fields)
        form._check()
        return form, file

    def _check(self) -> None:
        extra = self.model_extra or {}
        for name in extra:
            if name in UNSUPPORTED:
                raise Unsupported(f"{name}: {UNSUPPORTED[name]}", param=name)
        if len(extra) > MAX_UNKNOWN_FIELDS:
            raise RequestError(f"the form has {len(extra)} unknown fields")
        if self.include:
            raise Unsupported("include: logprobs are not shown here", param="include")
        if self.timestamp_granularities and not self.times:
            message = "timestamp_granularities need response_format verbose_json, srt or vtt"
            raise RequestError(message, param="timestamp_granularities")
        if self.stream and self.response_format not in ("json", "text"):
            message = f"a stream has no segments: response_format {self.response_format} needs the"
            raise RequestError(f"{message} whole answer", param="stream")
        beams = self.use_beam_search
        if beams and (self.times or self.stream):
            message = "beams have neither time stamps nor a stream: response_format json or text"
            raise Unsupported(message, param="use_beam_search")
        if not beams and self.n not in (None, 1):
            raise RequestError("n is the number of beams: it needs use_beam_search", param="n")
        if not beams and self.length_penalty is not None:
            raise RequestError("length_penalty needs use_beam_search", param="length_penalty")
        if (self.to_language or "en").lower() not in ("en", "english"):
            raise Unsupported("translations are to English", param="to_language")

    @property
    def times(self) -> bool:
        """Whether the answer has time stamps."""
        return self.response_format not in ("json", "text")

    @property
    def words(self) -> bool:
        """Whether the answer has the time of each word."""
        return "word" in self.timestamp_granularities

    @property
    def beams(self) -> BeamSearchOptions | None:
        if not self.use_beam_search:
            return None
        return BeamSearchOptions(
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty
        )

    def sampling_values(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given, by their names there."""
        names = ("top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty")
        given = {name: getattr(self, name) for name in (*names, "repetition_penalty")}
        given["max_tokens"] = self.max_completion_tokens
        if self.use_beam_search:
            given["n"] = self.n or DEFAULT_BEAMS
        return {name: value for name, value in given.items() if value is not None}

    def ignored_fields(self) -> list[IgnoredField]:
        """The fields without a meaning here."""
        extra = self.model_extra or {}
        return find_ignored(extra, type(self).model_fields, HARMLESS_FIELDS) if extra else []
