"""Converts messages from the form of the API to the form that chat templates expect.

All variants (content as text or as parts, arguments as JSON text, `reasoning` under two names, the
developer role) are normalized before a template sees them. Unknown roles and keys are kept: a
template may use them.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from quire.errors import RequestError, Unsupported
from quire.text.templates.jinja_sandbox import SupportsModelDump

ContentFormat = Literal["string", "openai"]
ChatMessage = dict[str, Any]

_TEXT_KEY = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA = frozenset(
    [
        "image",
        "image_url",
        "input_image",
        "image_pil",
        "image_embeds",
        "audio",
        "audio_url",
        "input_audio",
        "audio_embeds",
        "video",
        "video_url",
        "video_embeds",
        "prompt_embeds",
        "tool_reference",
        "file",
    ]
)


def normalize_messages(
    messages: Sequence[Any], content_format: ContentFormat, *, knows_developer: bool = True
) -> list[ChatMessage]:
    """Check the messages and bring them into one form. The caller's objects stay as they are."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages must be a list of messages, got a {type(messages).__name__}",
            param="messages",
        )
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    made: list[ChatMessage] = []
    joined: dict[int, list[object]] = {}  # place of a message -> contents that become its own
    for i, message in enumerate(messages):
        one = _normalize_message(message, i, content_format)
        if one["role"] == "developer" and not knows_developer:
            one["role"] = "system"
            if made and made[-1]["role"] == "system":
                contents = joined.setdefault(len(made) - 1, [made[-1]["content"]])
                contents.append(one["content"])
                continue
        made.append(one)
    for place, contents in joined.items():  # all at once: there may be many
        made[place]["content"] = _join_contents(contents)
    return made


def _normalize_message(message: object, i: int, content_format: ContentFormat) -> ChatMessage:
    where = f"messages[{i}]"
    given = message if isinstance(message, Mapping) else _to_mapping(message)
    if not isinstance(given, Mapping):
        raise _invalid(where, given, "an object with 'role' and 'content'")
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{where}.role", role, "a non-empty string")
    made = dict(given)
    made["content"] = _normalize_content(
        given.get("content"), f"{where}.content", role, content_format
    )
    _set_reasoning(made)
    if "tool_calls" in made:
        made["tool_calls"] = _normalize_tool_calls(made["tool_calls"], f"{where}.tool_calls")
        if not made["tool_calls"]:
            del made["tool_calls"]
    return made


def _to_mapping(message: object) -> object:
    return (
        message.model_dump(exclude_none=True) if isinstance(message, SupportsModelDump) else message
    )


def _invalid(where: str, given: object, allowed: str) -> RequestError:
    shown = reprlib.repr(given)[:80]
    return RequestError(f"{where} must be {allowed}, got {shown}", param="messages")


def _normalize_content(
    content: object, where: str, role: str, content_format: ContentFormat
) -> object:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise _invalid(where, content, "text or a list of parts")
    texts = [_part_text(part, f"{where}[{j}]") for j, part in enumerate(content)]
    if content_format == "string" or role == "tool":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _invalid(where, part, "text or an object with 'type'")
    kind = part.get("type", "text" if "text" in part else None)
    if kind in _MEDIA or (kind is None and _MEDIA.intersection(part)):
        raise Unsupported(f"{where}: {kind or 'media'} parts need a multimodal model; this one "
                          "reads text only", param="messages")  # fmt: skip
    key = _TEXT_KEY.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise _invalid(f"{where}.type", kind, f"one of {', '.join(_TEXT_KEY)}")
    text = part.get(key)
    if not isinstance(text, str):
        raise _invalid(f"{where}.{key}", text, "a string")
    return text


def _set_reasoning(message: ChatMessage) -> None:
    """Templates read either name."""
    for name, alias in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if message.get(name) is not None and message.get(alias) is None:
            message[alias] = message[name]


def _normalize_tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
        raise _invalid(where, calls, "a list of tool calls")
    return [_normalize_tool_call(call, f"{where}[{j}]") for j, call in enumerate(calls)]


def _normalize_tool_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _invalid(where, call, "an object with 'function'")
    if call.get("type", "function") != "function":
        raise _invalid(f"{where}.type", call.get("type"), "'function'")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _invalid(f"{where}.function", function, "an object with 'name' and 'arguments'")
    arguments = _parse_arguments(function.get("arguments"))
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _parse_arguments(given: object) -> dict[str, Any]:
    """Return the object of a JSON text; {} if it is not one, as models may generate that."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return {}
    return dict(given) if isinstance(given, Mapping) else {}


def _join_contents(contents: Sequence[Any]) -> object:
    if all(isinstance(one, str) for one in contents):
        return "\n\n".join(filter(None, contents))
    parts: list[object] = []
    for one in contents:
        parts.extend([{"type": "text", "text": one}] if isinstance(one, str) else one)
    return parts
