"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from quire.errors import RequestError
from quire.server.asked import Asked, Prompts
from quire.server.protocol.base import Body, Ids
from quire.server.protocol.chat import Messages, Templated


class TokenizeBody(Body):
    """A text to cut into tokens."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    def prompts(self) -> Prompts:
        return Prompts(prompts=[self.prompt], add_special_tokens=self.add_special_tokens)


class TokenizeChatBody(Templated):
    """A conversation to render and cut into tokens."""

    messages: Messages
    return_token_strs: bool | None = None

    def to_asked(self) -> Asked:
        """Only the conversation matters."""
        source = self.conversation(self.messages)
        return Asked(source=source, model=self.model, ignored=self.ignored())


class DetokenizeBody(Body):
    """Tokens to make text of."""

    model: str | None = None
    tokens: Ids

    def prompts(self) -> Prompts:
        return Prompts(prompts=[self.tokens])


class EitherBody(Body):
    """What tells the two forms of /tokenize apart."""

    def form(self) -> type[TokenizeBody | TokenizeChatBody]:
        given = self.model_extra or {}
        if "messages" in given and "prompt" in given:
            raise RequestError("give prompt or messages, not both", param="prompt")
        return TokenizeChatBody if "messages" in given else TokenizeBody
