"""The nouns that carry behaviour."""

from __future__ import annotations

from quire.core.types import StepPlan


class Masks:
    pass


def test_a_plan_finds_its_parts_by_type():
    masks = Masks()
    plan = StepPlan(1, (), parts=("a text", masks))
    assert plan.part(Masks) is masks
    assert plan.part(str) == "a text"
    assert plan.part(int) is None
