"""Prompts of speech models: a recording for the encoder, and task tokens for the decoder.

    [<|startofprev|> text] <|startoftranscript|> [<|language|> <|task|>] [<|notimestamps|>]

A decoder prompt that ends with a task gets time stamps as answer: tokens of 0.02 s before and after
each segment, which follow the rules of core.types.TimeRules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.core.types import MediaItem, MediaTensor, TimeRules
from quire.errors import ConfigError, RequestError
from quire.media.audio_decode import mix_down
from quire.media.processor import DecodedAudio
from quire.media.processors.whisper import Processor as WhisperProcessor
from quire.media.recording_reader import RecordingReader
from quire.text.prompts import ParsedPrompt, Prompt, check_cache_salt, parse_prompt, without_extras
from quire.text.tokenizing.tokenizer import Tokenizer

Task = Literal["transcribe", "translate"]
TIME_STEP = 0.02
"""Seconds between two time stamps."""
FORM = '{"prompt": "<|startoftranscript|>...", "multi_modal_data": {"audio": (samples, rate)}}'


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Ids of the tokens that direct the decoder. languages: code -> id; {}: English only."""

    start: int
    end: int
    previous: int
    no_times: int
    no_speech: int | None
    first_time: int
    tasks: Mapping[str, int]
    languages: Mapping[str, int]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, end: int, *, multilingual: bool) -> SpeechTokens:
        """Raises ConfigError for a tokenizer without one of them."""

        def find(*names: str) -> int | None:
            known = (tokenizer.backend.token_to_id(f"<|{name}|>") for name in names)
            return next((one for one in known if one is not None), None)

        def require(name: str) -> int:
            if (found := find(name)) is None:
                raise ConfigError(f"the tokenizer of a speech model has no token <|{name}|>")
            return found

        start, translate = require("startoftranscript"), require("translate")
        languages = {}
        for token in range(start + 1, min(translate, require("transcribe"))):
            text = tokenizer.backend.id_to_token(token) or ""
            languages[text.strip("<|>")] = token
        return cls(
            start=start,
            end=end,
            previous=require("startofprev"),
            no_times=require("notimestamps"),
            no_speech=find("nospeech", "nocaptions"),
            first_time=find("0.00") or require("notimestamps") + 1,
            tasks={name: require(name) for name in ("transcribe", "translate")},
            languages=languages if multilingual else {},
        )

    def prompt(
        self,
        language: str | None,
        task: Task,
        *,
        times: bool,
        previous: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Return the decoder prompt of a task. language: a code; None: of a model without."""
        ids = [self.previous, *previous] if previous else []
        ids.append(self.start)
        if language is not None:
            ids += (self.languages[language], self.tasks[task])
        return (*ids, *(() if times else (self.no_times,)))

    def has_times(self, prompt: Sequence[int]) -> bool:
        """Whether a decoder prompt asks for time stamps."""
        last = prompt[-1] if prompt else -1
        return last in self.tasks.values() or (last == self.start and not self.languages)


@dataclass(frozen=True, slots=True)
class SpeechFormat:
    """What prompts of a speech model become. last_first_time: latest start of the first segment,
    in steps of TIME_STEP."""

    tokens: SpeechTokens | None  # None: there is no tokenizer, and no time stamps
    processor: WhisperProcessor
    reader: RecordingReader
    last_first_time: int
    aligns: bool = False  # the engine finds when the recording says a token

    def time_rules(self, prompt: Sequence[int]) -> TimeRules | None:
        """Return the rules of time stamps for the answer to a decoder prompt; None: none."""
        tokens = self.tokens
        if tokens is None or not tokens.has_times(prompt):
            return None
        return TimeRules(tokens.first_time, tokens.no_times, tokens.end, self.last_first_time)

    def read_recording(self, given: object) -> MediaItem:
        """Return the source of a recording: samples, (samples, rate) or one that is prepared.

        Raises RequestError.
        """
        if isinstance(given, MediaItem):
            return given
        samples, rate = given, self.processor.sampling_rate
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], (int, float)):
            samples, rate = given[0], int(given[1])
        return self.source_of(mix_down(samples, rate, self.processor.sampling_rate))

    def source_of(self, samples: Any) -> MediaItem:
        """Return the source of mono samples [n] at the model's rate. Raises RequestError."""
        audio = DecodedAudio(samples, self.processor.sampling_rate)
        return self.source_from(self.processor.process(audio, {}).tensors[0])

    @staticmethod
    def source_from(features: MediaTensor) -> MediaItem:
        """Return the source with these features [bins, frames]."""
        digest, positions = hashlib.sha256(b"audio" + features.data), features.shape[1] // 2
        return MediaItem("audio", digest.digest(), 0, positions, ((0, positions),), (features,))


@dataclass(frozen=True, slots=True)
class SpeechPrompt:
    """A parsed prompt. decoder: None: the decoder begins as the model's config has it."""

    audio: object
    decoder: ParsedPrompt | None
    salt: str | None


def parse_speech_prompt(prompt: Prompt) -> SpeechPrompt:
    """Parse a prompt with a recording. Raises RequestError.

    {"prompt" or "prompt_token_ids": of the decoder, "multi_modal_data": {"audio": ...}}
    {"encoder_prompt": {"multi_modal_data": {"audio": ...}}, "decoder_prompt": ...}
    """
    if not isinstance(prompt, Mapping):
        raise RequestError(f"this model reads audio; a prompt is {FORM}", param="prompt")
    decoder = dict(prompt)
    salt = check_cache_salt(decoder.pop("cache_salt", None))
    source: object = decoder
    if "encoder_prompt" in prompt:
        source = prompt["encoder_prompt"]
        given = prompt.get("decoder_prompt")
    else:
        given = {key: value for key, value in decoder.items() if key != "multi_modal_data"}
    data = source.get("multi_modal_data") if isinstance(source, Mapping) else None
    if not isinstance(data, Mapping) or set(data) != {"audio"}:
        raise RequestError(
            f"multi_modal_data must have 'audio' alone; a prompt is {FORM}",
            param="multi_modal_data",
        )
    audio = data["audio"]
    if isinstance(audio, list) and audio and not isinstance(audio[0], (int, float)):
        if len(audio) > 1:
            raise RequestError(
                "At most 1 audio(s) may be provided in one prompt.", param="multi_modal_data"
            )
        audio = audio[0]
    parsed = parse_prompt(given) if given else None  # type: ignore[arg-type]  # it checks
    return SpeechPrompt(audio, without_extras(parsed, "prompt") if parsed else None, salt)
