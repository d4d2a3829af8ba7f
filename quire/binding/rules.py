"""What the answers to one prompt go by, besides sampling: made at the edge, for each prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.binding.calls import arguments
from quire.binding.reasoning import Bound, behind, thinking
from quire.core.constraint import Constraint
from quire.core.types import Thinking
from quire.errors import RequestError, Unsupported
from quire.grammar import admit
from quire.grammar.forms import Either, Form, Json, Repeat, Seq, Tag, Tags
from quire.grammar.words import House
from quire.text.readers import Began, Readers
from quire.text.reasoning import qwen3
from quire.text.tokenizer import Tokenizer
from quire.text.tools.base import Tool


@dataclass(frozen=True, slots=True)
class Rules:
    """Fields of a Request."""

    constraint: Constraint | None = None
    thinking: Thinking | None = None


def whole_form(
    bound: Bound | None, readers: Readers | None, began: Began, house: House
) -> Form | None:
    """The form of whole answers, reasoning included, written as the house has it."""
    if bound is None:
        return None
    form = _whole_form(bound, None if house.enable_in_reasoning else readers, began)
    return _compact(form) if house.disable_any_whitespace else form


def _whole_form(bound: Bound, readers: Readers | None, began: Began) -> Form:
    reasoning = None if readers is None else readers.reasoning
    if reasoning is None and readers is not None and bound.is_free and _thinks(readers.tokenizer):
        reasoning = qwen3.DIALECT
    if reasoning is None:
        return bound.form()
    return behind(bound, reasoning, began.prompt, began.variables, begun=began.begun)


def _thinks(tokenizer: Tokenizer) -> bool:
    """Whether free text of the model may hold thoughts, though nobody is to tell them apart: their
    marks are tokens, which forms never allow unless they name them."""
    return len(tokenizer.encode("<think>", add_special_tokens=False)) == 1


def _compact(form: Form) -> Form:
    """With JSON that has no white space between its tokens."""
    match form:
        case Json():
            return replace(form, whitespace=False)
        case Seq() | Either():
            return replace(form, parts=tuple(_compact(part) for part in form.parts))
        case Repeat():
            return replace(form, part=_compact(form.part))
        case Tag():
            return replace(form, content=_compact(form.content))
        case Tags():
            tags = (replace(tag, content=_compact(tag.content)) for tag in form.tags)
            return replace(form, tags=tuple(tags))
    return form


def budget(tokens: int | None, readers: Readers | None, began: Began) -> Thinking | None:
    """How long answers may think; None: as long as they like. Raises RequestError."""
    if tokens is None:
        return None
    if readers is None or readers.reasoning is None:
        message = "thinking_token_budget needs to know how thoughts are told from text"
        raise RequestError(f"{message} (--reasoning-parser)", param="thinking_token_budget")
    tokenizer = readers.tokenizer

    def ids(mark: str) -> list[int]:
        return tokenizer.encode(mark, add_special_tokens=False)

    reasoning, variables = readers.reasoning, began.variables
    return thinking(tokens, reasoning, ids, began.prompt, variables, begun=began.begun)


def check_arguments(tool: Tool, param: str) -> None:
    """Raise RequestError, with its place, for a schema that calls cannot be bound to."""
    try:
        admit.constraint(arguments(tool), param=param)
    except Unsupported as error:
        raise Unsupported(f"{param}: {error}", param=param) from None
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param) from None
