"""Puts the constraint of an answer after its reasoning.

the prompt ends in <think>       thoughts </think> form
the prompt has no such mark      form, or <think> thoughts </think> form
the prompt ends in </think>      form
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quire.core.types import ThinkingBudget
from quire.grammar.grammar_ast import (
    AlternationNode,
    GrammarNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
)
from quire.text.reasoning.base import (
    ChannelMarkup,
    ModeKind,
    ModeTransition,
    ParserMode,
    ReasoningFormat,
)
from quire.text.reasoning.parser import ReasoningParser
from quire.tool_grammar.call_grammar import starts_with_literal, strip_prefix_literal

ANY_TEXT = RegexNode(r"[\s\S]*")
_BREAK = RegexNode(r"\n{0,2}")
"""Between thoughts and what follows; readers drop it."""


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What an answer without reasoning must be: content of this form, or calls of that one."""

    content: GrammarNode | None = None
    calls: GrammarNode | None = None
    is_unconstrained: bool = False
    """Calls are within free text."""
    openers: tuple[str, ...] = ()
    """Literals that begin a call for the parser, also in reasoning."""
    functions: tuple[str, ...] = ()
    """Names of the declared functions."""

    def combined(self) -> GrammarNode:
        """Either."""
        return _alternation([one for one in (self.content, self.calls) if one is not None])


def answer_with_reasoning(
    bound: AnswerGrammar,
    dialect: ReasoningFormat,
    prompt: str = "",
    variables: Mapping[str, object] | None = None,
    *,
    begun: str = "",
) -> GrammarNode:
    """The whole answer to this prompt. begun: the text of the message that it continues."""
    mode = ReasoningParser(dialect, prompt, variables, begun=begun).mode
    if dialect.channels is not None:
        return _channel_messages(bound, dialect.channels, mode, goes_on=bool(begun))
    if dialect.prefix:
        return SequenceNode(
            (UntilNode("</" + dialect.prefix.removeprefix("<")), _BREAK, bound.combined())
        )
    if mode.kind is ModeKind.REASONING:
        return _rest_of_reasoning(bound, dialect, mode)
    if begun or mode is dialect.modes.get(dialect.mode_from_prompt(prompt) or ""):
        return _alternation([_without_reasoning(bound, mode)])
    ways = [_optionally_wrapped(bound, dialect, mode)]
    for mark, turn in {**mode.initial_transitions, **mode.transitions}.items():
        inner = _target_mode(dialect, turn)
        if inner is not None and inner.kind is ModeKind.REASONING:
            ways.append(
                SequenceNode((LiteralNode(mark), _rest_of_reasoning(bound, dialect, inner)))
            )
    return _alternation(ways)


def _target_mode(dialect: ReasoningFormat, turn: ModeTransition) -> ParserMode | None:
    return dialect.modes[turn.target] if isinstance(turn.target, str) else None


def _rest_of_reasoning(
    bound: AnswerGrammar, dialect: ReasoningFormat, mode: ParserMode
) -> GrammarNode:
    """The rest of a thought, and what follows it."""
    ways = {
        mark: _after_marker(bound, dialect, mark, turn) for mark, turn in mode.transitions.items()
    }
    for mark in bound.openers:
        turn = ModeTransition("content", "after")
        ways.setdefault(mark, _after_marker(bound, dialect, mark, turn))
    if len(ways) == 1:
        ((mark, way),) = ways.items()
        assert way is not None, f"nothing may follow {mark}"
        return SequenceNode((UntilNode(mark), way))
    tags = [TagNode(mark, way, "") for mark, way in ways.items() if way is not None]
    return TaggedTextNode(tuple(ways), tuple(tags), min_tags=1, only_first=True)


def _after_marker(
    bound: AnswerGrammar, dialect: ReasoningFormat, mark: str, turn: ModeTransition
) -> GrammarNode | None:
    """What may follow a mark that ends a thought; None: the mark is not allowed there."""
    into = _target_mode(dialect, turn)
    if turn.keep != "after":
        return _optionally_wrapped(bound, dialect, into, spaced=True)
    calls = bound.calls
    return (
        strip_prefix_literal(calls, mark)
        if calls is not None and starts_with_literal(calls, mark)
        else None
    )


def _optionally_wrapped(
    bound: AnswerGrammar, dialect: ReasoningFormat, mode: ParserMode | None, *, spaced: bool = False
) -> GrammarNode:
    """What is bound, its content with or without the marks that a model puts around it."""
    lead = (_BREAK,) if spaced else ()
    ways: list[GrammarNode] = [
        SequenceNode((*lead, bound.combined())) if spaced else bound.combined()
    ]
    if bound.content is not None and mode is not None:
        for mark, turn in mode.initial_transitions.items():
            inner = _target_mode(dialect, turn)
            if inner is not None and inner.kind is ModeKind.CONTENT:
                ways.append(
                    SequenceNode((*lead, LiteralNode(mark), _wrapped_content(bound.content, inner)))
                )
    return _alternation(ways)


def _wrapped_content(content: GrammarNode, mode: ParserMode) -> GrammarNode:
    """Content up to the mark that closes what was opened around it."""
    return SequenceNode(
        (_BREAK, content, _BREAK, _alternation([LiteralNode(mark) for mark in mode.transitions]))
    )


def _without_reasoning(bound: AnswerGrammar, mode: ParserMode) -> GrammarNode:
    """After a prompt that excludes thoughts. It may have opened marks around the content."""
    wraps = [mark for mark, turn in mode.transitions.items() if turn.target == "rest"]
    if bound.content is None or not wraps:
        return bound.combined()
    end = RepeatNode(
        SequenceNode((_BREAK, _alternation([LiteralNode(mark) for mark in wraps]))),
        min_count=0,
        max_count=1,
    )
    content = SequenceNode((bound.content, end))
    return content if bound.calls is None else AlternationNode((content, bound.calls))


def _channel_messages(
    bound: AnswerGrammar, how: ChannelMarkup, mode: ParserMode, *, goes_on: bool
) -> GrammarNode:
    """An answer of several messages: thoughts, then one of content or calls."""
    content = None
    if bound.content is not None:
        content = SequenceNode((LiteralNode(how.content), bound.content))
    calls = bound.calls
    if calls is not None and how.call[0]:
        before, after = how.call
        headers = [LiteralNode(f"{before}{name}{after}") for name in bound.functions]
        calls = SequenceNode((_alternation(headers), calls))
    last = AnswerGrammar(content, calls).combined()
    thought = SequenceNode(
        (LiteralNode(how.reasoning), UntilNode(how.end), LiteralNode(how.next_message))
    )
    answer = SequenceNode((RepeatNode(thought, min_count=0), last))
    if mode.kind is ModeKind.REASONING:
        return SequenceNode((UntilNode(how.end), LiteralNode(how.next_message), answer))
    if goes_on and bound.content is not None:
        return bound.content
    return answer


def _alternation(parts: Sequence[GrammarNode]) -> GrammarNode:
    return parts[0] if len(parts) == 1 else AlternationNode(tuple(parts))


# -- how long -------------------------------------------------------------------------------------


def thinking_budget(
    budget: int,
    dialect: ReasoningFormat,
    encode: Callable[[str], Sequence[int]],
    prompt: str = "",
    variables: Mapping[str, object] | None = None,
    *,
    begun: str = "",
) -> ThinkingBudget | None:
    """The budget in tokens of this model. None: the format has no marks of thoughts."""
    mode = ReasoningParser(dialect, prompt, variables, begun=begun).mode
    if dialect.channels is not None:
        begin, end = dialect.channels.reasoning, dialect.channels.end
    elif dialect.prefix:
        begin, end = dialect.prefix, "</" + dialect.prefix.removeprefix("<")
        return ThinkingBudget(budget, tuple(encode(end)), None)
    elif mode.kind is ModeKind.REASONING:
        begin, end = "", _end_marker(mode)
    else:
        pairs = list(_reasoning_markers(dialect, mode))
        if not pairs:
            return None
        begin, end = min(pairs, key=lambda pair: len(encode(pair[0])))
    within = mode.kind is ModeKind.REASONING
    return ThinkingBudget(budget, tuple(encode(end)), None if within else tuple(encode(begin)))


def _reasoning_markers(dialect: ReasoningFormat, mode: ParserMode) -> list[tuple[str, str]]:
    found = []
    for mark, turn in {**mode.initial_transitions, **mode.transitions}.items():
        inner = _target_mode(dialect, turn)
        if inner is not None and inner.kind is ModeKind.REASONING:
            found.append((mark, _end_marker(inner)))
    return found


def _end_marker(mode: ParserMode) -> str:
    """The mark that ends a thought."""
    return next(mark for mark, turn in mode.transitions.items() if turn.keep != "after")
