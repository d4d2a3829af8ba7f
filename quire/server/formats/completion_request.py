"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from quire.server.formats.request_body import TokenIdList
from quire.server.formats.sampling_fields import SamplingFields
from quire.server.generation.generation_request import MAX_PROMPTS, GenerationRequest, RawPrompts


class CompletionRequest(SamplingFields):
    """One or more prompts to continue."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | TokenIdList
        | Annotated[list[TokenIdList], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    )
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = Field(
        None, description="Text after the output; for models that fill in the middle."
    )

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def is_prompt_only(self) -> bool:
        """Nothing is to be generated: the prompt is echoed, and scored."""
        return self.max_tokens == 0 and self.echo

    def sampling_values(self) -> dict[str, Any]:
        given = super().sampling_values()
        if self.is_prompt_only:
            given["max_tokens"] = 1  # what it yields is dropped
            given["min_tokens"] = 0
        if self.logprobs is not None:
            if not self.logprob_token_ids:
                given["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                given["prompt_logprobs"] = self.logprobs
        return given

    def to_generation_request(self) -> GenerationRequest:
        self.refuse_unsupported_features()
        special = self.add_special_tokens is not False
        return GenerationRequest(
            source=RawPrompts(
                prompts=self.prompts(), add_special_tokens=special, suffix=self.suffix
            ),
            sampling=self.sampling_values(),
            max_tokens=16,
            field_names={"prompt_token_ids": "prompt"},
            echo=self.echo,
            prompt_only=self.is_prompt_only,
            streams_prompt_logprobs=self.prompt_logprobs is None,
            **self.generation_request_fields(),
        )
