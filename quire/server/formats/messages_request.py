"""Body of POST /v1/messages: converts content blocks to messages of OpenAI's chat route.

One Anthropic message may become several: tool results are blocks of a user message there and
messages of their own here. If the last message is the assistant's, the answer continues it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from quire.errors import RequestError, Unsupported
from quire.server.formats.ignored_fields import IgnoredField
from quire.server.formats.request_body import Integer, StringList
from quire.server.formats.speculation_fields import SpeculationFields
from quire.server.formats.structured_output import StructuredOutputFields
from quire.server.generation.generation_request import (
    ChatMessageDict,
    Conversation,
    GenerationRequest,
)

CLIENT_FIELD_NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "parameters": "input_schema",
    "reasoning_effort": "output_config.effort",
}
MIN_THINKING_BUDGET = 1024
"""Tokens of thinking, as this API limits it."""

BILLING_HEADER = "x-anthropic-billing-header"
"""A line that one client writes at the start of its system text. It changes with every request, so
nothing behind it would ever be found in the prefix cache."""

_UNSUPPORTED_FIELDS = {
    "container": "this server runs no code",
    "mcp_servers": "this server asks no tool servers",
    "context_management": "this server does not shorten conversations",
    "diagnostics": "reasons of cache misses are not reported",
    "fallbacks": "there is one model here",
}

_HARMLESS_FIELDS = frozenset({"cache_control", "inference_geo", "user_profile_id"})
"""Known fields of this API that change no answer here: every prefix is cached anyway."""

MessageContent = str | list[dict[str, Any]]


class _MessagesObject(BaseModel):
    """An object inside the body; unknown names are kept and mean nothing."""

    model_config = ConfigDict(strict=True, extra="allow")


class AnthropicMessage(_MessagesObject):
    """A message of one side."""

    role: str
    content: MessageContent


class AnthropicToolChoice(_MessagesObject):
    """Whether and which tools to use."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(_MessagesObject):
    """Whether to think before the answer."""

    type: str
    budget_tokens: Integer | None = None
    display: str | None = None


class AnthropicOutputConfig(_MessagesObject):
    """Effort and format of the answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class AnthropicCountTokensRequest(StructuredOutputFields):
    """A conversation."""

    model: str | None = None
    messages: list[AnthropicMessage]
    system: MessageContent | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: AnthropicOutputConfig | None = None
    output_format: dict[str, Any] | None = Field(None, description="As output_config.format.")
    speed: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise RequestError for fields that only this API has."""
        self.refuse_unsupported_features()
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED_FIELDS and value:
                raise Unsupported(f"{name}: {_UNSUPPORTED_FIELDS[name]}", param=name)
        if self.speed not in (None, "standard"):
            raise Unsupported("speed: requests run at one speed here", param="speed")
        if self.thinking is not None and self.thinking.type not in _THINKING_TYPES:
            message = f"thinking.type must be one of {', '.join(_THINKING_TYPES)}"
            raise RequestError(message, param="thinking.type")
        if self.tool_choice is not None and self.tool_choice.type not in _TOOL_CHOICES:
            message = f"tool_choice.type must be one of {', '.join(_TOOL_CHOICES)}"
            raise RequestError(message, param="tool_choice.type")

    def output_formats(self) -> list[tuple[str, Mapping[str, Any] | None]]:
        config = self.output_config or AnthropicOutputConfig()
        return [
            ("output_config.format", config.format),
            ("output_format", self.output_format),
            *super().output_formats(),
        ]

    def ignored_fields(self) -> list[IgnoredField]:
        found = super().ignored_fields()
        found = [
            IgnoredField(one.name, True) if one.name in _HARMLESS_FIELDS else one for one in found
        ]
        return found

    def to_generation_request(self) -> GenerationRequest:
        """As a request for its prompt."""
        self.check()
        return GenerationRequest(
            source=self._conversation(),
            model=self.model,
            tools=self._tools(),
            ignored=self.ignored_fields(),
        )

    def _conversation(self) -> Conversation:
        goes_on = self.messages[-1:] and self.messages[-1].role == "assistant"
        config = self.output_config or AnthropicOutputConfig()
        return Conversation(
            messages=self._messages(),
            template_variables=self._template_variables(),
            reasoning_effort=config.effort,
            add_generation_prompt=not goes_on,
            continue_final_message=bool(goes_on),
        )

    def _tools(self) -> list[dict[str, Any]] | None:
        return [_convert_tool(one, i) for i, one in enumerate(self.tools or ())] or None

    def _messages(self) -> list[ChatMessageDict]:
        made = [] if self.system is None else _convert_system(self.system)
        for i, message in enumerate(self.messages):
            where = f"messages[{i}]"
            if message.role not in _CONVERTERS:
                raise _invalid_field(f"{where}.role", "user, assistant or system")
            if isinstance(message.content, str):
                made.append({"role": message.role, "content": message.content})
            else:
                made.extend(_CONVERTERS[message.role](message.content, f"{where}.content"))
        return made

    def _template_variables(self) -> dict[str, Any]:
        """`enable_thinking` is what templates of models that can do both look at."""
        thinks = None if self.thinking is None else _THINKING_TYPES[self.thinking.type]
        given = {} if thinks is None else {"enable_thinking": thinks}
        return {**given, **(self.chat_template_kwargs or {})}


class AnthropicMessagesRequest(AnthropicCountTokensRequest, SpeculationFields):
    """A conversation, and how to continue it.

    A budget of thinking that this server cannot keep is reported as ignored and not refused: a
    client cannot ask for thinking without naming one, and max_tokens bounds it all.
    """

    max_tokens: Integer
    stop_sequences: StringList | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Integer | None = None
    top_p: float | None = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    priority: Integer | None = None
    request_id: str | None = None
    x_timing: bool | None = Field(None, description="Say where the time went.")

    def check(self) -> None:
        super().check()
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and not MIN_THINKING_BUDGET <= budget < self.max_tokens:
            message = (
                f"thinking.budget_tokens must be >= {MIN_THINKING_BUDGET} and less than max_tokens "
                f"({self.max_tokens}), got {budget}"
            )
            raise RequestError(message, param="thinking.budget_tokens")

    def to_generation_request(self) -> GenerationRequest:
        self.check()
        choice, thinking = self.tool_choice, self.thinking or AnthropicThinking(type="adaptive")
        return GenerationRequest(
            source=self._conversation(),
            model=self.model,
            sampling=self._sampling(),
            field_names=CLIENT_FIELD_NAMES,
            structure=self.structured_output(),
            tools=self._tools(),
            tool_choice=None if choice is None else _convert_tool_choice(choice),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            include_reasoning=thinking.display != "omitted",
            thinking_budget=0 if thinking.type == "disabled" else thinking.budget_tokens,
            stream=bool(self.stream),
            include_usage=True,
            timing=bool(self.x_timing),
            priority=self.priority,
            salt=self.cache_salt,
            request_id=self.request_id,
            ignored=self.ignored_fields(),
        )

    def _sampling(self) -> dict[str, Any]:
        given = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "stop": self.stop_sequences or None,
            "extra_args": self.vllm_xargs,
            **self.speculation_values(),
        }
        return {name: value for name, value in given.items() if value is not None}


_THINKING_TYPES = {"enabled": True, "adaptive": None, "disabled": False, "between_tools": None}
"""By type of `thinking`: the switch of the template. None: its default."""

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "function"}


def _convert_tool_choice(given: AnthropicToolChoice) -> str | dict[str, Any]:
    if given.type == "tool":
        return {"type": "function", "function": {"name": given.name}}
    return _TOOL_CHOICES[given.type]


def _convert_tool(given: Mapping[str, Any], i: int) -> dict[str, Any]:
    """A tool as chat templates know it."""
    kind, name = given.get("type") or "custom", given.get("name")
    if kind != "custom":
        message = f"tools[{i}]: {kind!r:.40} is not served: only tools that the client runs are"
        raise Unsupported(message, param="tools")
    if not isinstance(name, str) or not name:
        raise RequestError(f"tools[{i}].name must be the name of a tool", param="tools")
    if not isinstance(given.get("input_schema"), Mapping):
        raise RequestError(f"tools[{i}].input_schema must be a JSON schema", param="tools")
    function = {"name": name, "parameters": given["input_schema"]}
    for key in ("description", "strict"):
        if given.get(key) is not None:
            function[key] = given[key]
    return {"type": "function", "function": function}


def _convert_system(given: MessageContent) -> list[ChatMessageDict]:
    if isinstance(given, str):
        text = given
        if given.startswith(BILLING_HEADER):
            text = given.partition("\n")[2]
        return [{"role": "system", "content": text}] if text else []
    parts = [_convert_text(block, f"system[{i}]") for i, block in enumerate(given)]
    kept = [part for part in parts if not part["text"].startswith(BILLING_HEADER)]
    return [{"role": "system", "content": kept}] if kept else []


def _convert_user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[ChatMessageDict]:
    """Text as it is, and each result as a message of its own, in their order."""
    made: list[ChatMessageDict] = []
    texts: list[dict[str, Any]] | None = None
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            made.append(_convert_tool_result(block, f"{where}[{i}]"))
            texts = None
            continue
        if texts is None:
            texts = []
            made.append({"role": "user", "content": texts})
        texts.append(_convert_part(block, f"{where}[{i}]"))
    return made or [{"role": "user", "content": ""}]


def _convert_tool_result(block: Mapping[str, Any], where: str) -> ChatMessageDict:
    content = block.get("content", "")
    if isinstance(content, list):
        content = [_convert_part(part, f"{where}.content[{j}]") for j, part in enumerate(content)]
    elif not isinstance(content, str):
        raise _invalid_field(f"{where}.content", "text or a list of blocks")
    if not isinstance(block.get("tool_use_id"), str):
        raise _invalid_field(f"{where}.tool_use_id", "the id of a tool_use block")
    made: ChatMessageDict = {
        "role": "tool",
        "tool_call_id": block["tool_use_id"],
        "content": content,
    }
    if block.get("is_error"):
        made["is_error"] = True
    return made


def _convert_assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> list[ChatMessageDict]:
    """One message: thoughts, text, then calls. Redacted reasoning cannot be read here."""
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            calls.append(_convert_tool_use(block, f"{where}[{i}]"))
        elif kind != "redacted_thinking":
            texts.append(_convert_text(block, f"{where}[{i}]"))
    made: ChatMessageDict = {"role": "assistant", "content": texts or ""}
    if thoughts:
        made["reasoning"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return [made]


def _convert_tool_use(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name in ("id", "name"):
        if not isinstance(block.get(name), str):
            raise _invalid_field(f"{where}.{name}", "a string")
    if not isinstance(block.get("input"), Mapping):
        raise _invalid_field(f"{where}.input", "an object")
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _convert_system_message(
    blocks: Sequence[Mapping[str, Any]], where: str
) -> list[ChatMessageDict]:
    parts = [_convert_text(block, f"{where}[{i}]") for i, block in enumerate(blocks)]
    return [{"role": "system", "content": parts}]


_CONVERTERS = {
    "user": _convert_user,
    "assistant": _convert_assistant,
    "system": _convert_system_message,
}


def _convert_text(block: object, where: str) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        raise _invalid_field(where, "a block with a 'type'")
    kind = block.get("type")
    if kind != "text":
        message = f"{where}: blocks of type {kind!r:.40} are not served"
        raise Unsupported(message, param="messages")
    if not isinstance(block.get("text"), str):
        raise _invalid_field(f"{where}.text", "a string")
    return {"type": "text", "text": block["text"]}


def _convert_part(block: object, where: str) -> dict[str, Any]:
    """A block of text or an image as a part of OpenAI's chat route."""
    if not isinstance(block, Mapping) or block.get("type") != "image":
        return _convert_text(block, where)
    given = block.get("source")
    source = given if isinstance(given, Mapping) else {}
    kind = source.get("type")
    if kind == "url" and isinstance(source.get("url"), str):
        url = source["url"]
    elif kind == "base64" and isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type', '')};base64,{source['data']}"
    else:
        raise _invalid_field(f"{where}.source", "of type base64, with data, or url, with url")
    return {"type": "image_url", "image_url": {"url": url}}


def _invalid_field(where: str, allowed: str) -> RequestError:
    return RequestError(f"{where} must be {allowed}", param="messages")
