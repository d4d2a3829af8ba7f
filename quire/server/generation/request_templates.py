"""Chat templates that requests bring: rendered outside of this process
(quire.text.templates.render_pool).
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire import env
from quire.engine.supervise.process_pipe import spawn_process
from quire.errors import TooLong
from quire.server.generation import tool_choice
from quire.server.generation.generation_request import Conversation, GenerationRequest
from quire.server.options import ContentFormat
from quire.text.templates.render_pool import TemplateRenderPool

if TYPE_CHECKING:
    from quire.server.app_state import AppState

MIN_MESSAGE_LIMIT = 4096
"""Of a conversation, where the context has fewer tokens: each message takes one or more."""

RenderedPrompts = Mapping[int, str]
"""Place of a conversation in what is asked -> its prompt, where it brought a template."""


def build_template_workers() -> TemplateRenderPool:
    """Those of an API process."""
    return TemplateRenderPool(_start_template_worker)


def _start_template_worker() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        return spawn_process(
            "quire.text.templates.render_worker", theirs, env=env.sandbox_environment()
        ), ours


async def render_request_templates(to: AppState, asked: GenerationRequest) -> RenderedPrompts:
    """Render what brings its template. Raises RequestError, Overloaded, EngineError."""
    return {
        place: await to.template_workers.render(
            one.chat_template,
            to.require_tokenizer().special_tokens_map,
            build_template_arguments(to, asked, one).as_kwargs(),
            to.max_prompt_chars,
        )
        for place, one in enumerate(asked.conversations)
        if one.chat_template is not None
    }


def build_template_arguments(
    to: AppState, asked: GenerationRequest, one: Conversation
) -> TemplateArguments:
    """What the template of a conversation is given. Raises TooLong."""
    most = max(MIN_MESSAGE_LIMIT, to.max_model_len)
    if len(one.messages) > most:
        told = f"{len(one.messages)} messages do not fit: this server reads at most {most}"
        raise TooLong(told, param="messages")
    none = asked.tool_choice == "none" and to.options.exclude_tools_when_tool_choice_none
    return TemplateArguments(
        one.messages,
        None if none else tool_choice.template_tools(one.tools),
        one.add_generation_prompt,
        one.continue_final_message,
        one.documents,
        to.options.chat_template_content_format,
        tool_choice.build_template_variables(to, one),
    )


class TemplateArguments(NamedTuple):
    """What quire.text.templates.chat_template.ChatTemplate.render takes."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    documents: Sequence[dict[str, Any]] | None
    content_format: ContentFormat
    variables: dict[str, Any]

    def as_kwargs(self) -> dict[str, Any]:
        """By name."""
        return self._asdict()
