"""Parameters of one request: sampling and beam search. Plain data, no torch.

An object is valid once it exists; `verify()` checks it again after a change of its fields.
quire.core.structured_output_params has the constraints on the text, and
quire.text.input_processor checks what needs a vocabulary, a tokenizer or the engine's limits.

Names, defaults and ranges are those of vLLM. A field of a feature that is not implemented yet is
kept and checked here, and the input processor refuses it (`UNIMPLEMENTED_FIELDS`); none is ignored.
"""

from __future__ import annotations

import copy
import difflib
import logging
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

from quire.core.param_checks import (
    check_float,
    check_int,
    check_strings,
    check_token_ids,
    invalid_param,
)
from quire.core.structured_output_params import (
    GuidedDecodingParams as GuidedDecodingParams,
)
from quire.core.structured_output_params import (
    StructuredOutputsParams as StructuredOutputsParams,
)
from quire.errors import RequestError, Unsupported

log = logging.getLogger(__name__)

MAX_SEQUENCES = 16384
MAX_BAD_WORDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORD_CHARS = 16_384
"""Limit for all bad words together: each is tokenized twice."""
MAX_STOP_IDS = 128
MAX_BIASED_TOKENS = 1024
MAX_STOP_CHARS = 16_384
"""Limit for all stop strings together: possible beginnings are held back and searched again."""
LOWEST_REPETITION, HIGHEST_REPETITION = 1e-6, 1e6
"""Outside of this range float32 logits overflow."""
HIGHEST_LENGTH_PENALTY = 32.0
"""A length of 10**9 to this power, or to its negative, is a finite float and not 0."""
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 2.0
INT64 = range(-(2**63), 2**63)
UINT64_END = 2**64

LogitsProcessor = Callable[..., Any]
"""f(output_ids, logits) or f(prompt_ids, output_ids, logits) -> logits, one row at a time."""

UNIMPLEMENTED_FIELDS = {
    "repetition_detection": "repetition detection is not built yet",
    "prompt_logprob_token_ids": "prompt scores of chosen token ids are not built yet",
    "prompt_logprob_start": "prompt_logprob_start goes with prompt_logprob_token_ids",
    "routed_experts_prompt_start": "returning routed experts is not built yet",
    "watermarking": "watermarks are not built yet",
    "trace_decode_token_ids": "trace replay is not built yet",
}
"""Fields of SamplingParams whose feature is not implemented, and the message for its users."""


class RequestOutputKind(IntEnum):
    """How much of the result each output of a running request contains."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, at the end


class SamplingType(IntEnum):
    """How the next token is chosen."""

    GREEDY = 0
    RANDOM = 1


def _is_off(name: str, value: object) -> bool:
    """Whether a field of a feature that is not implemented has a neutral value."""
    if isinstance(value, RepetitionDetectionParams):
        return value.max_pattern_size == 0
    return value is None or value is False or value == 0


@dataclass(slots=True)
class RepetitionDetectionParams:
    """Ends a sequence whose tail repeats one pattern."""

    max_pattern_size: int = 0
    """Longest pattern looked for, in tokens. 0: off."""
    min_pattern_size: int = 0
    """Shortest pattern looked for, in tokens. 0: as 1."""
    min_count: int = 0
    """Repetitions that end the sequence; at least 2 when on."""

    def __post_init__(self) -> None:
        name = "repetition_detection"
        check_int(f"{name}.max_pattern_size", self.max_pattern_size, 0, None, "an integer >= 0")
        check_int(f"{name}.min_pattern_size", self.min_pattern_size, 0, None, "an integer >= 0")
        if self.max_pattern_size == 0:
            return
        if self.min_pattern_size > self.max_pattern_size:
            allowed = f"at most max_pattern_size ({self.max_pattern_size})"
            raise invalid_param(f"{name}.min_pattern_size", self.min_pattern_size, allowed)
        check_int(f"{name}.min_count", self.min_count, 2, None, "an integer >= 2")


@dataclass
class SamplingParams:
    """How the tokens of one request are chosen, when it ends, and what is returned.

    Mutable, because scripts change it between calls; the engine works on a clone. Temperature 0 is
    greedy and then top_p, top_k and min_p are neutral.
    """

    n: int = 1
    """Sequences to return. 1 when greedy."""
    presence_penalty: float = 0.0
    """[-2, 2]: subtracted from tokens that were generated."""
    frequency_penalty: float = 0.0
    """[-2, 2]: subtracted once for each time a token was generated."""
    repetition_penalty: float = 1.0
    """[1e-6, 1e6]: divides positive logits (multiplies negative ones) of tokens seen, prompt
    included."""
    temperature: float = 1.0
    """[0, 2]. 0: greedy."""
    top_p: float = 1.0
    """(0, 1]: sample from the most likely tokens whose probabilities reach this sum."""
    top_k: int = 0
    """Sample from the k most likely tokens. 0 or -1: all."""
    min_p: float = 0.0
    """[0, 1]: drop tokens less likely than this share of the likeliest."""
    seed: int | None = None
    """Makes the draws repeatable; sequence i uses seed + i. None or -1: unseeded."""
    stop: str | list[str] | None = None
    """Strings that end the text; they are cut off unless include_stop_str_in_output."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the sequence, besides EOS."""
    ignore_eos: bool = False
    """Continue after EOS."""
    max_tokens: int | None = 16
    """Most tokens to generate. None: to the end of the context."""
    min_tokens: int = 0
    """Tokens before EOS, stop ids and stop strings count."""
    logprobs: int | None = None
    """Also return this many best logprobs of each token (and the chosen one's). -1: all."""
    prompt_logprobs: int | None = None
    """The same for the prompt."""
    logprob_token_ids: list[int] | None = None
    """Return the logprobs of just these ids."""
    prompt_logprob_token_ids: list[list[int]] | None = None
    """Ids to score at each prompt position; -1 pads a row."""
    prompt_logprob_start: int | None = None
    """First prompt position that is scored."""
    flat_logprobs: bool = False
    """Return logprobs in one flat container."""
    detokenize: bool = True
    """Make text. False: token ids only."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output holds. LLM sets FINAL_ONLY."""
    stream_interval: int | None = None
    """Tokens between two streamed outputs. None: the engine's value."""
    skip_clone: bool = False
    """The caller does not change this object once it is made: it is neither copied nor checked
    again."""
    structured_outputs: StructuredOutputsParams | None = None
    """A constraint on the text."""
    logit_bias: dict[int, float] | None = None
    """Token id to a number in [-100, 100] that is added to its logit; others are clamped."""
    allowed_token_ids: list[int] | None = None
    """Choose among these only."""
    bad_words: list[str] | None = None
    """Words never to generate."""
    extra_args: dict[str, Any] | None = None
    """Arguments for custom logits processors."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt. None: only if prompt_logprobs needs it."""
    thinking_token_budget: int | None = None
    """Most tokens of thinking. None or -1: no budget."""
    repetition_detection: RepetitionDetectionParams | None = None
    """End sequences that repeat themselves."""
    routed_experts_prompt_start: int = 0
    """First prompt position whose routed experts are returned."""
    watermarking: bool | None = None
    """Use the server's watermark. None: the server's default."""
    trace_decode_token_ids: list[int] | None = None
    """Force these output tokens."""
    best_of: int | None = None
    """Generate this many sequences and return the n with the highest cumulative logprob."""
    logits_processors: list[LogitsProcessor] | None = None
    """Functions that change the logits of this request."""
    guided_decoding: StructuredOutputsParams | None = None
    """The name older releases use for structured_outputs."""
    truncate_prompt_tokens: int | None = None
    """Keep the last k tokens of the prompt. -1: as many as fit."""
    prediction: str | list[int] | None = None
    """Text or tokens that the output probably repeats: it is made faster where it does."""
    speculative: bool | None = None
    """False: no drafts for this request. None or True: as the engine makes them."""
    bad_words_token_ids: list[list[int]] = field(default_factory=list, init=False, repr=False)
    """quire.text.input_processor fills it: each bad word, with and without a leading space."""

    def __post_init__(self) -> None:
        self.verify()

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Make one; a value of None means the default."""
        known = [f.name for f in fields(cls) if f.init]
        for name in given:
            if name not in known:
                matches = difflib.get_close_matches(name, known, n=3)
                hint = f"; did you mean {' or '.join(matches)}?" if matches else ""
                raise RequestError(f"SamplingParams has no {name!r}{hint}", param=name)
        keep = {k: v for k, v in given.items() if v is not None or k == "max_tokens"}
        return cls(**keep)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, without sampling."""
        return self.temperature < GREEDY_BELOW

    @property
    def sampling_type(self) -> SamplingType:
        """GREEDY or RANDOM."""
        return SamplingType.GREEDY if self.greedy else SamplingType.RANDOM

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate: best_of, or n."""
        return self.n if self.best_of is None else max(self.best_of, self.n)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def clone(self) -> SamplingParams:
        """Return a copy that shares no list or dict with this one, only functions and schemas."""
        copied = copy.copy(self)
        for name, value in self.__dict__.items():
            if isinstance(value, (list, dict)):
                setattr(copied, name, value.copy())
        return copied

    def reject_unimplemented_features(self) -> None:
        """Raise Unsupported if a field of a feature that does not exist yet is set."""
        for name, message in UNIMPLEMENTED_FIELDS.items():
            if not _is_off(name, getattr(self, name)):
                raise Unsupported(f"{name}: {message}", param=name)

    def verify(self) -> None:
        """Normalize the fields. Raises RequestError for invalid values."""
        self._normalize()
        self._verify_counts()
        self._verify_distribution()
        self._verify_stops()
        self._verify_logprobs()
        self._verify_masks()
        self._verify_other_fields()

    def _normalize(self) -> None:
        self.stop = (
            self.stop_strings if self.stop is None or isinstance(self.stop, str) else self.stop
        )
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.seed = None if self.seed == -1 else self.seed
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.guided_decoding is not None:
            if self.structured_outputs not in (None, self.guided_decoding):
                message = "give structured_outputs or guided_decoding, not both"
                raise RequestError(message, param="guided_decoding")
            self.structured_outputs = self.guided_decoding
            self.guided_decoding = None
        if not isinstance(self.output_kind, RequestOutputKind):
            try:
                self.output_kind = RequestOutputKind(self.output_kind)
            except ValueError:
                names = ", ".join(k.name for k in RequestOutputKind)
                raise invalid_param("output_kind", self.output_kind, f"one of {names}") from None

    def _verify_counts(self) -> None:
        check_int("n", self.n, 1, MAX_SEQUENCES, f"an integer in [1, {MAX_SEQUENCES}]")
        if self.best_of is not None:
            allowed = f"an integer in [n = {self.n}, {MAX_SEQUENCES}]"
            check_int("best_of", self.best_of, self.n, MAX_SEQUENCES, allowed)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None, "an integer >= 1, or None")
        check_int("min_tokens", self.min_tokens, 0, None, "an integer >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid_param(
                "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
            )
        if self.stream_interval is not None:
            check_int("stream_interval", self.stream_interval, 1, None, "an integer >= 1, or None")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            allowed = "an integer >= 1, -1 or None"
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, None, allowed)
        if self.seed is not None and (not isinstance(self.seed, int) or self.seed not in INT64):
            raise invalid_param("seed", self.seed, "a 64-bit integer, or None")

    def _verify_distribution(self) -> None:
        check_float("presence_penalty", self.presence_penalty, -2, 2, "a number in [-2, 2]")
        check_float("frequency_penalty", self.frequency_penalty, -2, 2, "a number in [-2, 2]")
        low, high = LOWEST_REPETITION, HIGHEST_REPETITION
        allowed = f"a number in [{low:g}, {high:g}]"
        check_float("repetition_penalty", self.repetition_penalty, low, high, allowed)
        check_float("temperature", self.temperature, 0, HIGHEST_TEMPERATURE, "a number in [0, 2]")
        check_float("top_p", self.top_p, 0, 1, "a number in (0, 1]")
        if self.top_p == 0:
            raise invalid_param("top_p", self.top_p, "a number in (0, 1]")
        check_int("top_k", self.top_k, -1, None, "an integer >= 1, or 0 or -1 for all tokens")
        check_float("min_p", self.min_p, 0, 1, "a number in [0, 1]")
        if self.greedy:
            self._verify_greedy()
        elif self.temperature < LOWEST_TEMPERATURE:
            log.warning("temperature %g is too low to be stable; using 0.01", self.temperature)
            self.temperature = LOWEST_TEMPERATURE

    def _verify_greedy(self) -> None:
        if self.num_sequences > 1:
            param = "n" if self.n > 1 else "best_of"
            message = f"{param} must be 1 when temperature is 0 (all would be equal)"
            raise RequestError(f"{message}, got {self.num_sequences}", param=param)
        self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    def _verify_stops(self) -> None:
        check_strings("stop", self.stop)
        if (chars := sum(map(len, self.stop or ()))) > MAX_STOP_CHARS:
            allowed = f"strings of at most {MAX_STOP_CHARS} characters together"
            raise invalid_param("stop", f"{chars} characters", allowed)
        if self.stop and not self.detokenize:
            message = "stop strings need text: set detokenize=True or use stop_token_ids"
            raise RequestError(message, param="stop")
        check_token_ids("stop_token_ids", self.stop_token_ids)

    def _verify_logprobs(self) -> None:
        for param in ("logprobs", "prompt_logprobs"):
            if getattr(self, param) is not None:
                allowed = "an integer >= 0, -1 for the whole vocabulary, or None"
                check_int(param, getattr(self, param), -1, None, allowed)
        ids = self.logprob_token_ids
        if ids is not None:
            check_token_ids("logprob_token_ids", ids)
            if len(ids) > MAX_LOGPROB_TOKEN_IDS:
                allowed = f"at most {MAX_LOGPROB_TOKEN_IDS} ids"
                raise invalid_param("logprob_token_ids", f"{len(ids)} ids", allowed)
            if self.logprobs is not None and self.logprobs != len(ids):
                allowed = f"left out or equal to the number of logprob_token_ids ({len(ids)})"
                raise invalid_param("logprobs", self.logprobs, allowed)

    def _verify_masks(self) -> None:
        if self.allowed_token_ids is not None:
            check_token_ids("allowed_token_ids", self.allowed_token_ids, empty=False)
        if self.bad_words is not None:
            check_strings("bad_words", self.bad_words)
            if len(self.bad_words) > MAX_BAD_WORDS:
                raise invalid_param(
                    "bad_words", f"{len(self.bad_words)} words", f"at most {MAX_BAD_WORDS}"
                )
            if (chars := sum(map(len, self.bad_words))) > MAX_BAD_WORD_CHARS:
                allowed = f"words of at most {MAX_BAD_WORD_CHARS} characters together"
                raise invalid_param("bad_words", f"{chars} characters", allowed)
        if self.logit_bias is not None:
            self.logit_bias = _normalize_bias(self.logit_bias)
        for one in self.logits_processors or ():
            if not callable(one):
                raise invalid_param("logits_processors", one, "a list of functions")

    def _verify_other_fields(self) -> None:
        if self.thinking_token_budget is not None:
            allowed = "an integer >= 0, or -1 or None for no budget"
            check_int("thinking_token_budget", self.thinking_token_budget, 0, None, allowed)
        if self.prediction is not None and not isinstance(self.prediction, str):
            check_token_ids("prediction", self.prediction)
        if self.speculative not in (None, True, False):
            raise invalid_param("speculative", self.speculative, "True, False or None")
        start = self.routed_experts_prompt_start
        check_int("routed_experts_prompt_start", start, 0, None, "an integer >= 0")
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = StructuredOutputsParams.from_mapping(self.structured_outputs)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            allowed = "StructuredOutputsParams, or a dict of its fields"
            raise invalid_param("structured_outputs", self.structured_outputs, allowed)
        if self.structured_outputs is not None:
            self.structured_outputs.verify()
        if isinstance(self.repetition_detection, dict):
            self.repetition_detection = RepetitionDetectionParams(**self.repetition_detection)
        for name, value in (self.extra_args or {}).items():
            if isinstance(value, int) and not INT64.start <= value < UINT64_END:
                raise invalid_param(f"extra_args.{name}", value, "an integer of at most 64 bits")


def _normalize_bias(given: object) -> dict[int, float]:
    """Return ids as integers (JSON keys are text) and values clamped to [-100, 100]."""
    allowed = "a dict of token id to number"
    if not isinstance(given, dict):
        raise invalid_param("logit_bias", given, allowed)
    if len(given) > MAX_BIASED_TOKENS:
        raise invalid_param("logit_bias", f"{len(given)} ids", f"at most {MAX_BIASED_TOKENS} ids")
    clamped: dict[int, float] = {}
    for key, value in given.items():
        try:
            token, bias = _token_id(key), _bias(value)
        except (TypeError, ValueError, OverflowError):
            raise invalid_param("logit_bias", {key: value}, allowed) from None
        clamped[token] = min(100.0, max(-100.0, bias))
    return clamped


def _token_id(key: Any) -> int:
    """Parse an id strictly: int() also accepts " 1", "+1" and "1_0", so two keys could be equal."""
    if isinstance(key, str) and not (key.isascii() and key.isdecimal() and len(key) < 20):
        raise ValueError(key)
    token = int(key) if isinstance(key, str) else operator.index(key)
    if token < 0 or isinstance(key, bool):
        raise ValueError(key)
    return token


def _bias(value: Any) -> float:
    if isinstance(value, str | bool) or math.isnan(value):
        raise ValueError(value)
    return float(value)


@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of LLM.beam_search, which searches for the most likely sequences."""

    beam_width: int
    """Live beams at each step, and results returned."""
    max_tokens: int
    """Most tokens of a beam."""
    ignore_eos: bool = False
    """Continue after EOS."""
    temperature: float = 0.0
    """Changes nothing under the default logprobs_mode: beams are scored by raw logprobs."""
    length_penalty: float = 1.0
    """[-32, 32]. Score = sum of logprobs / generated tokens ** length_penalty."""
    include_stop_str_in_output: bool = False
    """Keep the EOS token in the text and tokens of a finished beam."""
    structured_outputs: StructuredOutputsParams | None = None
    """A constraint on the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    watermarking: bool | None = None
    """Use the server's watermark."""
    allowed_token_ids: list[int] | None = None
    """Choose among these only."""

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, None, "an integer >= 1")
        check_int("max_tokens", self.max_tokens, 1, None, "an integer >= 1")
        check_float("temperature", self.temperature, 0, HIGHEST_TEMPERATURE, "a number in [0, 2]")
        high = HIGHEST_LENGTH_PENALTY
        allowed = f"a number in [{-high:g}, {high:g}]"
        check_float("length_penalty", self.length_penalty, -high, high, allowed)
        if self.allowed_token_ids is not None:
            check_token_ids("allowed_token_ids", self.allowed_token_ids, empty=False)

    def reject_unimplemented_features(self) -> None:
        """Raise Unsupported if a field of a feature that does not exist yet is set."""
        if self.structured_outputs is not None:
            message = (
                "structured_outputs: a beam search cannot be constrained; use sampling instead"
            )
            raise Unsupported(message, param="structured_outputs")
        if self.watermarking:
            raise Unsupported(
                f"watermarking: {UNIMPLEMENTED_FIELDS['watermarking']}", param="watermarking"
            )


@dataclass(slots=True, eq=False)
class LoRARequest:
    """A LoRA adapter: its name, its number, and its folder."""

    lora_name: str
    """Its name; two requests with the same name mean the same adapter."""
    lora_int_id: int
    """Its unique number, >= 1."""
    lora_path: str = ""
    """Folder of the adapter."""
    base_model_name: str | None = None
    """The model that it adapts."""
    load_inplace: bool = False
    """Replace a loaded adapter of this name."""
    is_3d_lora_weight: bool = False
    """Its expert weights are three-dimensional. The files show that: it has no effect."""
    lora_local_path: str | None = None
    """Older name of lora_path."""
    long_lora_max_len: int | None = None
    """Of older releases. It has no effect."""

    def __post_init__(self) -> None:
        check_int("lora_int_id", self.lora_int_id, 1, None, "an integer >= 1")
        self.lora_path = str(self.lora_path or self.lora_local_path or "")
        if not self.lora_path:
            raise invalid_param("lora_path", self.lora_path, "a folder")
        if not self.lora_name:
            raise invalid_param("lora_name", self.lora_name, "a name")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
