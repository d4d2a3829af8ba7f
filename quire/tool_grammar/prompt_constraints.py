"""Constraints of the answers to one prompt besides sampling, made for each prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from quire.core.constraint import Constraint
from quire.core.types import ThinkingBudget
from quire.errors import RequestError, Unsupported
from quire.grammar.frontends import validate
from quire.grammar.frontends.from_params import StructuredDefaults
from quire.grammar.grammar_ast import GrammarNode, map_json
from quire.text.output.answer_parser import AnswerParserFactory, PromptTail
from quire.text.reasoning import qwen3
from quire.text.tokenizing.token_bytes import token_starts
from quire.text.tokenizing.tokenizer import Tokenizer
from quire.text.tools._call_openers import CallOpeners
from quire.text.tools.base import Tool
from quire.tool_grammar.after_reasoning import AnswerGrammar, answer_with_reasoning, thinking_budget
from quire.tool_grammar.call_grammar import arguments_node


@dataclass(frozen=True, slots=True)
class PromptConstraints:
    """Fields of a Request."""

    constraint: Constraint | None = None
    thinking: ThinkingBudget | None = None


def answer_grammar(
    answer: AnswerGrammar | None,
    parsers: AnswerParserFactory | None,
    tail: PromptTail,
    defaults: StructuredDefaults,
) -> GrammarNode | None:
    """The grammar of whole answers, reasoning included; None: there is none."""
    if answer is None:
        return None
    node = _answer_grammar(answer, None if defaults.enable_in_reasoning else parsers, tail)
    if defaults.disable_any_whitespace:
        node = map_json(node, lambda one: replace(one, whitespace=False))
    return node


def _answer_grammar(
    answer: AnswerGrammar, parsers: AnswerParserFactory | None, tail: PromptTail
) -> GrammarNode:
    reasoning = None if parsers is None else parsers.reasoning
    if (
        reasoning is None
        and parsers is not None
        and answer.is_unconstrained
        and _may_reason(parsers.tokenizer)
    ):
        reasoning = qwen3.FORMAT
    if reasoning is None:
        return answer.combined()
    return answer_with_reasoning(
        answer, reasoning, tail.prompt, tail.variables, continued_text=tail.continued_text
    )


def _may_reason(tokenizer: Tokenizer) -> bool:
    """Whether text of the model may contain reasoning that is not parsed: its marks are tokens,
    which grammars allow only by name."""
    return len(tokenizer.encode("<think>", add_special_tokens=False)) == 1


def build_thinking_budget(
    tokens: int | None,
    parsers: AnswerParserFactory | None,
    tail: PromptTail,
    openers: CallOpeners = MappingProxyType({}),
) -> ThinkingBudget | None:
    """The budget of reasoning tokens; None: no limit. Raises RequestError.

    openers: literals that begin a call for the parser of the answer, also in reasoning.
    """
    if tokens is None:
        return None
    if parsers is None or parsers.reasoning is None:
        message = "thinking_token_budget needs a reasoning parser"
        raise RequestError(f"{message} (--reasoning-parser)", param="thinking_token_budget")
    tokenizer = parsers.tokenizer

    def ids(mark: str) -> list[int]:
        return tokenizer.encode(mark, add_special_tokens=False)

    starts = token_starts(tokenizer) if openers else None
    return thinking_budget(
        tokens,
        parsers.reasoning,
        ids,
        tail.prompt,
        tail.variables,
        continued_text=tail.continued_text,
        openers={}
        if starts is None
        else {mark: starts.ids_before(texts) for mark, texts in openers.items()},
        whitespace_ids=() if starts is None else starts.whitespace_ids,
    )


def check_tool_schema(tool: Tool, param: str) -> tuple[str, ...]:
    """Check the form of a schema that constrains calls; its keywords that are not enforced.

    Raises RequestError with the place in the schema.
    """
    try:
        node = arguments_node(tool)
        validate.build_constraint(node, param=param)
        return validate.ignored_keywords(node)
    except Unsupported as error:
        raise Unsupported(f"{param}: {error}", param=param) from None
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param) from None
