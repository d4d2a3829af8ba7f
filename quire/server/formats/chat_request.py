"""Bodies of POST /v1/chat/completions and of its batch form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from quire.errors import RequestError
from quire.server.formats.request_body import Integer
from quire.server.formats.sampling_fields import SamplingFields
from quire.server.generation.generation_request import MAX_PROMPTS, Conversation, GenerationRequest

ChatMessageList = list[dict[str, Any]]


class ChatTemplateFields(SamplingFields):
    """Fields that make a prompt of messages; /tokenize has them too."""

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = Field(
        None, description="Refused unless the server has --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="Refused unless the server has --trust-request-mm-kwargs."
    )
    media_io_kwargs: dict[str, Any] | None = Field(
        None, description="Refused unless the server has --trust-request-mm-kwargs."
    )
    reasoning_effort: str | None = None

    def to_conversation(self, messages: ChatMessageList) -> Conversation:
        """Return the conversation for the template."""
        if self.add_generation_prompt and self.continue_final_message:
            message = "add_generation_prompt and continue_final_message exclude each other"
            raise RequestError(message, param="continue_final_message")
        begins = not self.continue_final_message and self.add_generation_prompt is not False
        return Conversation(
            messages=messages,
            documents=self.documents,
            chat_template=self.chat_template,
            template_variables=self.chat_template_kwargs or {},
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=begins,
            continue_final_message=self.continue_final_message,
            add_special_tokens=bool(self.add_special_tokens),
        )


class ChatCompletionFields(ChatTemplateFields):
    """Fields of a chat completion."""

    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    max_completion_tokens: Integer | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    modalities: list[str] | None = Field(None, description="Only ['text'].")
    echo: bool = False

    def sampling_values(self) -> dict[str, Any]:
        given = super().sampling_values()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        if self.logprobs and not self.logprob_token_ids:
            given["logprobs"] = self.top_logprobs or 0
        return given

    def _to_generation_request(
        self, source: Conversation | list[Conversation]
    ) -> GenerationRequest:
        said = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return GenerationRequest(
            source=source,
            sampling=self.sampling_values(),
            field_names={"max_tokens": said, "logprobs": "top_logprobs"},
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            include_reasoning=self.include_reasoning is not False,
            modalities=self.modalities or ("text",),
            echo=self.echo,
            processor_kwargs=self.mm_processor_kwargs,
            media_io_kwargs=self.media_io_kwargs,
            **self.generation_request_fields(),
        )


class ChatCompletionRequest(ChatCompletionFields):
    """A conversation, and how to continue it."""

    messages: ChatMessageList

    def to_generation_request(self) -> GenerationRequest:
        self.refuse_unsupported_features()
        return self._to_generation_request(self.to_conversation(self.messages))


class BatchChatCompletionRequest(ChatCompletionFields):
    """Several conversations; the answer has a choice for each. Not streamed."""

    messages: Annotated[list[ChatMessageList], Field(min_length=1, max_length=MAX_PROMPTS)]

    def to_generation_request(self) -> GenerationRequest:
        self.refuse_unsupported_features()
        return self._to_generation_request([self.to_conversation(one) for one in self.messages])
