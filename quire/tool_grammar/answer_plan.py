"""Answer plan: how the answers of one request are constrained and parsed.

    tools, tool choice ─▶ ToolCallPlan ─────┐
    response format ─▶ ContentConstraint ───┼─▶ AnswerPlan ─▶ constraints, a parser of each answer
    reasoning budget, parsers of the model ─┘

A plan is computed once per request, before its prompts are rendered. How a prompt ends decides
where its answer begins: inside or outside of reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.constraint import Constraint
from quire.core.structured_output_params import StructuredOutputsParams
from quire.grammar.frontends import from_params, validate
from quire.grammar.frontends.from_params import StructuredDefaults
from quire.grammar.grammar_ast import GrammarNode
from quire.text.output.answer_parser import AnswerParser, AnswerParserFactory, PromptTail
from quire.tool_grammar.call_plan import ToolCallPlan
from quire.tool_grammar.prompt_constraints import (
    PromptConstraints,
    answer_grammar,
    build_thinking_budget,
)


@dataclass(frozen=True, slots=True)
class ContentConstraint:
    """The response format: a grammar of the content, its checked constraint, and the backend."""

    grammar: GrammarNode | None = None
    constraint: Constraint | None = None
    backend: str = "auto"
    ignored_keywords: tuple[str, ...] = ()
    """Keywords and formats of its schemas that are not enforced."""


def build_content_constraint(
    params: StructuredOutputsParams, defaults: StructuredDefaults, param: str
) -> ContentConstraint:
    """Check a response format. Raises RequestError; `param` is the client's name of the field."""
    grammar = from_params.params_to_node(params, defaults)
    backend = from_params.requested_backend(params, defaults)
    constraint = from_params.validated_constraint(grammar, backend, param)
    return ContentConstraint(grammar, constraint, backend, validate.ignored_keywords(grammar))


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """All decisions about the answers of one request that do not depend on a prompt."""

    parsers: AnswerParserFactory | None
    """Parsers of the model; None: its text is content."""
    structured_defaults: StructuredDefaults
    tool_calls: ToolCallPlan
    content: ContentConstraint
    thinking_budget: int | None = None
    """Tokens of reasoning; None: no limit."""
    param: str = "tools"
    """The field that errors of the whole grammar name."""
    names_function: bool = False
    """The request demands a call of one function that it names."""
    parses_output: bool = False
    """The answers hold reasoning or calls besides content."""
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    keep_special_tokens: bool = False
    ignored_keywords: tuple[str, ...] = ()
    """Keywords of JSON schemas that are not enforced, behind the field that has them."""

    def constraints(self, tail: PromptTail | None) -> PromptConstraints:
        """Constraints of the answers to a prompt; None: a prompt of token ids.

        Raises: RequestError.
        """
        if tail is None:
            return PromptConstraints(self.content.constraint)
        grammar = answer_grammar(
            self.tool_calls.answer, self.parsers, tail, self.structured_defaults
        )
        constraint = self.content.constraint
        if grammar is not None and grammar is not self.content.grammar:
            constraint = validate.build_constraint(grammar, self.content.backend, param=self.param)
        thinking = build_thinking_budget(
            self.thinking_budget, self.parsers, tail, self.tool_calls.openers
        )
        return PromptConstraints(constraint, thinking)

    def create_parser(self, tail: PromptTail) -> AnswerParser:
        """A parser of one answer to a prompt."""
        assert self.parsers is not None, "parses_output is False"
        return self.parsers.create(
            tail,
            self.tool_calls.parser(),
            openers=self.tool_calls.openers,
            parallel=self.parallel_tool_calls,
            reasoning=self.include_reasoning,
            special=self.keep_special_tokens,
        )
