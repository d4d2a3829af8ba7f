"""Which steps divide the keys of their decoding rows evenly."""

import pytest

from quire.core.types import Request, Row, Sequence, StepPlan, StopConditions, Wants
from quire.runner import shared_prefixes
from quire.runner.model_input import ModelInputBuilder
from quire.runner.parts.long_contexts import LongContextsPart
from quire.runner.slots import TableShape
from quire.runner.step_batch import build_step_batch


@pytest.mark.parametrize(
    ("contexts", "divided"),
    [
        ([65536], True),
        ([65535], False),  # alone, a fused kernel is as fast
        ([32000, 32000], True),
        ([32000, *[300] * 15], True),
        ([9000, 7000], False),  # few keys in all
        ([4095] * 9, False),
        ([4096] * 9, True),
        ([4096, *[2000] * 200], False),  # no more than others of the crowd
    ],
)
def test_steps_with_a_long_context_and_enough_keys_divide_them(contexts, divided):
    plan = plan_of([(context, [i + 1]) for i, context in enumerate(contexts)])
    assert (LongContextsPart.prepare(plan, build_step_batch(plan)) is not None) == divided


def plan_of(sequences):
    """A step in which sequences of (context, block table) decode."""
    rows = []
    for i, (context, table) in enumerate(sequences):
        request = Request(f"{i}", (5,) * context, StopConditions(max_tokens=9))
        seq = Sequence(request, 0, [*request.prompt], (table,), slot=i)
        rows.append(Row(seq, context - 1, 1, Wants.TOKEN, 0))
    return StepPlan(1, tuple(rows))


@pytest.mark.parametrize(
    ("shares", "common", "part"),
    [(True, 300, "shared_prefixes"), (True, 3, "long_contexts"), (False, 300, "long_contexts")],
)
def test_a_step_divides_its_attention_in_one_way(shares, common, part, monkeypatch):
    """Groups are searched once; a model that cannot share divides the keys of long contexts."""
    searched, find = [], shared_prefixes.find_groups
    monkeypatch.setattr(
        shared_prefixes, "find_groups", lambda tables: (searched.append(1), find(tables))[1]
    )
    plan = plan_of([(4900, [*range(common), *range(1000 + 400 * i, 1307 - common + 400 * i)])
                    for i in range(16)])  # fmt: skip
    shape = TableShape(32, 400, 1, 16, shares_prefixes=shares, divides_keys=True)
    builder = ModelInputBuilder(shape)
    assert [*builder._prepare_parts(plan, build_step_batch(plan))] == [part]
    assert len(searched) == shares
