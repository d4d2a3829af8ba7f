"""Counting reasoning tokens: markers do not count, and parts of one answer share a budget."""

import pytest

from quire.core.types import ThinkingBudget
from quire.sampling.steps.reasoning_budget import ReasoningBudget

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
