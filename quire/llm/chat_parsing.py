"""Constrains and parses the answers of LLM.chat (reasoning and tool calls) as the server does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.core.params import SamplingParams
from quire.errors import RequestError
from quire.grammar.frontends import from_params
from quire.grammar.frontends.from_params import StructuredDefaults
from quire.outputs import CompletionOutput, FunctionCall, RequestOutput, ToolCall
from quire.text.output.answer_parser import (
    AnswerParser,
    AnswerParserFactory,
    ParserOptions,
    PromptTail,
    build_answer_parser_factory,
    content_only_factory,
    message_text,
)
from quire.text.output.parsed_text import collect_pieces
from quire.text.tokenizing.tokenizer import Tokenizer
from quire.text.tools.base import tools_by_name
from quire.tool_grammar.answer_plan import AnswerPlan, ContentConstraint, build_content_constraint
from quire.tool_grammar.call_plan import callable_tools, plan_tool_calls, strict_names
from quire.tool_grammar.prompt_constraints import PromptConstraints, check_tool_schema
from quire.tool_grammar.tool_choice import ToolChoicePolicy, parse_tool_choice


@dataclass(frozen=True, slots=True)
class ChatParsing:
    """The constraints and parsers of the answers of one chat()."""

    answer_parsers: AnswerParserFactory
    tools: Sequence[Any]
    variables: Mapping[str, object] | None
    continues_final_message: bool
    """The answers continue the last message of their conversation."""
    choice: ToolChoicePolicy
    parallel_tool_calls: bool
    structured_defaults: StructuredDefaults
    eos_texts: frozenset[str]

    def adjust_params(self, given: Sequence[SamplingParams]) -> list[SamplingParams]:
        """The params with special tokens in the engine's text: they are markers."""
        adjusted = []
        for one in given:
            if not one.detokenize:
                message = (
                    "detokenize=False leaves no text from which to parse reasoning or tool calls"
                )
                raise RequestError(message, param="detokenize")
            adjusted.append(one.clone())
            adjusted[-1].skip_special_tokens = False
        return adjusted

    def build_constraints(
        self,
        prompts: Sequence[str],
        conversations: Sequence[Sequence[Any]],
        params: Sequence[SamplingParams],
    ) -> list[PromptConstraints]:
        """For the answers to each of them. Raises RequestError."""
        return [
            self._plan(one).constraints(self._prompt_tail(prompt, messages))
            for prompt, messages, one in zip(prompts, conversations, params)
        ]

    def parse_output(
        self, output: RequestOutput, messages: Sequence[Any], params: SamplingParams
    ) -> None:
        """Set reasoning and tool calls of all answers; their text is what is left."""
        plan = self._plan(replace(params, structured_outputs=None))
        tail = self._prompt_tail(output.prompt or "", messages)
        for one in output.outputs:
            _parse_completion(one, plan.create_parser(tail))

    def _plan(self, params: SamplingParams) -> AnswerPlan:
        """Raises RequestError."""
        asked, defaults = params.structured_outputs, self.structured_defaults
        content = ContentConstraint(backend=defaults.backend)
        if asked is not None:
            content = build_content_constraint(asked, defaults, "structured_outputs")
            from_params.log_ignored("structured_outputs", content.ignored_keywords)
        return AnswerPlan(
            parsers=self.answer_parsers,
            structured_defaults=defaults,
            tool_calls=plan_tool_calls(
                self.answer_parsers.tools,
                self.tools,
                self.choice,
                parallel=self.parallel_tool_calls,
                eos_texts=self.eos_texts,
                content=content.grammar,
            ),
            content=content,
            thinking_budget=params.thinking_token_budget,
            param="tools" if asked is None else "structured_outputs",
            parses_output=True,
            parallel_tool_calls=self.parallel_tool_calls,
            keep_special_tokens=not params.skip_special_tokens,
        )

    def _prompt_tail(self, prompt: str, messages: Sequence[Any]) -> PromptTail:
        return PromptTail(
            prompt,
            message_text(messages[-1]) if self.continues_final_message else "",
            self.variables,
        )


def _parse_completion(one: CompletionOutput, parser: AnswerParser) -> None:
    parsed = collect_pieces(parser.push(one.text, one.token_ids, last=True))
    one.text = parsed.text
    one.reasoning = parsed.reasoning or None
    one.tool_calls = [
        ToolCall(call.id or "", FunctionCall(call.name or "", call.arguments))
        for call in parsed.calls
    ]
    one.notes = parser.notes
    if one.finish_reason is not None:
        one.finish_reason = parser.finish(one.finish_reason)


@dataclass(frozen=True, slots=True)
class ChatContext:
    """The arguments of chat() about tools and reasoning."""

    parsers: ParserOptions
    tools: Sequence[Any] | None
    tool_choice: object
    parallel_tool_calls: bool
    variables: Mapping[str, object] | None
    continues_final_message: bool


def build_chat_parsing(
    context: ChatContext,
    tokenizer: Tokenizer,
    chat_template: str | None,
    defaults: StructuredDefaults,
    eos_ids: frozenset[int],
) -> ChatParsing | None:
    """None: no constraint and no parser. Raises ConfigError for unknown parsers, RequestError."""
    tools = context.tools or ()
    choice = parse_tool_choice(context.tool_choice, list(tools_by_name(tools)))
    factory = build_answer_parser_factory(context.parsers, tokenizer, chat_template)
    if (
        choice.is_explicit
        and choice.mode == "auto"
        and tools
        and (factory is None or factory.tools is None)
    ):
        message = "tool_choice 'auto' needs a format of calls: give tool_parser"
        raise RequestError(message, param="tool_choice")
    if factory is None and not choice.is_required:
        return None
    factory = factory or content_only_factory(tokenizer)
    _check_schemas(tools, choice, strict=factory.tools is not None)
    ends = frozenset(tokenizer.backend.id_to_token(i) or "" for i in eos_ids)
    return ChatParsing(
        factory,
        tools,
        context.variables,
        context.continues_final_message,
        choice,
        context.parallel_tool_calls,
        defaults,
        ends,
    )


def _check_schemas(tools: Sequence[Any], choice: ToolChoicePolicy, *, strict: bool) -> None:
    """Check each schema that constrains calls."""
    names = strict_names(tools) if strict and choice.mode == "auto" else frozenset()
    for place, tool in enumerate(callable_tools(tools, choice) if tools else ()):
        if choice.is_required or tool.name in names:
            param = f"tools[{place}].function.parameters"
            from_params.log_ignored(param, check_tool_schema(tool, param))
