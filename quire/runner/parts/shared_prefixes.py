"""Shared prefixes part: groups of decoding rows that begin with the same blocks."""

from __future__ import annotations

from quire.core.types import StepPlan
from quire.models.base import LanguageModel
from quire.runner.parts.base import StepPart, StepVariant
from quire.runner.shared_prefixes import (
    PrefixGroup,
    find_shared_prefixes,
    find_worthy_groups,
)
from quire.runner.slots import TableShape
from quire.runner.step_batch import StepBatch


class SharedPrefixesPart(StepPart, frozen=True, array_like=True):
    """Groups of the batch's rows."""

    divides_attention = 1

    groups: tuple[PrefixGroup, ...]

    @classmethod
    def is_used(cls, shape: TableShape) -> bool:
        return shape.shares_prefixes

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> SharedPrefixesPart | None:
        """Find them; None if they would save too little, or another feature has a part in the
        step."""
        groups = find_worthy_groups(plan, batch)
        return cls(tuple(groups)) if groups else None

    @classmethod
    def variant(cls, model: LanguageModel) -> StepVariant | None:
        return find_shared_prefixes(model)

    def write_inputs(self, model: LanguageModel, batch: StepBatch) -> None:
        found = find_shared_prefixes(model)
        assert found is not None, "a step with shared prefixes, of a model without the variant"
        found.write(self.groups)


PART = SharedPrefixesPart
