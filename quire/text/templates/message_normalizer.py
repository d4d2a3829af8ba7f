"""Converts messages from the form of the API to the form that chat templates expect.

All variants (content as text or as parts, arguments as JSON text, `reasoning` under two names, the
developer role) are normalized before a template sees them. Unknown roles and keys are kept: a
template may use them.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        "input_file",
    ]
)


class MediaPlaceholders:
    """What is written for media parts: {"type": "image"} is the next image, and so on.

    texts: what a prompt holds for each item, by modality. interleaves: where content is one text,
    placeholders stay between the texts; otherwise they are put before those.
    """

    def __init__(self, texts: Mapping[str, Sequence[str]], *, interleaves: bool = False) -> None:
        self._texts = {modality: iter(each) for modality, each in texts.items()}
        self.interleaves = interleaves

    def take(self, modality: str) -> str | None:
        """Return the text of the next item of a modality. None: there is none."""
        return next(self._texts.get(modality, iter(())), None)


@dataclass(frozen=True, slots=True)
class _Media:
    """A media part, and the text that a prompt holds for it."""

    modality: str
    text: str


def normalize_messages(
    messages: Sequence[Any],
    content_format: ContentFormat,
    *,
    knows_developer: bool = True,
    media: MediaPlaceholders | None = None,
) -> list[ChatMessage]:
    """Check the messages and bring them into one form. The caller's objects stay as they are.

    media: None: the model reads text only.
    """
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
        one = _normalize_message(message, i, content_format, media)
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


def _normalize_message(
    message: object, i: int, content_format: ContentFormat, media: MediaPlaceholders | None
) -> ChatMessage:
    where = f"messages[{i}]"
    given = message if isinstance(message, Mapping) else _to_mapping(message)
    if not isinstance(given, Mapping):
        raise _invalid(where, given, "an object with 'role' and 'content'")
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{where}.role", role, "a non-empty string")
    made = dict(given)
    made["content"] = _normalize_content(
        given.get("content"), f"{where}.content", role, content_format, media
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
    content: object,
    where: str,
    role: str,
    content_format: ContentFormat,
    media: MediaPlaceholders | None,
) -> object:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise _invalid(where, content, "text or a list of parts")
    parts = [_read_part(part, f"{where}[{j}]", media) for j, part in enumerate(content)]
    if content_format == "string" or role == "tool":
        if media is None or not media.interleaves:
            parts.sort(key=lambda one: isinstance(one, str))
        shown = [one for one in parts if isinstance(one, str) or one.text]
        return "\n".join(one if isinstance(one, str) else one.text for one in shown)
    return [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": one.modality}
        for one in parts
    ]


def _read_part(part: object, where: str, media: MediaPlaceholders | None) -> str | _Media:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _invalid(where, part, "text or an object with 'type'")
    kind = part.get("type", "text" if "text" in part else None)
    if not isinstance(kind, str | None):
        raise _invalid(f"{where}.type", kind, f"one of {', '.join(_TEXT_KEY)}")
    if media is not None and kind is not None and (text := media.take(kind)) is not None:
        return _Media(kind, text)
    if kind in _MEDIA or (kind is None and _MEDIA.intersection(part)):
        named = f"{where}: {kind or 'media'} parts"
        if media is None:
            message = f"{named} need a multimodal model; this one reads text only"
        else:
            message = f"{named} are not served; send image_url, video_url or input_audio"
        raise Unsupported(message, param="messages")
    key = None if kind is None else _TEXT_KEY.get(kind)
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
