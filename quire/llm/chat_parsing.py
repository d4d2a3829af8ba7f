"""Constrains and parses the answers of LLM.chat (reasoning and tool calls) as the server does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.params import SamplingParams
from quire.errors import RequestError
from quire.grammar.frontends import from_params, validate
from quire.grammar.frontends.from_params import StructuredDefaults
from quire.grammar.grammar_ast import GrammarNode
from quire.outputs import CompletionOutput, FunctionCall, RequestOutput, ToolCall
from quire.text.output.answer_parser import (
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
from quire.tool_grammar.call_plan import ToolCallPlan, callable_tools, plan_tool_calls, strict_names
from quire.tool_grammar.prompt_constraints import (
    PromptConstraints,
    answer_grammar,
    build_thinking_budget,
    check_tool_schema,
)
from quire.tool_grammar.tool_choice import ToolChoicePolicy, parse_tool_choice


@dataclass(frozen=True, slots=True)
class ChatParsing:
    """How the answers of one chat() are to be bound and read."""

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
        """As asked for, but the text of the engine has its special tokens: they are marks."""
        made = []
        for one in given:
            if not one.detokenize:
                message = "detokenize=False leaves no text to read reasoning or tool calls in"
                raise RequestError(message, param="detokenize")
            made.append(one.clone())
            made[-1].skip_special_tokens = False
        return made

    def build_constraints(
        self,
        prompts: Sequence[str],
        conversations: Sequence[Sequence[Any]],
        params: Sequence[SamplingParams],
    ) -> list[PromptConstraints]:
        """For the answers to each of them. Raises RequestError."""
        return [self._build_prompt_constraints(*one) for one in zip(prompts, conversations, params)]

    def _build_prompt_constraints(
        self, prompt: str, messages: Sequence[Any], params: SamplingParams
    ) -> PromptConstraints:
        began, asked = self._prompt_tail(prompt, messages), params.structured_outputs
        content = (
            None if asked is None else from_params.params_to_node(asked, self.structured_defaults)
        )
        backend = (
            self.structured_defaults.backend
            if asked is None
            else from_params.requested_backend(asked, self.structured_defaults)
        )
        bound = self._tool_call_plan(content).answer
        form = answer_grammar(bound, self.answer_parsers, began, self.structured_defaults)
        constraint = None
        if form is not None:
            param = "structured_outputs" if asked is not None else "tools"
            constraint = validate.build_constraint(form, backend, param=param)
        return PromptConstraints(
            constraint,
            build_thinking_budget(params.thinking_token_budget, self.answer_parsers, began),
        )

    def parse_output(
        self, output: RequestOutput, messages: Sequence[Any], params: SamplingParams
    ) -> None:
        """Fill in reasoning and tool calls of all answers; their text is what is left."""
        began = self._prompt_tail(output.prompt or "", messages)
        for one in output.outputs:
            self._parse_completion(one, began, special=not params.skip_special_tokens)

    def _prompt_tail(self, prompt: str, messages: Sequence[Any]) -> PromptTail:
        return PromptTail(
            prompt,
            message_text(messages[-1]) if self.continues_final_message else "",
            self.variables,
        )

    def _tool_call_plan(self, content: GrammarNode | None = None) -> ToolCallPlan:
        return plan_tool_calls(
            self.answer_parsers.tools,
            self.tools,
            self.choice,
            parallel=self.parallel_tool_calls,
            ends=self.eos_texts,
            content=content,
        )

    def _parse_completion(self, one: CompletionOutput, began: PromptTail, *, special: bool) -> None:
        calls = self._tool_call_plan().parser()
        reader = self.answer_parsers.create(
            began, calls, parallel=self.parallel_tool_calls, special=special
        )
        speech = collect_pieces(reader.push(one.text, one.token_ids, last=True))
        one.text = speech.text
        one.reasoning = speech.reasoning or None
        one.tool_calls = [
            ToolCall(call.id or "", FunctionCall(call.name or "", call.arguments))
            for call in speech.calls
        ]
        one.notes = reader.notes
        if one.finish_reason is not None:
            one.finish_reason = reader.finish(one.finish_reason)


@dataclass(frozen=True, slots=True)
class ChatContext:
    """What chat() was asked of tools and thoughts."""

    parsers: ParserOptions
    tools: Sequence[Any] | None
    tool_choice: object
    parallel_tool_calls: bool
    variables: Mapping[str, object] | None
    continues_final_message: bool


def build_chat_parsing(
    talk: ChatContext,
    tokenizer: Tokenizer,
    chat_template: str | None,
    house: StructuredDefaults,
    eos_ids: frozenset[int],
) -> ChatParsing | None:
    """None: no constraint and no parser. Raises ConfigError for unknown parsers, RequestError."""
    tools = talk.tools or ()
    asked = parse_tool_choice(talk.tool_choice, list(tools_by_name(tools)))
    made = build_answer_parser_factory(talk.parsers, tokenizer, chat_template)
    if (
        asked.is_explicit
        and asked.mode == "auto"
        and tools
        and (made is None or made.tools is None)
    ):
        message = "tool_choice 'auto' needs to know how the model writes calls: give tool_parser"
        raise RequestError(message, param="tool_choice")
    if made is None and not asked.is_required:
        return None
    made = made or content_only_factory(tokenizer)
    _check_schemas(tools, asked, strict=made.tools is not None)
    ends = frozenset(tokenizer.backend.id_to_token(i) or "" for i in eos_ids)
    return ChatParsing(
        made,
        tools,
        talk.variables,
        talk.continues_final_message,
        asked,
        talk.parallel_tool_calls,
        house,
        ends,
    )


def _check_schemas(tools: Sequence[Any], asked: ToolChoicePolicy, *, strict: bool) -> None:
    """Each schema that calls will be bound to."""
    names = strict_names(tools) if strict and asked.mode == "auto" else frozenset()
    for place, tool in enumerate(callable_tools(tools, asked) if tools else ()):
        if asked.is_required or tool.name in names:
            check_tool_schema(tool, f"tools[{place}].function.parameters")
