"""What the bodies of all generating routes have in common.

A field that is declared is honoured. One in LATER is refused unless it asks for nothing; one in
HARMLESS asks for nothing that changes the answer. Any other name is ignored, with a debug line:
clients of many servers send fields of all of them. Ranges are not checked here: SamplingParams
and quire.text.inputs do, for every route alike.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from quire.core.params import LATER as LATER_PARAMS
from quire.errors import RequestError, Unsupported

log = logging.getLogger(__name__)

MAX_STOPS = 64
"""Stop strings of one request: each is searched for in all new text."""

Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]

_STRUCTURE = "structured outputs are not built yet"
_MEDIA = "only text goes in and out of this server"
_TRANSFER = "moving KV between servers is not built yet"

LATER = {
    **LATER_PARAMS,
    "guided_json": _STRUCTURE,
    "guided_regex": _STRUCTURE,
    "guided_choice": _STRUCTURE,
    "guided_grammar": _STRUCTURE,
    "guided_json_object": _STRUCTURE,
    "guided_decoding": _STRUCTURE,
    "guided_whitespace_pattern": _STRUCTURE,
    "structural_tag": _STRUCTURE,
    "use_beam_search": "beam search is not served over HTTP yet; LLM.beam_search does it",
    "length_penalty": "length_penalty belongs to beam search, which is not served over HTTP yet",
    "early_stopping": "early_stopping belongs to beam search, which is not served over HTTP yet",
    "functions": "give tools instead",
    "function_call": "give tool_choice instead",
    "audio": _MEDIA,
    "web_search_options": "this server does not search the web",
    "mm_processor_kwargs": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "mm_payload": _MEDIA,
    "return_mm_kwargs": _MEDIA,
    "prompt_embeds": "prompts as embeddings are not built yet",
    "kv_transfer_params": _TRANSFER,
    "ec_transfer_params": _TRANSFER,
    "return_token_offsets": "token offsets are not built yet",
    "return_weight_versions": "weight versions are not built yet",
    "logits_processors": "functions cannot be sent over HTTP",
}
"""Fields whose feature is not here (yet), and what to tell who sends one."""

NEUTRAL: dict[str, tuple[object, ...]] = {"length_penalty": (1, 1.0), "function_call": ("none",)}
"""Values that ask for nothing, besides None, False, 0 and what is empty."""

HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prediction", "session_id", "guided_decoding_backend", "output_kind", "skip_clone"),
    }
)
"""Known fields that change nothing in an answer of this server."""


class Body(BaseModel):
    """A JSON object from a stranger: types are exact, unknown names are kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    def refuse_later_features(self) -> None:
        """Raise Unsupported for a field that asks for what cannot be done here."""
        for name, value in (self.model_extra or {}).items():
            if name in LATER:
                if value and value not in NEUTRAL.get(name, ()):
                    raise Unsupported(f"{name}: {LATER[name]}", param=name)
            elif name not in HARMLESS:
                log.debug("ignored the unknown field %.80r of a request", name)


class StreamOptions(BaseModel):
    """What a stream holds besides the text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    """End with a chunk that has the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Put the usage so far on every chunk."""


class SamplingBody(Body):
    """How tokens are chosen and told of; the same words on every route."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Texts | None = None
    extra_args: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = Field(None, description="Another name of extra_args.")
    skip_reading_prefix_cache: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given, by their names there."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        given = {name: value for name, value in given.items() if value is not None}
        if self.vllm_xargs is not None:
            given["extra_args"] = {**self.vllm_xargs, **given.get("extra_args", {})}
        return given

    def check(self) -> None:
        """Raise RequestError for what is wrong whatever the model."""
        self.refuse_later_features()
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            message = f"stop must have at most {MAX_STOPS} strings, got {len(self.stop)}"
            raise RequestError(message, param="stop")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", param="stream_options")
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            message = "best_of > n cannot be streamed: the best are known at the end"
            raise RequestError(message, param="best_of")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        """The stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Every chunk has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


_SAMPLING = (
    *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("max_tokens", "min_tokens", "prompt_logprobs", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "stream_interval"),
    *("logit_bias", "allowed_token_ids", "bad_words", "extra_args"),
    *("skip_reading_prefix_cache", "truncate_prompt_tokens"),
)
