"""Constraints of the answers to one prompt besides sampling, made for each prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.core.constraint import Constraint
from quire.core.types import ThinkingBudget
from quire.errors import RequestError, Unsupported
from quire.grammar.frontends import validate
from quire.grammar.frontends.from_params import StructuredDefaults
from quire.grammar.grammar_ast import GrammarNode, map_json
from quire.text.output.answer_parser import AnswerParserFactory, PromptTail
from quire.text.reasoning import qwen3
from quire.text.tokenizing.tokenizer import Tokenizer
from quire.text.tools.base import Tool
from quire.tool_grammar.after_reasoning import AnswerGrammar, answer_with_reasoning, thinking_budget
from quire.tool_grammar.call_grammar import arguments_node


@dataclass(frozen=True, slots=True)
class PromptConstraints:
    """Fields of a Request."""

    constraint: Constraint | None = None
    thinking: ThinkingBudget | None = None


def answer_grammar(
    bound: AnswerGrammar | None,
    readers: AnswerParserFactory | None,
    began: PromptTail,
    house: StructuredDefaults,
) -> GrammarNode | None:
    """The form of whole answers, reasoning included, written as the house has it."""
    if bound is None:
        return None
    form = _answer_grammar(bound, None if house.enable_in_reasoning else readers, began)
    if house.disable_any_whitespace:
        form = map_json(form, lambda node: replace(node, whitespace=False))
    return form


def _answer_grammar(
    bound: AnswerGrammar, readers: AnswerParserFactory | None, began: PromptTail
) -> GrammarNode:
    reasoning = None if readers is None else readers.reasoning
    if (
        reasoning is None
        and readers is not None
        and bound.is_unconstrained
        and _may_reason(readers.tokenizer)
    ):
        reasoning = qwen3.FORMAT
    if reasoning is None:
        return bound.combined()
    return answer_with_reasoning(
        bound, reasoning, began.prompt, began.variables, begun=began.continued_text
    )


def _may_reason(tokenizer: Tokenizer) -> bool:
    """Whether free text of the model may contain thoughts that are not parsed: their
    marks are tokens, which forms never allow unless they name them."""
    return len(tokenizer.encode("<think>", add_special_tokens=False)) == 1


def build_thinking_budget(
    tokens: int | None, readers: AnswerParserFactory | None, began: PromptTail
) -> ThinkingBudget | None:
    """How long answers may think; None: as long as they like. Raises RequestError."""
    if tokens is None:
        return None
    if readers is None or readers.reasoning is None:
        message = "thinking_token_budget needs a reasoning parser"
        raise RequestError(f"{message} (--reasoning-parser)", param="thinking_token_budget")
    tokenizer = readers.tokenizer

    def ids(mark: str) -> list[int]:
        return tokenizer.encode(mark, add_special_tokens=False)

    reasoning, variables = readers.reasoning, began.variables
    return thinking_budget(
        tokens, reasoning, ids, began.prompt, variables, begun=began.continued_text
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
