"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from quire.errors import Unsupported
from quire.server.asked import MAX_PROMPTS, Asked, Prompts
from quire.server.protocol.base import Ids
from quire.server.protocol.fields import SamplingBody


class CompletionBody(SamplingBody):
    """One or more prompts to go on with."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    )
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = Field(None, description="Refused: no model here fills in the middle.")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def scores_only(self) -> bool:
        """Nothing is to be generated: the prompt is echoed, and scored."""
        return self.max_tokens == 0 and self.echo

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.scores_only:
            given["max_tokens"] = 1  # what it yields is dropped
            given["min_tokens"] = 0
        if self.logprobs is not None:
            if not self.logprob_token_ids:
                given["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                given["prompt_logprobs"] = self.logprobs
        return given

    def to_asked(self) -> Asked:
        self.refuse_later_features()
        if self.suffix:
            raise Unsupported("suffix: this model does not fill in the middle", param="suffix")
        special = self.add_special_tokens is not False
        return Asked(
            source=Prompts(prompts=self.prompts(), add_special_tokens=special),
            sampling=self.sampling(),
            max_tokens=16,
            words={"prompt_token_ids": "prompt"},
            echo=self.echo,
            prompt_only=self.scores_only,
            streams_prompt_logprobs=self.prompt_logprobs is None,
            **self.common(),
        )
