"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from quire.errors import RequestError
from quire.server.formats.request_body import Integer, TokenIdList
from quire.server.formats.sampling_fields import SamplingFields
from quire.server.generation.generation_request import MAX_PROMPTS, GenerationRequest, RawPrompts


class CompletionRequest(SamplingFields):
    """One or more prompts to continue."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | TokenIdList
        | Annotated[list[TokenIdList], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | None
    ) = None
    prompt_embeds: (
        str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)] | None
    ) = Field(
        None,
        description="Embeddings in place of tokens: base64 of what torch.save(tensor) writes, "
        "[tokens, hidden size], one or several. Their choices come before those of `prompt`.",
    )
    echo: bool = False
    logprobs: Integer | None = None
    suffix: str | None = Field(
        None, description="Text after the output; for models that fill in the middle."
    )

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as ids. Beside embeddings an empty one is none."""
        if not self.prompt and self.prompt_embeds:
            return []
        if self.prompt is None:
            message = "give prompt (text or token ids), or prompt_embeds"
            raise RequestError(message, param="prompt")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]

    def embeds(self) -> list[str]:
        """The prompts that are embeddings."""
        if not self.prompt_embeds:
            return []
        for name in ("echo", "suffix", "return_prompt_text", "use_beam_search"):
            if getattr(self, name):
                message = f"{name} cannot be combined with prompt_embeds"
                raise RequestError(message, param=name)
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds

    @property
    def is_prompt_only(self) -> bool:
        """Whether the prompt is only echoed and scored, and nothing generated."""
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
                prompts=self.prompts(),
                embeds=self.embeds(),
                add_special_tokens=special,
                suffix=self.suffix,
            ),
            sampling=self.sampling_values(),
            max_tokens=16,
            field_names={"prompt_token_ids": "prompt"},
            echo=self.echo,
            prompt_only=self.is_prompt_only,
            streams_prompt_logprobs=self.prompt_logprobs is None,
            **self.generation_request_fields(),
        )
