"""Body of POST /v1/responses: converts its items to messages of a conversation.

Items are flatter than messages: text and calls of the model are items side by side.
`ItemConverter` joins those of one turn into one assistant message, as templates expect it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from quire.errors import RequestError, Unsupported
from quire.server.formats.ignored_fields import IgnoredField
from quire.server.formats.request_body import Integer, LogitBias, StopTokenIds, StringList
from quire.server.formats.speculation_fields import SpeculationFields
from quire.server.generation.generation_request import (
    ChatMessageDict,
    Conversation,
    GenerationRequest,
)

LOGPROBS_INCLUDE = "message.output_text.logprobs"
INCLUDE_VALUES = frozenset(
    {
        LOGPROBS_INCLUDE,
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
"""What `include` may name. All but the logprobs belong to items that this server never makes."""

CLIENT_FIELD_NAMES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "parameters": "parameters",
    "reasoning_effort": "reasoning.effort",
}

_UNSUPPORTED_FIELDS = {
    "prompt": "prompts by id exist only on OpenAI's servers; send instructions and input",
    "conversation": "conversations are not kept here; send previous_response_id or all items",
    "moderation": "this server does not moderate",
    "context_management": "this server does not shorten conversations; see truncation",
    "enable_response_messages": "raw messages are not shown; /tokenize shows the prompt",
    "previous_input_messages": "send the items of earlier turns as input",
}

_HARMLESS_FIELDS = frozenset(
    {"prompt_cache_options", "prompt_cache_retention", "image", "access_programs"}
)
"""Known fields of this API that change no answer here."""


class _ResponsesObject(BaseModel):
    """An object inside the body; unknown names are kept and mean nothing."""

    model_config = ConfigDict(strict=True, extra="allow")


class ResponsesReasoning(_ResponsesObject):
    """Options of the reasoning."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesTextConfig(_ResponsesObject):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(SpeculationFields):
    """Items, and how a model's answer to them is to be made."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Integer | None = None
    max_tool_calls: Integer | None = Field(
        None, description="Of built-in tools; there are none here."
    )
    metadata: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponsesReasoning | None = None
    include: StringList | None = None
    include_reasoning: bool | None = None
    text: ResponsesTextConfig | None = None
    top_logprobs: Integer | None = None
    truncation: str | None = Field(
        None, description="auto: a prompt that is too long loses its beginning. Else: disabled."
    )
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = None
    stop: str | StringList | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: LogitBias | None = None
    vllm_xargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: Integer | None = None
    request_id: str | None = None
    x_timing: bool | None = Field(None, description="Show where the time went.")

    def check(self) -> None:
        """Raise RequestError for fields that only this API has."""
        self.refuse_unsupported_features()
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED_FIELDS and value:
                raise Unsupported(f"{name}: {_UNSUPPORTED_FIELDS[name]}", param=name)
        if self.truncation not in (None, "auto", "disabled"):
            message = f"truncation must be 'auto' or 'disabled', got {self.truncation!r:.40}"
            raise RequestError(message, param="truncation")
        for name in self.include or ():
            if name not in INCLUDE_VALUES:
                allowed = ", ".join(sorted(INCLUDE_VALUES))
                raise RequestError(
                    f"include must hold some of {allowed}; got {name!r:.60}", param="include"
                )
        self._check_summary()

    def _check_summary(self) -> None:
        asked = self.reasoning or ResponsesReasoning()
        for name in ("summary", "generate_summary"):
            wanted = getattr(asked, name)
            if wanted not in (None, "auto"):  # auto: the best there is, which is none
                message = f"reasoning.{name}: this server does not summarise reasoning"
                raise Unsupported(message, param=f"reasoning.{name}")

    def output_formats(self) -> list[tuple[str, Mapping[str, Any] | None]]:
        wanted = self.text.format if self.text is not None else None
        return [("text.format", wanted), *super().output_formats()]

    def ignored_fields(self) -> list[IgnoredField]:
        found = super().ignored_fields()
        extra = [one.name for one in found if one.name in _HARMLESS_FIELDS]
        found = [one for one in found if one.name not in extra]
        if self.text is not None and self.text.verbosity is not None:
            extra.append("text.verbosity")
        if "reasoning.encrypted_content" in (self.include or ()):
            extra.append("include")
        extra += [
            f"reasoning.{name}"
            for name in (self.reasoning or ResponsesReasoning()).model_extra or ()
        ]
        extra += [f"stream_options.{name}" for name in self.stream_options or ()]
        return [*found, *(IgnoredField(name, True) for name in extra)]

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS_INCLUDE in (self.include or ())

    def to_generation_request(
        self, earlier: Sequence[ChatMessageDict] = (), *, ignored: Sequence[IgnoredField] = ()
    ) -> GenerationRequest:
        """earlier: messages of the response that this one continues. ignored: more of them."""
        self.check()
        effort = self.reasoning.effort if self.reasoning is not None else None
        return GenerationRequest(
            source=Conversation(
                messages=self.build_messages(earlier),
                template_variables=self.chat_template_kwargs or {},
                reasoning_effort=effort,
            ),
            model=self.model,
            sampling=self._sampling(),
            field_names=CLIENT_FIELD_NAMES,
            structure=self.structured_output(),
            tools=[_convert_tool(one, i) for i, one in enumerate(self.tools or ())] or None,
            tool_choice=_convert_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            include_reasoning=self.include_reasoning is not False,
            stream=bool(self.stream or self.background),
            include_usage=True,
            timing=bool(self.x_timing),
            priority=self.priority,
            salt=self.cache_salt,
            request_id=self.request_id,
            ignored=[*self.ignored_fields(), *ignored],
        )

    def build_messages(self, earlier: Sequence[ChatMessageDict] = ()) -> list[ChatMessageDict]:
        """The conversation. Instructions are never those of an earlier response."""
        made: list[ChatMessageDict] = []
        if self.instructions is not None:
            made.append({"role": "system", "content": self.instructions})
        made.extend(earlier)
        if isinstance(self.input, str):
            made.append({"role": "user", "content": self.input})
        else:
            made.extend(ItemConverter().convert(self.input))
        return made

    def _sampling(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _SAMPLING_NAMES}
        given["max_tokens"] = self.max_output_tokens
        given["extra_args"] = self.vllm_xargs
        if self.wants_logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if self.truncation == "auto":
            given["truncate_prompt_tokens"] = -1
        given |= self.speculation_values()
        return {name: value for name, value in given.items() if value is not None}


_SAMPLING_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
)


def _convert_tool(given: Mapping[str, Any], i: int) -> dict[str, Any]:
    """A tool as chat templates know it."""
    kind, name = given.get("type"), given.get("name")
    if kind != "function":
        message = f"tools[{i}]: only tools of the type function are served, not {kind!r:.40}"
        raise Unsupported(message, param="tools")
    if not isinstance(name, str) or not name:
        raise RequestError(f"tools[{i}].name must be the name of a function", param="tools")
    shown = ("name", "description", "parameters", "strict")
    function = {key: given[key] for key in shown if given.get(key) is not None}
    return {"type": "function", "function": function}


def _convert_tool_choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(given, dict) and given.get("type") == "function" and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given


class ItemConverter:
    """Reads items into messages. One use each."""

    def __init__(self) -> None:
        self._messages: list[ChatMessageDict] = []
        self._assistant_turn: ChatMessageDict | None = (
            None  # the assistant message that calls may still join
        )
        self._reasoning_texts: list[str] = []

    def convert(self, items: Sequence[object]) -> list[ChatMessageDict]:
        """The messages of these items. Raises RequestError."""
        if not items:
            raise RequestError("input is empty; give at least one item", param="input")
        for i, item in enumerate(items):
            if not isinstance(item, Mapping):
                raise _invalid_field(f"input[{i}]", "an object with 'type' or 'role'")
            self._convert_item(item, f"input[{i}]")
        self._add_assistant_message()  # thoughts that nothing followed
        return self._messages

    def _convert_item(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._convert_message(item, where)
        elif kind == "reasoning":
            self._convert_reasoning(item)
        elif kind == "function_call":
            self._convert_call(item, where)
        elif kind == "function_call_output":
            self._convert_call_output(item, where)
        elif kind is None:
            raise _invalid_field(where, "an item with a 'type', or a message with a 'role'")
        else:
            raise Unsupported(f"{where}: items of type {kind!r:.40} are not served", param="input")

    def _convert_message(self, item: Mapping[str, Any], where: str) -> None:
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str) or not role:
            raise _invalid_field(f"{where}.role", "one of user, assistant, system, developer")
        if content is None:
            raise _invalid_field(f"{where}.content", "text or a list of parts")
        if role == "assistant":
            self._assistant_turn = self._add_assistant_message({"role": role, "content": content})
        else:
            self._end_turn()
            self._messages.append({"role": role, "content": content})

    def _convert_reasoning(self, item: Mapping[str, Any]) -> None:
        """Reasoning goes before the next text. Encrypted reasoning cannot be read here."""
        self._assistant_turn = None
        parts = item.get("content") or item.get("summary") or ()
        texts = (part.get("text") for part in parts if isinstance(part, Mapping))
        self._reasoning_texts.extend(text for text in texts if isinstance(text, str))

    def _convert_call(self, item: Mapping[str, Any], where: str) -> None:
        name, call_id = item.get("name"), item.get("call_id")
        for field, value in (("name", name), ("call_id", call_id)):
            if not isinstance(value, str) or not value:
                raise _invalid_field(f"{where}.{field}", "a non-empty string")
        if self._assistant_turn is None:
            self._assistant_turn = self._add_assistant_message({"role": "assistant", "content": ""})
        function = {"name": name, "arguments": item.get("arguments", "{}")}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant_turn.setdefault("tool_calls", []).append(call)

    def _convert_call_output(self, item: Mapping[str, Any], where: str) -> None:
        output = item.get("output")
        if not isinstance(output, str | list):
            raise _invalid_field(f"{where}.output", "text or a list of parts")
        self._end_turn()
        made: ChatMessageDict = {"role": "tool", "content": output}
        if item.get("call_id") is not None:
            made["tool_call_id"] = item["call_id"]
        self._messages.append(made)

    def _end_turn(self) -> None:
        self._add_assistant_message()
        self._assistant_turn = None

    def _add_assistant_message(self, message: ChatMessageDict | None = None) -> ChatMessageDict:
        """Add an assistant message with the thoughts that led to it."""
        made = message if message is not None else {"role": "assistant", "content": ""}
        if self._reasoning_texts:
            made["reasoning"] = "\n".join(self._reasoning_texts)
            self._reasoning_texts = []
        elif message is None:
            return made  # no reasoning and no text
        self._messages.append(made)
        return made


def _invalid_field(where: str, allowed: str) -> RequestError:
    return RequestError(f"{where} must be {allowed}", param="input")
