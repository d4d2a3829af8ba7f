"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from quire.core.params import MAX_SEQUENCES
from quire.errors import RequestError, Unsupported
from quire.server.protocol.fields import Ids, SamplingBody, Texts

MAX_PROMPTS = 1024


class CompletionBody(SamplingBody):
    """One or more prompts to go on with."""

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise Unsupported("suffix: this model does not fill in the middle", param="suffix")
        if (self.response_format or {}).get("type", "text") != "text":
            message = "response_format: structured outputs are not built yet"
            raise Unsupported(message, param="response_format")
        prompts = self.prompts()
        if not prompts or len(prompts) > MAX_PROMPTS:
            message = f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}"
            raise RequestError(message, param="prompt")
        if len(prompts) > 1 and len(prompts) * max(self.n or 1, self.best_of or 1) > MAX_SEQUENCES:
            message = f"prompts times n must be at most {MAX_SEQUENCES}"
            raise RequestError(message, param="n")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens must be >= 1 without echo, got 0", param="max_tokens")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.max_tokens == 0:
            given["max_tokens"] = 1  # what it yields is dropped: only the prompt is shown
            given["min_tokens"] = 0
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                given["prompt_logprobs"] = self.logprobs
        return given
