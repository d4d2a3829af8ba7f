"""Counting reasoning tokens: markers do not count, and parts of one answer share a budget."""

import pytest

from quire.core.types import CallOpener, ThinkingBudget
from quire.sampling.steps.reasoning_budget import ReasoningBudget
from quire.text.reasoning.parser import ReasoningParser
from quire.text.reasoning.select import select_reasoning_format
from quire.text.tokenizing.token_bytes import TokenStarts
from quire.text.tools._call_openers import call_openers
from quire.tool_grammar.after_reasoning import thinking_budget
from tests.pure.tools.rendering import CallToRender, render_calls
from tests.pure.tools.samples import DECLARED, FORMATS, format_of

BEGIN, END = (1, 2), (8, 8, 9)


def after(asked, tokens):
    thought = ReasoningBudget.from_params(asked)
    for token in tokens:
        thought.accept(token)
    return thought


@pytest.mark.parametrize(
    ("tokens", "forced"),
    [
        ([], None),
        ([5, 5], None),
        ([5, 5, 5], 8),
        ([5, 5, 5, 8], 8),
        ([5, 5, 5, 8, 8], 9),
        ([5, 5, 5, 8, 8, 9], None),
        ([5, 8, 8, 9, 5, 5, 5, 5], None),  # it ended by itself
        ([5, 5, 8], 8),  # what was begun is made whole
        ([5, 8, 8, 8], 9),  # the mark begins at the second of three
    ],
)
def test_the_end_mark_is_forced_token_by_token(tokens, forced):
    assert after(ThinkingBudget(3, END), tokens).forced_token == forced


def test_reasoning_that_ended_itself_uses_the_budget_without_markers():
    asked = ThinkingBudget(4, END, BEGIN)
    first = [*BEGIN, 5, 5, *END, 7, 7]
    assert after(asked, first).forced_token is None
    assert after(asked, [*first, *BEGIN, 5]).forced_token is None
    assert after(asked, [*first, *BEGIN, 5, 5]).forced_token == 8
    assert after(asked, [7] * 20).forced_token is None


def test_a_budget_of_zero_ends_reasoning_at_its_start():
    assert after(ThinkingBudget(0, END), []).forced_token == 8
    assert after(ThinkingBudget(0, END, BEGIN), [1]).forced_token is None
    assert after(ThinkingBudget(0, END, BEGIN), BEGIN).forced_token == 8


def test_a_mask_is_due_only_where_the_budget_may_be_used_up_by_what_is_not_seen():
    seen = after(ThinkingBudget(5, END), [5, 5])
    assert [seen.may_force(n) for n in (2, 4, 5, 6)] == [False, False, True, True]
    outside = after(ThinkingBudget(1, END, BEGIN), [7, 7])
    assert [outside.may_force(n) for n in (2, 3, 4, 5)] == [False, False, False, True]
    assert not after(ThinkingBudget(0, END), [*END]).may_force(50)


# -- other ends -----------------------------------------------------------------------------------

CALL, FOLLOWS, SPACE = 30, 31, 32
ASKED = ThinkingBudget(
    4,
    END,
    other_end_token_ids=((40,),),
    call_openers=(CallOpener((CALL,), (FOLLOWS,)), CallOpener((50, 51), (FOLLOWS,))),
    whitespace_ids=(SPACE,),
)


@pytest.mark.parametrize(
    ("tokens", "forced"),
    [
        ([5, 40, 5, 5, 5, 5], None),
        ([5, CALL, FOLLOWS, 5, 5, 5, 5], None),
        ([5, CALL, SPACE, SPACE, FOLLOWS, 5, 5], None),
        ([5, 5, 5, CALL], None),  # the next token decides
        ([5, 5, CALL, SPACE, SPACE], None),
        ([5, 5, 5, CALL, 5], 8),  # it was no call
        ([5, CALL, SPACE, 5], 8),
        ([5, CALL, 8, 8], 9),
        ([CALL, *[SPACE] * 20], 8),
        ([5, 5, 5, CALL, CALL, FOLLOWS, 5], None),
        ([5, 5, 5, 50], None),  # an opener that is begun is no reasoning yet
        ([5, 5, 5, 50, 5], 8),
        ([5, 5, 5, 50, 50], 8),
        ([5, 5, 5, 50, 51, FOLLOWS, 5], None),
    ],
)
def test_what_ends_reasoning_for_the_parser_ends_its_budget(tokens, forced):
    assert after(ASKED, tokens).forced_token == forced


def test_a_call_and_its_opener_do_not_count():
    again = ThinkingBudget(4, END, BEGIN, (), ASKED.call_openers, (SPACE,))
    first = [*BEGIN, 5, 5, CALL, SPACE, FOLLOWS, 7, 7]
    assert after(again, [*first, *BEGIN, 5]).forced_token is None
    assert after(again, [*first, *BEGIN, 5, 5]).forced_token == 8


BYTES = TokenStarts([bytes([i]) for i in range(256)])
PAIRS = [
    ("qwen3", "<think>"), ("deepseek_r1", ""), ("mistral", "[THINK]"), ("kimi_k3", "<|open|>think<|sep|>"),
    ("minimax_m3", "<mm:think>"), ("gemma4", "<|channel>thought\n"),
]  # fmt: skip


def budget_of_bytes(tokens, name, prompt, tools):
    """A budget where each byte is a token, and the literals that open calls."""
    names = [tool["function"]["name"] for tool in DECLARED]
    openers = call_openers(format_of(tools), names)
    asked = thinking_budget(
        tokens,
        select_reasoning_format(name),
        lambda mark: [*mark.encode()],
        prompt,
        openers={mark: BYTES.ids_before(texts) for mark, texts in openers.items()},
        whitespace_ids=BYTES.whitespace_ids,
    )
    return ReasoningBudget.from_params(asked), openers


@pytest.mark.parametrize("tools", sorted(FORMATS))
def test_a_budget_never_ends_reasoning_within_a_call(tools):
    one = format_of(tools)
    calls = [CallToRender("get_weather", {"city": "Rom " * 30}), CallToRender("now", {})]
    text = f"I look.\n{render_calls(one, calls)}"
    for name, prompt in PAIRS:
        budget, openers = budget_of_bytes(60, name, prompt, tools)
        parser = ReasoningParser(select_reasoning_format(name), prompt, openers=openers)
        parser.push(text, last=True)
        ends = parser.spans[-1][1] is not None
        forced = [(budget.accept(token), budget.forced_token)[1] for token in text.encode()]
        assert any(forced) != ends, (name, text)


def test_markup_that_no_call_follows_uses_up_the_budget():
    text = "I write <tool_call> or <tool_call>\n, see"
    budget, _ = budget_of_bytes(12, "qwen3", "<think>", "hermes")
    forced = [(budget.accept(token), budget.forced_token)[1] for token in text.encode()]
    first = next(at for at, token in enumerate(forced) if token is not None)
    assert text[: first + 1] == "I write <tool_call> o"
