"""Chat templates: messages and tools -> the text of a prompt.

Templates run in the sandbox of quire.text.templates.jinja_sandbox. `ChatTemplate.render` first
normalizes the messages (quire.text.templates.message_normalizer); `render_as_is` passes them to the
template unchanged, as transformers' apply_chat_template does. The result contains
every special token that the template writes (BOS too), so add_special_tokens=False encodes it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2 import nodes

from quire.config.json_file import read_text
from quire.errors import ConfigError, RequestError
from quire.text.templates import jinja_sandbox
from quire.text.templates.content_format import detect_content_format
from quire.text.templates.message_normalizer import (
    ChatMessage,
    ContentFormat,
    MediaPlaceholders,
    normalize_messages,
)

MAX_TEMPLATE_BYTES = 1 << 20
"""Of an operator's or a model's. The largest that are known have a thirtieth, and take 0.4 s to
compile; this one takes 15."""
RESERVED_VARIABLES = frozenset(
    [
        "chat_template",
        "tokenize",
        "messages",
        "conversation",
        "conversations",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "add_special_tokens",
    ]
)
"""Names that a caller's template variables must not have: they steer the rendering itself."""

_COMPILE_ERRORS = (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError)
"""Errors of Python in code that Jinja generates: loops nested too deep, numbers too long."""

_FORMATS: dict[str, ContentFormat] = {"string": "string", "openai": "openai"}


class ChatTemplate:
    """One Jinja template, compiled. Never changes; threads may share it.

    special: the tokens it can write by name, e.g. {"bos_token": "<s>"}.
    """

    def __init__(self, source: str, special: Mapping[str, object] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special or {})
        environment = jinja_sandbox.TemplateEnvironment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, *_COMPILE_ERRORS) as e:
            where = f" (line {e.lineno})" if isinstance(e, jinja2.TemplateSyntaxError) else ""
            raise RequestError(
                f"the chat template is not valid Jinja{where}: {e}", param="chat_template"
            ) from None
        self.content_format: ContentFormat = detect_content_format(tree)
        self._accepts_both_formats = _checks_for_string(tree)

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Any] | None = None,
        content_format: Literal["auto", "string", "openai"] = "auto",
        variables: Mapping[str, object] | None = None,
        media: Mapping[str, Sequence[str]] | None = None,
        interleave_media: bool = False,
    ) -> str:
        """The prompt of a conversation.

        variables: more values for the template, e.g. {"enable_thinking": False}.
        media, interleave_media: quire.text.templates.message_normalizer.MediaPlaceholders.
        Raises: RequestError for malformed messages and for what the template refuses.
        """
        wanted = (
            self.content_format
            if content_format == "auto"
            else _check_content_format(content_format)
        )
        texts = None
        if media is not None:
            texts = MediaPlaceholders(media, interleaves=interleave_media)
        settled = normalize_messages(
            messages, wanted, knows_developer="developer" in self.source, media=texts
        )
        if wanted == "openai" and not self._accepts_both_formats:
            settled = [_as_parts(message) for message in settled]
        return self.render_as_is(
            settled,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=documents,
            variables=variables,
        )

    def render_as_is(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        documents: Sequence[Any] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """As `render`, but with unchanged messages."""
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both true: one begins a new "
                "message, the other continues the last one; set one of them to false",
                param="continue_final_message",
            )
        values = self._check_variables(variables)
        values |= {
            "tools": _check_tools(tools),
            "documents": list(documents) if documents is not None else None,
            "add_generation_prompt": add_generation_prompt,
        }
        if not continue_final_message:
            return jinja_sandbox.render_template(self._template, values | {"messages": messages})
        return self._render_continued(messages, values)

    def _check_variables(self, variables: Mapping[str, object] | None) -> dict[str, object]:
        given = dict(variables or {})
        refused = sorted(
            name for name in given if name in RESERVED_VARIABLES or name.startswith("_")
        )
        if refused:
            raise RequestError(
                f"chat_template_kwargs must not hold {', '.join(refused)[:300]}: pass what is "
                "meant by the argument of that name",
                param="chat_template_kwargs",
            )
        return self._special_tokens | given

    def _render_continued(self, messages: Sequence[Any], values: dict[str, object]) -> str:
        """Render up to the end of the last message's text, so that the model continues it.

        A mark at the end of that text shows where to cut. Its own trailing space shows whether
        the template trims the text; then the text's end is trimmed too.
        """
        mark = f"<|{secrets.token_hex(16)}|>"
        marked = [*messages[:-1], _with_marker(messages[-1] if messages else None, mark + " ")]
        text = jinja_sandbox.render_template(self._template, values | {"messages": marked})
        cut = text.rfind(mark)
        if cut < 0:
            raise RequestError(
                "continue_final_message: the chat template does not write the last message's text",
                param="continue_final_message",
            )
        trims = text[cut + len(mark) :][:1] != " "
        return text[:cut].rstrip() if trims else text[:cut]


def _check_content_format(content_format: str) -> ContentFormat:
    if content_format in _FORMATS:
        return _FORMATS[content_format]
    raise RequestError(
        f"chat_template_content_format must be auto, string or openai, got {content_format!r}",
        param="chat_template_content_format",
    )


def _as_parts(message: ChatMessage) -> ChatMessage:
    content = message["content"]
    if isinstance(content, str) and message["role"] != "tool":
        return message | {"content": [{"type": "text", "text": content}] if content else []}
    return message


def _check_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise RequestError("tools must be a list of JSON schemas of functions", param="tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping) and not isinstance(tool, jinja_sandbox.SupportsModelDump):
            raise RequestError(
                f"tools[{i}] must be an object, the JSON schema of a function; "
                f"got a {type(tool).__name__}",
                param="tools",
            )
    return list(tools) or None


def _with_marker(message: object, mark: str) -> ChatMessage:
    """A copy of the message whose last text ends in the mark."""
    if not isinstance(message, Mapping):
        raise RequestError("continue_final_message needs a message to continue", param="messages")
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + mark}
    parts = list(content) if isinstance(content, Sequence) else []
    for i in reversed(range(len(parts))):
        if isinstance(parts[i], Mapping) and isinstance(parts[i].get("text"), str):
            parts[i] = {**parts[i], "text": parts[i]["text"] + mark}
            return {**message, "content": parts}
    raise RequestError(
        "continue_final_message: the last message has no text to continue",
        param="continue_final_message",
    )


def _checks_for_string(tree: nodes.Template) -> bool:
    """The template has an `is string` test, so it accepts content in both forms."""
    return any(test.name == "string" for test in tree.find_all(nodes.Test))


def load_chat_template(chat_template: str | Path | None) -> str | None:
    """The text of a template given as a path or as the text itself. None stays None."""
    if chat_template is None:
        return None
    if not isinstance(chat_template, Path) and _looks_like_jinja(chat_template):
        if len(chat_template) > MAX_TEMPLATE_BYTES:
            told = f"{len(chat_template)} characters; at most {MAX_TEMPLATE_BYTES} are read"
            raise ConfigError(f"chat_template has {told}")
        return chat_template
    path = Path(chat_template)
    try:
        readable = path.is_file()  # not a pipe, which would be waited for without end
    except OSError:
        readable = False
    if not readable:
        raise ConfigError(
            f"chat_template {str(chat_template)!r:.300} is neither the text of a Jinja template "
            "nor a file that can be read"
        )
    return read_text(path, MAX_TEMPLATE_BYTES)


def _looks_like_jinja(text: str) -> bool:
    return any(mark in text for mark in ("{{", "{%", "{#", "\n"))
