"""Chat templates of a request: arguments of the template, and rendering to the text of a prompt.

A template that the request brings is rendered outside of this process
(quire.text.templates.render_pool); the model's own one is rendered here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import RequestError, Unsupported, context_overflow
from quire.server.app_state import AppState
from quire.server.auth.api_keys import KeyOwner
from quire.server.generation.generation_request import Conversation, GenerationRequest
from quire.server.generation.plan_answers import NO_REASONING_EFFORT
from quire.server.generation.validate import check_chars
from quire.server.options import ContentFormat
from quire.text.output.answer_parser import PromptTail, message_text

MIN_MESSAGE_LIMIT = 4096
"""Messages that a conversation may have where the context has fewer tokens: each takes a token."""

RenderedPrompts = Mapping[int, str]
"""Index of a conversation in the request -> its prompt, for those that bring a template."""


async def render_request_templates(
    state: AppState, request: GenerationRequest, owner: KeyOwner
) -> RenderedPrompts:
    """Render the templates that the request brings.

    Raises: RequestError, Overloaded, EngineError.
    """
    return {
        index: await state.template_workers.render(
            one.chat_template,
            state.require_tokenizer().special_tokens_map,
            _template_arguments(state, request, one)._asdict(),
            state.max_prompt_chars,
            owner.share,
        )
        for index, one in enumerate(request.conversations)
        if one.chat_template is not None
    }


def render_conversation(
    state: AppState, request: GenerationRequest, rendered: RenderedPrompts, index: int = 0
) -> PromptTail:
    """Render a conversation to the text of its prompt, and find where its answer begins.

    rendered: prompts of the conversations that bring a template. Raises: RequestError.
    """
    one = request.conversations[index]
    arguments = _template_arguments(state, request, one)
    text = rendered.get(index)
    if text is None and state.tokenizer is None and one.media is not None:
        text = "".join(map(message_text, one.messages))  # of items that are whole prompts
    elif text is None:
        text = _render_own_template(state, arguments)
    check_chars(state, len(text), "messages")
    begun = message_text(one.messages[-1]) if one.continue_final_message else ""
    if one.media is None:
        return PromptTail(text, begun, arguments.variables)
    text, literals = one.media.conversation.restore(text)
    begun, _ = one.media.conversation.restore(begun)
    return PromptTail(text, begun, arguments.variables, literals)


def _render_own_template(state: AppState, arguments: TemplateArguments) -> str:
    template = state.require_tokenizer().template(state.chat_template, arguments.tools)
    try:
        return template.render(**arguments._asdict())
    except Unsupported as e:
        raise RequestError(str(e), param=e.param) from None  # the messages of the client are wrong


class TemplateArguments(NamedTuple):
    """Arguments of quire.text.templates.chat_template.ChatTemplate.render."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    documents: Sequence[dict[str, Any]] | None
    content_format: ContentFormat
    variables: dict[str, Any]
    media: Mapping[str, Sequence[str]] | None
    interleave_media: bool


def _template_arguments(
    state: AppState, request: GenerationRequest, one: Conversation
) -> TemplateArguments:
    """Raises TooLong."""
    most = max(MIN_MESSAGE_LIMIT, state.max_model_len)
    if len(one.messages) > most:
        problem = f"there are {len(one.messages)} messages, and this server reads at most {most}"
        raise context_overflow(state.max_model_len, problem, param="messages")
    hides_tools = (
        request.tool_choice == "none" and state.options.exclude_tools_when_tool_choice_none
    )
    tools = None if hides_tools else _template_tools(request.tools)
    documents = one.documents
    if one.media is not None:
        tools = one.media.conversation.protect(tools)
        documents = one.media.conversation.protect(documents)
    return TemplateArguments(
        one.messages,
        tools,
        one.add_generation_prompt,
        one.continue_final_message,
        documents,
        state.options.chat_template_content_format,
        _template_variables(state, one),
        None if one.media is None else one.media.conversation.placeholders,
        state.inputs.media is not None and state.inputs.media.pipeline.settings.interleaves,
    )


def _template_variables(state: AppState, one: Conversation) -> dict[str, Any]:
    """Variables of the template. Effort "none" also sets the switch that many templates have."""
    options, effort = state.options, one.reasoning_effort
    switch = {"enable_thinking": False} if effort == NO_REASONING_EFFORT else {}
    variables = {**options.default_chat_template_kwargs, **switch, **one.template_variables}
    if effort is not None:
        variables["reasoning_effort"] = options.reasoning_effort_map.get(effort, effort)
    return variables


def _template_tools(tools: Sequence[dict[str, Any]] | None) -> Sequence[dict[str, Any]] | None:
    """Tools without `strict`, which is meant for the server."""
    return tools and [_template_tool(tool) for tool in tools]


def _template_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or "strict" not in function:
        return dict(tool)
    return {**tool, "function": {k: v for k, v in function.items() if k != "strict"}}
