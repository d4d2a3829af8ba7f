"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from quire.errors import RequestError
from quire.server.formats.chat_request import ChatMessageList, ChatTemplateFields
from quire.server.formats.request_body import RequestBody, TokenIdList
from quire.server.generation.generation_request import GenerationRequest, RawPrompts


class TokenizeCompletionRequest(RequestBody):
    """A text to cut into tokens."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    def prompts(self) -> RawPrompts:
        return RawPrompts(prompts=[self.prompt], add_special_tokens=self.add_special_tokens)


class TokenizeChatRequest(ChatTemplateFields):
    """A conversation to render and cut into tokens."""

    messages: ChatMessageList
    return_token_strs: bool | None = None

    def to_generation_request(self) -> GenerationRequest:
        """Only the conversation matters."""
        source = self.to_conversation(self.messages)
        return GenerationRequest(
            source=source,
            model=self.model,
            tools=self.tools,
            processor_kwargs=self.mm_processor_kwargs,
            media_io_kwargs=self.media_io_kwargs,
            ignored=self.ignored_fields(),
        )


class DetokenizeRequest(RequestBody):
    """Tokens to make text of."""

    model: str | None = None
    tokens: TokenIdList

    def prompts(self) -> RawPrompts:
        return RawPrompts(prompts=[self.tokens])


class TokenizeRequestKind(RequestBody):
    """Distinguishes the two forms of /tokenize."""

    def request_type(self) -> type[TokenizeCompletionRequest | TokenizeChatRequest]:
        given = self.model_extra or {}
        if "messages" in given and "prompt" in given:
            raise RequestError("give prompt or messages, not both", param="prompt")
        return TokenizeChatRequest if "messages" in given else TokenizeCompletionRequest
