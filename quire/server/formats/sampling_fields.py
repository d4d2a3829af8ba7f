"""Sampling fields: the part of the body that all generating routes have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from quire.errors import RequestError
from quire.server.formats.ignored_fields import IgnoredField, find_ignored
from quire.server.formats.request_body import (
    HARMLESS_FIELDS,
    AllowedTokenIds,
    Integer,
    LogitBias,
    StopTokenIds,
    StringList,
)
from quire.server.formats.speculation_fields import SpeculationFields
from quire.server.generation.generation_request import BeamSearchOptions


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    """End with a chunk that has the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Put the usage so far on every chunk."""
    include_obfuscation: bool | None = Field(None, description="Chunks are never padded here.")


class SamplingFields(SpeculationFields):
    """Fields of sampling and of its output, the same on every route."""

    model: str | None = None
    n: Integer | None = None
    best_of: Integer | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    seed: Integer | None = None
    stop: str | StringList | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    prompt_logprobs: Integer | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream_interval: Integer | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: StringList | None = None
    extra_args: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = Field(None, description="Another name of extra_args.")
    skip_reading_prefix_cache: bool | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: str | None = None
    priority: Integer | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    logprob_token_ids: StopTokenIds | None = None
    use_beam_search: bool | None = None
    thinking_token_budget: Integer | None = None
    length_penalty: float | None = None
    x_timing: bool | None = Field(None, description="Show where the time went.")

    def ignored_fields(self) -> list[IgnoredField]:
        options = self.stream_options
        inner = (
            find_ignored(options.model_extra or (), type(options).model_fields, HARMLESS_FIELDS)
            if options
            else []
        )
        named = [one._replace(name=f"stream_options.{one.name}") for one in inner]
        return [*super().ignored_fields(), *named]

    def sampling_values(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given, by their names there."""
        given = {name: getattr(self, name) for name in _SAMPLING_NAMES}
        given = {name: value for name, value in given.items() if value is not None}
        if self.vllm_xargs is not None:
            given["extra_args"] = {**self.vllm_xargs, **given.get("extra_args", {})}
        return given | self.speculation_values()

    @property
    def beams(self) -> BeamSearchOptions | None:
        """Options of the beam search; None: the request samples."""
        penalty = self.length_penalty
        if self.use_beam_search:
            return (
                BeamSearchOptions()
                if penalty is None
                else BeamSearchOptions(length_penalty=penalty)
            )
        if penalty not in (None, 1):
            message = f"length_penalty {penalty} needs use_beam_search=true"
            raise RequestError(message, param="length_penalty")
        return None

    def generation_request_fields(self) -> dict[str, Any]:
        """Fields of GenerationRequest that all these bodies name alike."""
        return {
            "model": self.model,
            "beams": self.beams,
            "stream": bool(self.stream),
            "stream_options": self.stream_options is not None,
            "include_usage": self.include_usage,
            "continuous_usage": self.continuous_usage,
            "token_ids": bool(self.return_token_ids),
            "tokens_as_ids": bool(self.return_tokens_as_token_ids),
            "prompt_text": bool(self.return_prompt_text),
            "timing": bool(self.x_timing),
            "truncation_side": self.truncation_side,
            "structure": self.structured_output(),
            "priority": self.priority,
            "salt": self.cache_salt,
            "request_id": self.request_id,
            "ignored": self.ignored_fields(),
        }

    @property
    def include_usage(self) -> bool:
        """The stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Every chunk has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


_SAMPLING_NAMES = (
    *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("max_tokens", "min_tokens", "prompt_logprobs", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "stream_interval"),
    *("logit_bias", "allowed_token_ids", "bad_words", "extra_args"),
    *("skip_reading_prefix_cache", "truncate_prompt_tokens", "logprob_token_ids"),
    "thinking_token_budget",
)
