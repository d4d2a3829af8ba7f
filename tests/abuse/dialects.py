"""One input in the words of every dialect.

The words are those of /v1/completions, and some of our own where dialects have no word in common:
text, ids, schema, regex, grammar, choice, tools, system, logprobs. A dialect that has no word for
a field does not take it: `takes` says so by the bodies' own models.
"""

import json
from typing import Any

from quire.server.formats.chat_request import BatchChatCompletionRequest, ChatCompletionRequest
from quire.server.formats.completion_request import CompletionRequest
from quire.server.formats.messages_request import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from quire.server.formats.responses_request import ResponsesRequest
from quire.server.formats.tokenize_request import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from quire.server.routes.generate import GenerateRequest

CHAT, BATCH = "/v1/chat/completions", "/v1/chat/completions/batch"
COMPLETE, GENERATE = "/v1/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOKENIZE, DETOKENIZE, COUNT = "/tokenize", "/detokenize", "/v1/messages/count_tokens"
TOKENIZE_CHAT = "/tokenize?"
"""The other form of the same route; the mark is ours and the server sees an empty query."""

MODELS = {
    CHAT: ChatCompletionRequest,
    BATCH: BatchChatCompletionRequest,
    COMPLETE: CompletionRequest,
    GENERATE: GenerateRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: AnthropicMessagesRequest,
    TOKENIZE: TokenizeCompletionRequest,
    TOKENIZE_CHAT: TokenizeChatRequest,
    DETOKENIZE: DetokenizeRequest,
    COUNT: AnthropicCountTokensRequest,
}
GENERATING = (CHAT, BATCH, COMPLETE, GENERATE, RESPONSES, MESSAGES)
CHATS = (CHAT, BATCH, RESPONSES, MESSAGES)
STREAMING = (CHAT, COMPLETE, GENERATE, RESPONSES, MESSAGES)
TOKENS = (TOKENIZE, TOKENIZE_CHAT, COUNT)
ALL = (*GENERATING, *TOKENS)

SHORT = 2
SAY = "Say a"


def _base(route: str) -> dict[str, Any]:
    said = [{"role": "user", "content": SAY}]
    return {
        CHAT: {"messages": said, "max_tokens": SHORT},
        BATCH: {"messages": [said], "max_tokens": SHORT},
        COMPLETE: {"prompt": SAY, "max_tokens": SHORT},
        GENERATE: {"prompt": SAY, "max_tokens": SHORT},
        RESPONSES: {"input": SAY, "max_output_tokens": SHORT},
        MESSAGES: {"messages": said, "max_tokens": SHORT},
        TOKENIZE: {"prompt": SAY},
        TOKENIZE_CHAT: {"messages": said},
        DETOKENIZE: {"tokens": [1]},
        COUNT: {"messages": said},
    }[route]


def is_anthropic(route: str) -> bool:
    return route.startswith("/v1/messages")


def takes(route: str, fields: dict[str, Any]) -> bool:
    """The route has a word for each of the fields."""
    return all(_place(route, {}, name, value) for name, value in fields.items())


def body(route: str, fields: dict[str, Any], stream: bool = False) -> bytes:
    """The case as this dialect says it."""
    made = _base(route)
    for name, value in fields.items():
        assert _place(route, made, name, value), (route, name)
    if stream:
        made["stream"] = True
    return json.dumps(made).encode()


def _place(route: str, made: dict[str, Any], name: str, value: Any) -> bool:
    """Put a field into the body; False if the dialect has no word for it."""
    if name in _OWN:
        return _OWN[name](route, made, value)
    word = _WORDS.get(route, {}).get(name, name)
    if word not in MODELS[route].model_fields:
        return False
    made[word] = value
    return True


_WORDS = {
    RESPONSES: {"max_tokens": "max_output_tokens"},
    MESSAGES: {"stop": "stop_sequences"},
}


def _text(route: str, made: dict[str, Any], value: Any) -> bool:
    if "prompt" in MODELS[route].model_fields:
        made["prompt"] = value
    elif "input" in MODELS[route].model_fields:
        made["input"] = value
    elif "messages" in MODELS[route].model_fields:
        said = [{"role": "user", "content": value}]
        made["messages"] = [said] if route == BATCH else said
    else:
        return False
    return True


def _system(route: str, made: dict[str, Any], value: Any) -> bool:
    if route == RESPONSES:
        made["instructions"] = value
    elif is_anthropic(route):
        made["system"] = value
    elif "messages" in MODELS[route].model_fields:
        said = [{"role": "system", "content": value}, {"role": "user", "content": SAY}]
        made["messages"] = [said] if route == BATCH else said
    else:
        return False
    return True


def _ids(route: str, made: dict[str, Any], value: Any) -> bool:
    if route == DETOKENIZE:
        made["tokens"] = value
    elif route == COMPLETE:
        made["prompt"] = value
    else:
        return False
    return True


def _logprobs(route: str, made: dict[str, Any], value: Any) -> bool:
    if route in (CHAT, BATCH):
        made.update(logprobs=True, top_logprobs=value)
    elif route == RESPONSES:
        made.update(top_logprobs=value, include=["message.output_text.logprobs"])
    elif route == COMPLETE:
        made["logprobs"] = value
    else:
        return False
    return True


def _schema(route: str, made: dict[str, Any], value: Any) -> bool:
    if route == RESPONSES:
        made["text"] = {"format": {"type": "json_schema", "name": "s", "schema": value}}
    elif route == MESSAGES:
        made["output_config"] = {"format": {"type": "json_schema", "schema": value}}
    elif route in GENERATING:
        inner = {"name": "s", "schema": value}
        made["response_format"] = {"type": "json_schema", "json_schema": inner}
    else:
        return False
    return True


def _structured(kind: str):
    def place(route: str, made: dict[str, Any], value: Any) -> bool:
        made["structured_outputs"] = {kind: value}
        return route in GENERATING

    return place


def _tools(route: str, made: dict[str, Any], value: Any) -> bool:
    """value: functions as OpenAI's chat has them."""
    if route in (CHAT, BATCH, TOKENIZE_CHAT):
        made["tools"] = [{"type": "function", "function": one} for one in value]
    elif route == RESPONSES:
        made["tools"] = [{"type": "function", **one} for one in value]
    elif is_anthropic(route):
        made["tools"] = [_anthropic_tool(one) for one in value]
    else:
        return False
    return True


def _anthropic_tool(one: dict[str, Any]) -> dict[str, Any]:
    made = {name: given for name, given in one.items() if name != "parameters"}
    return {**made, "input_schema": one.get("parameters", {"type": "object"})}


def _force(route: str, made: dict[str, Any], value: Any) -> bool:
    """A call of this name must be made; True: of any."""
    if is_anthropic(route):
        made["tool_choice"] = {"type": "any"} if value is True else {"type": "tool", "name": value}
    elif route == RESPONSES:
        named = {"type": "function", "name": value}
        made["tool_choice"] = "required" if value is True else named
    elif route in (CHAT, BATCH):
        named = {"type": "function", "function": {"name": value}}
        made["tool_choice"] = "required" if value is True else named
    else:
        return False
    return True


_OWN = {
    "text": _text,
    "system": _system,
    "ids": _ids,
    "logprobs": _logprobs,
    "schema": _schema,
    "regex": _structured("regex"),
    "grammar": _structured("grammar"),
    "choice": _structured("choice"),
    "tag": _structured("structural_tag"),
    "tools": _tools,
    "force": _force,
}
