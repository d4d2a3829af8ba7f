"""Which steps divide the keys of their decoding rows evenly."""

import pytest

from quire.core.types import Request, Row, Sequence, StepPlan, StopConditions, Wants
from quire.runner.parts.long_contexts import LongContextsPart
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
    rows = []
    for i, context in enumerate(contexts):
        request = Request(f"{i}", (5,) * context, StopConditions(max_tokens=9))
        seq = Sequence(request, 0, [*request.prompt], ([i + 1],), slot=i)
        rows.append(Row(seq, context - 1, 1, Wants.TOKEN, 0))
    plan = StepPlan(1, tuple(rows))
    assert (LongContextsPart.prepare(plan, build_step_batch(plan)) is not None) == divided
