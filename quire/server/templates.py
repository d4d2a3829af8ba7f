"""Chat templates that requests bring: rendered outside of this process (quire.text.renderers)."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire import env
from quire.engine.link import start
from quire.errors import TooLong
from quire.server import forcing
from quire.server.asked import Asked, Conversation
from quire.server.options import ContentFormat
from quire.text.renderers import Renderers

if TYPE_CHECKING:
    from quire.server.services import Services

MOST_MESSAGES = 4096
"""Of a conversation, where the context has fewer tokens: each message takes one or more."""

Texts = Mapping[int, str]
"""Place of a conversation in what is asked -> its prompt, where it brought a template."""


def renderers() -> Renderers:
    """Those of an API process."""
    return Renderers(_hire)


def _hire() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        return start("quire.text.rendering", theirs, env=env.bare()), ours


async def brought(to: Services, asked: Asked) -> Texts:
    """Render what brings its template. Raises RequestError, Overloaded, EngineError."""
    return {
        place: await to.renderers.render(
            one.template,
            to.text().special_tokens_map,
            call(to, asked, one).words(),
            to.most_chars,
        )
        for place, one in enumerate(asked.conversations)
        if one.template is not None
    }


def call(to: Services, asked: Asked, one: Conversation) -> Call:
    """What the template of a conversation is given. Raises TooLong."""
    most = max(MOST_MESSAGES, to.max_model_len)
    if len(one.messages) > most:
        told = f"{len(one.messages)} messages do not fit: this server reads at most {most}"
        raise TooLong(told, param="messages")
    none = asked.tool_choice == "none" and to.options.exclude_tools_when_tool_choice_none
    return Call(
        one.messages,
        None if none else forcing.shown(one.tools),
        one.add_generation_prompt,
        one.continue_final_message,
        one.documents,
        to.options.chat_template_content_format,
        forcing.variables(to, one),
    )


class Call(NamedTuple):
    """What quire.text.chat.ChatTemplate.render takes."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    documents: Sequence[dict[str, Any]] | None
    content_format: ContentFormat
    variables: dict[str, Any]

    def words(self) -> dict[str, Any]:
        """By name."""
        return self._asdict()
