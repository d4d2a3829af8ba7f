"""ModelInput: plain data that reads the same in another process, with a part for each feature."""

import msgspec
import numpy as np
import pytest

from quire.core.constraint import Constraint
from quire.core.params import SamplingParams
from quire.core.types import (
    UNKNOWN,
    BlockCopy,
    CallOpener,
    PromptEmbeds,
    Request,
    Row,
    Sequence,
    StepPlan,
    StopConditions,
    ThinkingBudget,
    Wants,
)
from quire.runner import model_input
from quire.runner.model_input import ModelInputBuilder
from quire.runner.parts.base import StepPart, load_part_types
from quire.runner.slots import TableShape
from tests.cpu.engine_of import engine_of, request, run

SHAPE = TableShape(4, 8, 1, 4)


def sequence(name, tokens, prompt_len, *, slot, **more):
    one = Request(name, tuple(tokens[:prompt_len]), StopConditions(9, 2, frozenset([3])), **more)
    return Sequence(one, 0, list(tokens), ([slot, slot + 4],), slot=slot, max_len=prompt_len + 9)


def plan():
    params = SamplingParams(temperature=0.5, logit_bias={4: 1.5}, stop_token_ids=[7])
    bound = {
        "constraint": Constraint("{}", "auto"),
        "thinking": ThinkingBudget(3, (5, 6), None, ((9,),), (CallOpener((1,), (2,)),), (4,)),
    }
    a = sequence("a", [*range(6), UNKNOWN], 5, slot=2, params=params, seed=9, **bound)
    judged = SamplingParams(prompt_logprobs=2)
    b = sequence("b", range(20, 27), 7, slot=0, params=judged)
    vectors = (PromptEmbeds(2, 4, "float32", bytes(range(32))),)
    c = sequence("c", range(40, 47), 7, slot=1, prompt_embeds=vectors)
    rows = (Row(a, 6, 1, Wants.TOKEN), Row(b, 0, 7, Wants.TOKEN), Row(c, 3, 2, Wants.NOTHING))
    return StepPlan(
        1, rows, (a, b, c), leaves=(3,), swap_in=(BlockCopy(1, 2),), copies=(BlockCopy(5, 6),)
    )


def same(a, b):
    """Equal field by field, arrays by their elements."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tolist() == b.tolist()
    if hasattr(a, "__dataclass_fields__") and not isinstance(a, SamplingParams):
        return all(same(getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__)
    if isinstance(a, msgspec.Struct):
        return all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, (list, tuple, range)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def test_an_input_is_the_same_after_a_trip_between_processes():
    made = ModelInputBuilder(SHAPE).build(plan())
    assert made.joins[0].tokens == [*range(6)], "an unknown token is no history"
    assert made.joins[2].tokens == [40, 41, 46], "a vector is no history"
    assert (made.joins[2].prompt_len, made.joins[2].max_len) == (3, 12)
    assert made.parts.keys() == {"prompt_logprobs", "prompt_embeds"}
    (piece,) = made.parts["prompt_embeds"].pieces
    assert (piece.first_token, piece.data) == (8, bytes(range(8, 24))), "the vectors of its chunk"
    found = model_input.decode(model_input.encode(made), load_part_types())
    assert same(made, found)
    found.batch.token_ids[0] = 1  # a worker fills in the tokens that only it has
    assert not same(made, found)


def test_nothing_of_an_input_changes_with_the_scheduler_s_objects():
    step = plan()
    builder = ModelInputBuilder(SHAPE)
    made = builder.build(step)
    before = model_input.encode(made)
    for seq in step.joins:
        seq.tokens[:] = [1]
        seq.tables[0][:] = [9]
    assert model_input.encode(made) == before


def test_functions_cannot_be_sent_to_another_process():
    step = plan()
    step.joins[0].request.params.logits_processors = [lambda ids, row: row]
    with pytest.raises(TypeError, match="cannot be sent"):
        model_input.encode(ModelInputBuilder(SHAPE).build(step))


class Ended(StepPart, frozen=True, array_like=True):
    """A second feature's part: it ends the rows whose first token is 60, by the sum of hidden."""

    rows: list[int]
    tokens: list[int]

    @classmethod
    def prepare(cls, plan, batch):
        picked = [i for i, row in enumerate(plan.rows) if row.seq.tokens[0] == 60]
        if not picked or batch.decode_only:
            return None
        return cls(picked, [int(batch.q_starts[list(batch.rows).index(i)]) for i in picked])

    def apply(self, forward):
        sums = [f"the sum is {float(forward.hidden[at].sum())}" for at in self.tokens]
        return type("Done", (), {"result": lambda _: {"errors": dict(zip(self.rows, sums))}})()


def test_another_feature_s_part_needs_no_other_file(monkeypatch):
    real = model_input.load_part_types()
    engine = engine_of()
    builder = engine._executor._inputs
    monkeypatch.setattr(builder, "_part_types", {**real, "ended": Ended})
    out, updates = run(engine, [request("a", [60, 61], 4), request("b", [61, 62], 4)])
    assert len(out["b", 0]) == 4
    assert [(u.request_id, u.error[:10]) for u in updates if u.error] == [("a", "the sum is")]
