"""Counting tokens of thought: marks do not count, and thoughts of one answer share a budget."""

import pytest

from quire.core.types import Thinking
from quire.sampling.steps.thinking import Thought

BEGIN, END = (1, 2), (8, 8, 9)


def after(asked, tokens):
    thought = Thought.of(asked)
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
    assert after(Thinking(3, END), tokens).forced == forced


def test_thoughts_that_ended_by_themselves_use_up_the_budget_without_their_marks():
    asked = Thinking(4, END, BEGIN)
    first = [*BEGIN, 5, 5, *END, 7, 7]
    assert after(asked, first).forced is None
    assert after(asked, [*first, *BEGIN, 5]).forced is None
    assert after(asked, [*first, *BEGIN, 5, 5]).forced == 8
    assert after(asked, [7] * 20).forced is None


def test_no_budget_ends_a_thought_as_it_begins():
    assert after(Thinking(0, END), []).forced == 8
    assert after(Thinking(0, END, BEGIN), [1]).forced is None
    assert after(Thinking(0, END, BEGIN), BEGIN).forced == 8


def test_a_mask_is_due_only_where_the_budget_may_be_used_up_by_what_is_not_seen():
    seen = after(Thinking(5, END), [5, 5])
    assert [seen.due(n) for n in (2, 4, 5, 6)] == [False, False, True, True]
    outside = after(Thinking(1, END, BEGIN), [7, 7])
    assert [outside.due(n) for n in (2, 3, 4, 5)] == [False, False, False, True]
    assert not after(Thinking(0, END), [*END]).due(50)
