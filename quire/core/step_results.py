"""Step results of data-parallel ranks, as one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import fields

from quire.core.types import StepResult


def combine_results(results: Seq[StepResult]) -> StepResult:
    """Return the result of a plan from those of its `dp_plans`, in rank order."""
    whole = StepResult([ids for one in results for ids in one.token_ids])
    start = 0
    for one in results:
        for field in fields(StepResult)[1:]:  # each is a dict by row
            of_rows = getattr(one, field.name)
            getattr(whole, field.name).update({start + i: of_rows[i] for i in of_rows})
        start += len(one.token_ids)
    return whole
