"""Fields that the bodies of all pooling routes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from quire.core.pooling_params import PoolingParams
from quire.errors import RequestError, TooLong
from quire.server.formats.chat_request import ChatMessageList
from quire.server.formats.request_body import Integer, RequestBody, TokenIdList
from quire.server.formats.vector_encoding import EncodingFormat, VectorEncoding
from quire.server.generation.generation_request import Conversation, GenerationRequest
from quire.server.pooling.pooling_request import (
    MAX_INPUTS,
    Conversations,
    Inputs,
    PoolingRequest,
    TruncationSide,
)
from quire.text.marked_media import MarkedTexts
from quire.text.pooling_output import EmbedDtype, Endianness
from quire.text.score_pairs import read_texts

TextList = Annotated[list[str], Field(fail_fast=True)]
ItemDict = dict[str, Any]
ItemList = Annotated[list[ItemDict], Field(fail_fast=True)]
MixedList = Annotated[list[str | ItemDict], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIdList], Field(fail_fast=True)]
ChatList = Annotated[list[ChatMessageList], Field(fail_fast=True)]


class PoolingFields(RequestBody):
    """Fields of one request for the engine."""

    model: str | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: TruncationSide | None = None
    padding: Literal["do_not_pad"] | None = Field(None, description="Texts are never padded.")
    priority: Integer | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    x_timing: bool | None = Field(None, description="Show where the time went.")
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="Options of images, video and audio; with --trust-request-mm-kwargs."
    )
    media_io_kwargs: dict[str, Any] | None = Field(
        None, description="Options of reading files, by modality; with --trust-request-mm-kwargs."
    )

    def request_fields(self) -> dict[str, Any]:
        """Fields of PoolingRequest that these bodies name alike."""
        self.refuse_unsupported_features()
        return {
            "model": self.model,
            "truncation_side": self.truncation_side,
            "priority": self.priority,
            "salt": self.cache_salt,
            "request_id": self.request_id,
            "timing": bool(self.x_timing),
            "processor_kwargs": self.mm_processor_kwargs,
            "media_io_kwargs": self.media_io_kwargs,
            "ignored": self.ignored_fields(),
        }

    def conversations_source(self, chats: list[Conversation]) -> Conversations:
        """Return conversations as the source of a request."""
        return Conversations(
            request=GenerationRequest(
                source=chats,
                model=self.model,
                salt=self.cache_salt,
                processor_kwargs=self.mm_processor_kwargs,
                media_io_kwargs=self.media_io_kwargs,
            )
        )


class EncodingFields(RequestBody):
    """How vectors are written."""

    encoding_format: EncodingFormat | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None

    def encoding(self) -> VectorEncoding:
        """Raises RequestError."""
        return VectorEncoding(
            self.encoding_format or "float",
            self.embed_dtype or "float32",
            self.endianness or "native",
        )


class InputFields(PoolingFields):
    """Texts, token ids, or conversations, as OpenAI and vLLM take them."""

    input: str | TextList | TokenIdList | TokenIdLists | MixedList | None = None
    messages: ChatMessageList | ChatList | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = Field(
        None, description="Refused unless the server has --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    use_activation: bool | None = None

    def source(self) -> Inputs | Conversations:
        """Return what is to be pooled. Raises RequestError, Unsupported."""
        if self.messages is not None:
            if self.input is not None:
                raise RequestError("give input or messages, not both", param="input")
            chats = self._conversations(self.messages)
            return self.conversations_source(chats)
        if self.input is None:
            message = "give input (text or token ids), or messages"
            raise RequestError(message, param="input")
        special = self.add_special_tokens is not False
        media = MarkedTexts()
        prompts = prompts_of(self.input, media=media)
        found = media if media.has_media else None
        return Inputs(prompts=prompts, add_special_tokens=special, media=found)

    def _conversations(self, given: ChatMessageList | list[ChatMessageList]) -> list[Conversation]:
        chats: Any = given if given and isinstance(given[0], list) else [given]
        check_count(chats, "messages")
        return [
            Conversation(
                messages=one,
                chat_template=self.chat_template,
                template_variables=self.chat_template_kwargs or {},
                add_generation_prompt=bool(self.add_generation_prompt),
                continue_final_message=self.continue_final_message,
                add_special_tokens=bool(self.add_special_tokens),
            )
            for one in chats
        ]

    def to_pooling_request(
        self,
        params: PoolingParams,
        *,
        input_type: str | None = None,
        cuts: bool = False,
        names: Mapping[str, str] | None = None,
    ) -> PoolingRequest:
        """Translate the body. params: those of the route. names: of its fields, for errors."""
        params.truncate_prompt_tokens = self.truncate_prompt_tokens
        if cuts and params.truncate_prompt_tokens is None:
            params.truncate_prompt_tokens = -1
        params.verify()
        source = self.source()
        name = "input" if isinstance(source, Inputs) else "messages"
        return PoolingRequest(
            source=source,
            field_names={"prompt": name, **(names or {})},
            params=params,
            input_type=input_type,
            cuts=cuts,
            **self.request_fields(),
        )


def prompts_of(
    given: Any, param: str = "input", media: MarkedTexts | None = None
) -> list[str | list[int] | tuple[str, str]]:
    """The prompts of a field, each a text or token ids. media: gets the media of texts.

    Raises RequestError, Unsupported.
    """
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    check_count(given, param)
    if any(isinstance(one, dict) for one in given):
        return [*read_texts(given, param, media or MarkedTexts())]
    return list(given)


def check_count(given: list[Any], param: str, most: int = MAX_INPUTS) -> None:
    """Raise RequestError (TooLong) unless there are 1 to `most` items."""
    if not 1 <= len(given) <= most:
        kind = TooLong if given else RequestError
        raise kind(f"{param} must hold 1 to {most} items, got {len(given)}", param=param)
