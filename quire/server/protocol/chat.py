"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from quire.errors import RequestError, Unsupported
from quire.server.protocol.fields import SamplingBody


class Templated(SamplingBody):
    """What makes a prompt from messages; /tokenize reads it too."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = Field(None, description="Refused: the server's template is used.")
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def check(self) -> None:
        super().check()
        if self.add_generation_prompt and self.continue_final_message:
            if "add_generation_prompt" in self.model_fields_set:
                message = "add_generation_prompt and continue_final_message exclude each other"
                raise RequestError(message, param="continue_final_message")
            self.add_generation_prompt = False
        if self.chat_template is not None:
            message = "this server does not run chat templates that requests bring"
            raise RequestError(message, param="chat_template")
        if self.tools is not None and not self.tools:
            raise RequestError("tools must not be empty; leave it out", param="tools")


class ChatBody(Templated):
    """A conversation, and how it is to go on."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    modalities: list[str] | None = None
    echo: bool = False

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            message = f"response_format {kind!r:.40}: structured outputs are not built yet"
            raise Unsupported(message, param="response_format")
        if self.tool_choice not in (None, "none", "auto"):
            message = "tool_choice must be 'none' or 'auto': forced tool calls are not built yet"
            raise Unsupported(message, param="tool_choice")
        if self.parallel_tool_calls is False and self.tools:
            message = (
                "parallel_tool_calls=false: reading tool calls out of the text is not built yet"
            )
            raise Unsupported(message, param="parallel_tool_calls")
        if self.include_reasoning is False:
            message = "include_reasoning=false: telling reasoning from text is not built yet"
            raise Unsupported(message, param="include_reasoning")
        if self.modalities not in (None, ["text"]):
            raise Unsupported("modalities must be ['text']", param="modalities")

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given
