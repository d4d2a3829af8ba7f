"""Generation request: the request of a client, in one form for all APIs.

The body of each API becomes a `GenerationRequest`, once, and is only translated, so that all
checks, limits and counts are the same for all APIs. Nothing is copied: lists and dicts are those of
the body, and they are never modified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.structured_output_params import StructuredOutputsParams
from quire.media.expand import ReadyItem
from quire.server.formats.ignored_fields import IgnoredField
from quire.text.media_prompt import MediaConversation

ChatMessageDict = dict[str, Any]

MAX_PROMPTS = 1024
"""Of one body."""


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """Media of a conversation: what its template writes for them, and the items in order."""

    conversation: MediaConversation
    items: Sequence[ReadyItem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages for the chat template, in the form of OpenAI's chat route.

    Other APIs convert theirs: text blocks to content parts, tool use to assistant
    `tool_calls`, tool results to messages of the role tool, thinking to `reasoning`.
    """

    messages: Sequence[ChatMessageDict]
    documents: Sequence[dict[str, Any]] | None = None
    chat_template: str | None = None
    """A template that the request brings; refused unless the server trusts such."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs`; they go over those of the server."""
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    """The template writes them itself."""
    media: LoadedMedia | None = None
    """Set by quire.server.generation.media: the messages have no contents of media then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompts:
    """Texts, token ids or embeddings that are continued as they are."""

    prompts: Sequence[str | list[int] | Mapping[str, Any]]
    """A mapping: a prompt of quire.text.prompts with more than text or ids."""
    embeds: Sequence[str] = ()
    """Prompts before those: base64 of quire.server.formats.torch_archive."""
    add_special_tokens: bool = True
    suffix: str | None = None
    """Text after the output: quire.text.fill_in_middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputRequest:
    """A constraint on the text: a schema, a grammar, choices."""

    params: StructuredOutputsParams
    field_name: str
    """The field of the body, in the client's words."""
    param: str
    """Path of the schema or grammar in the body: response_format.json_schema.schema."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """Field of StructuredOutputsParams -> the client's word for it."""
    content_only: bool = False
    """It constrains the content of an answer, and not its tool calls."""
    strict: bool = False
    """A keyword of its schema that cannot be enforced is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOptions:
    """Beam search in place of sampling; as many beams as answers (n)."""

    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One body, understood. Prompt p, sample s is the choice p * n + s."""

    source: Conversation | RawPrompts | Sequence[Conversation]
    """A list of conversations is answered with a choice for each."""
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that the client gave, by their names there. None is not given."""
    max_tokens: int | None = None
    """`max_tokens` where neither client nor generation config gives it; None: the context."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """Name in SamplingParams -> the API's own name of the field, for errors."""
    beams: BeamSearchOptions | None = None
    structure: StructuredOutputRequest | None = None
    tools: Sequence[dict[str, Any]] | None = None
    """Of all conversations, as the template gets them: {"type": "function", "function": {...}}."""
    tool_choice: str | dict[str, Any] | None = None
    """In the words of OpenAI's chat: quire.tool_grammar.tool_choice."""
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    thinking_budget: int | None = None
    """Tokens of thought that are wished for, if this server can count them (`settled`)."""

    modalities: Sequence[str] = ("text",)
    processor_kwargs: Mapping[str, Any] | None = None
    """`mm_processor_kwargs`."""
    media_io_kwargs: Mapping[str, Any] | None = None

    stream: bool = False
    stream_options: bool = False
    """Options of the stream were given."""
    include_usage: bool = False
    """The stream ends with the usage."""
    continuous_usage: bool = False
    """Every chunk has the usage so far."""

    echo: bool = False
    prompt_only: bool = False
    """Nothing is generated: the prompt is scored (max_tokens 0 with echo)."""
    streams_prompt_logprobs: bool = False
    """The API's chunks have a field for them."""
    token_ids: bool = False
    """Show the ids of prompt and answer (`return_token_ids`)."""
    tokens_as_ids: bool = False
    """Show tokens of logprobs as token_id:ID."""
    prompt_text: bool = False
    """Show the prompt as the model reads it (`return_prompt_text`)."""
    timing: bool = False
    """Show where the time went (`x_timing`)."""

    truncation_side: str | None = None
    priority: int | None = None
    salt: str | None = None
    """Separates what the prefix cache may share (`cache_salt`)."""
    request_id: str | None = None
    """The client's wish; a header X-Request-Id goes over it."""
    ignored: Sequence[IgnoredField] = ()
    """Fields of the body that have no effect (`RequestBody.ignored_fields()`); a header of the
    answer names them.
    """

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        given = self.sampling.get("n")
        return 1 if given is None else given

    @property
    def prompt_chars(self) -> int:
        """Characters of all texts (ids, base64) that are to become prompts, without tools."""
        if isinstance(self.source, RawPrompts):
            suffix = len(self.source.suffix or "") * len(self.source.prompts)
            texts = (*self.source.prompts, *self.source.embeds)
            return sum(map(len, texts)) + suffix
        return sum(_count_chars(one.messages) for one in self.conversations)

    @property
    def add_special_tokens(self) -> bool:
        """Whether the tokenizer adds its special tokens to the prompts."""
        if isinstance(self.source, RawPrompts):
            return self.source.add_special_tokens
        return any(one.add_special_tokens for one in self.conversations)

    @property
    def conversations(self) -> Sequence[Conversation]:
        """The conversations, if it is about such."""
        if isinstance(self.source, Conversation):
            return (self.source,)
        return () if isinstance(self.source, RawPrompts) else self.source


def _count_chars(messages: Sequence[ChatMessageDict]) -> int:
    """Count characters of messages; other values are refused later."""
    found = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else (content,)
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            found += len(text) if isinstance(text, str) else 16
    return found
