"""Transcribes a recording of any length: decoded, cut into pieces that the model reads, generated.

    file ─ decode, resample ─ cut at quiet places ─ language of the first piece ─ all pieces

Pieces are independent requests, some at a time, and their answers are put in order. Where the
client sets no temperature, an answer that repeats itself or that the model finds unlikely is
generated again at higher ones, as the authors of Whisper do.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from quire.core.admission.supported_tasks import ALIGNS
from quire.core.types import MediaItem
from quire.errors import RequestError, Unsupported
from quire.media.held_bytes import Grow
from quire.outputs import Logprob
from quire.server.app_state import AppState, get_tenant
from quire.server.formats.transcription_request import TranscriptionForm
from quire.server.generation.align_words import align_tokens
from quire.server.generation.events import FullChoice
from quire.server.generation.generation_request import GenerationRequest, RawPrompts
from quire.server.generation.generation_stream import GenerationStream, start_generation
from quire.server.generation.request_context import watch_request
from quire.text.languages import language_code
from quire.text.speech import TIME_STEP, SpeechFormat, SpeechTokens, Task
from quire.text.transcript import Piece
from quire.text.word_times import Word, words_of

PIECES_AT_A_TIME = 32
"""Their features go to the engine at a time: 1 MB each."""
ID_PREFIX = "trsc-"

FALLBACK_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION = 2.4
MIN_AVG_LOGPROB = -1.0
MIN_NO_SPEECH = 0.6
"""A piece that is silent with more than this probability, and whose answer fails, has no text."""


@dataclass(frozen=True, slots=True)
class SpeechRecording:
    """A decoded recording: the pieces that the model reads one by one."""

    pieces: Sequence[MediaItem]
    borders: Sequence[float]  # seconds: where each piece begins, and the end

    @property
    def seconds(self) -> float:
        return self.borders[-1]


@dataclass(frozen=True, slots=True)
class Transcript:
    """The answer to a recording. language: a code; None: of a model without languages."""

    pieces: Sequence[Piece]
    language: str | None
    seconds: float
    words: Sequence[Word] = ()  # if they were asked for


def require_speech(state: AppState) -> tuple[SpeechFormat, SpeechTokens]:
    """Return how the model reads recordings. Raises Unsupported if it does not."""
    speech = state.inputs.speech
    if speech is None or speech.tokens is None:
        names = ", ".join(state.served_model_names)
        raise Unsupported(f"{names} is not a model that transcribes recordings", param="model")
    return speech, speech.tokens


class Transcriber:
    """One request of a client."""

    def __init__(self, state: AppState, http: Request, form: TranscriptionForm, task: Task) -> None:
        """Raises RequestError, Unsupported."""
        self._state, self._http, self._form, self._task = state, http, form, task
        self._speech, self._tokens = require_speech(state)
        if form.words and not self._speech.aligns:
            raise Unsupported(ALIGNS, param="timestamp_granularities")
        self.language = self._given_language()
        self._previous = self._previous_tokens()

    def _given_language(self) -> str | None:
        known, given = self._tokens.languages, self._form.language
        if not known:
            if self._task == "translate" or language_code(given or "en") != "en":
                raise RequestError("this model reads English only", param="language")
            return None
        if given is None:
            return None
        code = language_code(given)
        if code not in known:
            names = ", ".join(sorted(known))
            raise RequestError(f"language {given!r:.40} is none of {names}", param="language")
        return code

    def _previous_tokens(self) -> tuple[int, ...]:
        """The end of the client's prompt, as tokens of what came before the recording."""
        text = self._form.prompt.strip()
        if not text:
            return ()
        most = self._state.max_model_len // 2 - 1
        ids = self._state.require_tokenizer().encode(" " + text, False)
        return tuple(token for token in ids if token < self._tokens.end)[-most:]

    def hold_memory(self) -> AbstractContextManager[Grow]:
        """Around all that has the recording: yields what counts its bytes."""
        return self._speech.reader.held.hold(get_tenant(self._http), "file")

    async def read(self, file: bytes, grow: Grow) -> SpeechRecording:
        """Decode and cut a file. Raises QuireErrors, also if the client leaves meanwhile."""
        grow(len(file))
        seconds = self._state.options.max_recording_seconds
        with watch_request(self._state, self._http, ID_PREFIX) as context:
            found = await self._speech.reader.read(file, seconds, context.key_owner.share)
        grow(sum(len(one.data) for one in found.features))
        rate = self._speech.processor.sampling_rate
        sources = await asyncio.to_thread(
            lambda: [self._speech.source_from(one) for one in found.features]
        )
        return SpeechRecording(sources, [border / rate for border in found.borders])

    async def transcribe(self, recording: SpeechRecording) -> Transcript:
        """Generate all pieces. Raises QuireErrors."""
        found: list[Piece] = []
        await self._find_language(recording.pieces[0])
        for low in range(0, len(recording.pieces), PIECES_AT_A_TIME):
            found += await self._with_fallback(recording, low)
        words = await self._words(recording, found) if self._form.words else ()
        return Transcript(found, self.language, recording.seconds, words)

    async def stream(self, recording: SpeechRecording) -> GenerationStream:
        """Start the generation of all pieces at once; the caller closes it. Raises QuireErrors."""
        await self._find_language(recording.pieces[0])
        request = self._request(recording.pieces, self._sampling(self._form.temperature or 0.0))
        return await start_generation(
            self._state, replace(request, stream=True), self._http, ID_PREFIX
        )

    # -- requests -------------------------------------------------------------------------------

    def _sampling(self, temperature: float) -> dict[str, Any]:
        given = self._form.sampling_values()
        if self._form.beams is None:
            given |= {"temperature": temperature, "logprobs": 0}
        return given

    def _request(
        self,
        items: Sequence[MediaItem],
        sampling: Mapping[str, Any],
        prompt: tuple[int, ...] | None = None,
    ) -> GenerationRequest:
        """prompt: of the decoder; None: that of the task."""
        if prompt is None:
            prompt = self._tokens.prompt(
                self.language, self._task, times=self._form.times, previous=self._previous
            )
        form = self._form
        prompts = [
            {"prompt_token_ids": list(prompt), "multi_modal_data": {"audio": item}}
            for item in items
        ]
        return GenerationRequest(
            source=RawPrompts(prompts=prompts, add_special_tokens=False),
            model=form.model,
            sampling=sampling,
            beams=form.beams if prompt[-1:] != (self._tokens.start,) else None,
            field_names={"max_tokens": "max_completion_tokens"},
            include_usage=form.stream_include_usage or form.stream_continuous_usage_stats,
            continuous_usage=form.stream_continuous_usage_stats,
            ignored=form.ignored_fields(),
        )

    async def _collect(self, request: GenerationRequest) -> list[FullChoice]:
        """The first choice of each prompt."""
        stream = await start_generation(self._state, request, self._http, ID_PREFIX)
        try:
            whole = await stream.collect()
        finally:
            stream.close()
        return whole.choices[:: request.n]

    async def _find_language(self, item: MediaItem) -> None:
        """Have the model name the language of a piece, if the client does not."""
        languages = self._tokens.languages
        if self.language is not None or not languages:
            return
        sampling = {"max_tokens": 1, "temperature": 0.0, "allowed_token_ids": [*languages.values()]}
        (choice,) = await self._collect(self._request([item], sampling, (self._tokens.start,)))
        ids = {token: code for code, token in languages.items()}
        self.language = ids[choice.token_ids[0]]

    async def _no_speech(self, items: Sequence[MediaItem]) -> list[float | None]:
        """The probability that each piece is silent; None where the model has no token for it."""
        if self._tokens.no_speech is None:
            return [None] * len(items)
        asked: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        asked["logprob_token_ids"] = [self._tokens.no_speech]
        choices = await self._collect(self._request(items, asked, (self._tokens.start,)))
        found: list[float | None] = []
        for one in choices:
            (entry,) = _logprobs_of(one)
            found.append(math.exp(entry[self._tokens.no_speech].logprob))
        return found

    # -- pieces ---------------------------------------------------------------------------------

    async def _with_fallback(self, recording: SpeechRecording, low: int) -> list[Piece]:
        """The answers to PIECES_AT_A_TIME pieces from `low` on."""
        items = recording.pieces[low : low + PIECES_AT_A_TIME]
        given, form = self._form.temperature, self._form
        retries = given is None and form.beams is None
        silence: list[float | None] = [None] * len(items)
        if retries or form.response_format == "verbose_json":
            silence = await self._no_speech(items)
        made: dict[int, Piece] = {}
        left = list(range(len(items)))
        for temperature in FALLBACK_TEMPERATURES if retries else (given or 0.0,):
            request = self._request([items[i] for i in left], self._sampling(temperature))
            for i, choice in zip(left, await self._collect(request)):
                borders = recording.borders[low + i], recording.borders[low + i + 1]
                average = _average_logprob(choice)
                made[i] = Piece(*borders, choice.token_ids, average, temperature, silence[i])
            left = [i for i in left if retries and self._fails(made[i])]
            if not left:
                break
        return [made[i] if not self._is_silent(made[i]) else replace(made[i], token_ids=())
                for i in range(len(items))]  # fmt: skip

    async def _words(self, recording: SpeechRecording, pieces: Sequence[Piece]) -> list[Word]:
        """All words, in order."""
        decode = self._state.require_tokenizer().decode
        found = []
        for low in range(0, len(pieces), PIECES_AT_A_TIME):
            spoken = [
                (item, replace(one, token_ids=self._without_end(one.token_ids)))
                for item, one in zip(recording.pieces[low:], pieces[low : low + PIECES_AT_A_TIME])
                if one.words(self._tokens)
            ]
            if not spoken:
                continue
            times = await align_tokens(
                self._state,
                self._http,
                self._request([item for item, _ in spoken], {"max_tokens": 1}),
                [one.token_ids for _, one in spoken],
                [self._positions(item, one) for item, one in spoken],
                ID_PREFIX,
            )
            for (_, one), moments in zip(spoken, times, strict=True):
                found += words_of(one, moments, self._tokens, decode, self.language)
        return found

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids[-1] == self._tokens.end else ids

    @staticmethod
    def _positions(item: MediaItem, piece: Piece) -> int:
        """Positions of the source that have sound."""
        return min(max(int((piece.end - piece.start) / TIME_STEP + 1e-6), 1), item.length)

    def _fails(self, piece: Piece) -> bool:
        """Whether a higher temperature may do better."""
        if self._is_silent(piece):
            return False
        text = self._state.require_tokenizer().decode(piece.words(self._tokens))
        repeats = piece.compression_ratio(text) > MAX_COMPRESSION
        return repeats or piece.avg_logprob < MIN_AVG_LOGPROB

    def _is_silent(self, piece: Piece) -> bool:
        unlikely = piece.avg_logprob < MIN_AVG_LOGPROB and self._form.temperature is None
        return unlikely and (piece.no_speech_prob or 0.0) > MIN_NO_SPEECH


def _average_logprob(choice: FullChoice) -> float:
    if choice.logprobs is None or not choice.token_ids:
        return 0.0
    pairs = zip(choice.token_ids, _logprobs_of(choice))
    return sum([entry[token].logprob for token, entry in pairs]) / len(choice.token_ids)


def _logprobs_of(choice: FullChoice) -> list[dict[int, Logprob]]:
    """Of each token of an answer that has them."""
    found = [entry for entry in choice.logprobs or () if entry is not None]
    assert len(found) == len(choice.token_ids)
    return found
