"""No tenant learns from drafts what others were answered: neither their tokens nor their number.

A tenant's requests run after those of others who were answered the same, and alone: their rows, and
so the steps that they take, are the same.
"""

from __future__ import annotations

from itertools import count

import pytest

from quire.config.engine_config import SpeculationSection
from quire.core.scheduling.drafting import Drafting
from quire.engine.core.engine_core import EngineCore
from quire.engine.startup.scheduler_setup import HOST_DRAFTERS
from quire.executors.fake import Executor
from tests.pure.core.builders import request
from tests.pure.core.workload import Setup


def next_token(tokens):
    """Does not repeat within a text, so that its drafts can only be those of past outputs."""
    return (tokens[-1] * 7 + len(tokens) * 13) % 997 + 3


def engine(method, *, adaptive):
    scheduler, _, _ = Setup(blocks=4000, prefix_caching=False).build()
    section = SpeculationSection(method=method, max_drafts=6)
    drafter = HOST_DRAFTERS.load(method).build(section)
    scheduler._drafting = Drafting(drafter, max_drafts=6, adaptive=adaptive)
    ticks = count()
    clock = lambda: float(next(ticks))  # noqa: E731 each step takes as long
    return EngineCore(scheduler, Executor(next_token), check=True, clock=clock)


def answer(made, name, **fields):
    """Run a request; return its rows (place, tokens, drafts), and its output."""
    rows, submit, out = [], made._executor.submit, []

    def watch(plan):
        rows.extend((row.start, row.count, row.seq.drafts[: row.drafts]) for row in plan.rows)
        return submit(plan)

    made._executor.submit = watch
    made.add(request(name, (5, 1, 2), 120, **fields))
    while not made.idle:
        out += [token for update in made.step() for token in update.token_ids]
    made._executor.submit = submit
    return rows, out


OTHERS = {
    "another tenant": ({"tenant": b"other"}, {"tenant": b"own"}),
    "no tenant": ({}, {"tenant": b"own"}),
    "another salt": ({"tenant": b"own", "salt": b"1"}, {"tenant": b"own", "salt": b"2"}),
    "no salt": ({"tenant": b"own"}, {"tenant": b"own", "salt": b"2"}),
}


@pytest.mark.parametrize("who", OTHERS)
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_do_not_depend_on_what_others_were_answered(method, who):
    other, own = OTHERS[who]
    want = answer(engine(method, adaptive=False), "alone", **own)
    made = engine(method, adaptive=False)
    first, _ = answer(made, "first", **other)
    again, _ = answer(made, "again", **other)
    assert (len(again) < len(first) / 2) == (method == "suffix"), "drafts come of past outputs"
    assert answer(made, "own", **own) == want
    assert answer(made, "own again", **own)[0] == (again if method == "suffix" else first)


def test_the_number_of_drafts_begins_with_what_the_tenant_had_accepted():
    alone = engine("suffix", adaptive=True)
    want = [answer(alone, f"alone {i}", tenant=b"own") for i in range(2)]
    made = engine("suffix", adaptive=True)
    for i in range(4):
        answer(made, str(i), tenant=b"other")
    drafting = made._scheduler._drafting
    assert drafting._tenant_means[b"other"][0] > 0.8 > drafting._tenant_means.get(b"own", [0.4])[0]
    found = [answer(made, f"own {i}", tenant=b"own") for i in range(2)]
    assert found[0] == want[0]
    assert found[1][1] == want[1][1]
    assert drafting._tenant_means[b"own"] != drafting._tenant_means[b"other"]
