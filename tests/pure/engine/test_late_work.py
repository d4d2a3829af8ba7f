"""Kernels and graphs that are prepared after the engine is ready are counted, logged and timed."""

import pytest

from quire.core.accounting import metric_definitions
from quire.core.snapshot import LateWorkCounts
from quire.executors.fake import Executor
from quire.kernels.framework import late_work
from quire.kernels.framework.late_work import WARNINGS_PER_MINUTE, LateWorkRecorder
from tests.pure.engine.test_engine_core import drain, engine_over, next_token, request


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """The clock of a recorder that replaces that of this process."""
    now = [0.0]
    monkeypatch.setattr(late_work, "_recorder", LateWorkRecorder(lambda: now[0]))
    return now


def test_nothing_is_counted_before_the_engine_is_ready(caplog):
    late_work.note_kernel("rms_norm", 1.0)
    late_work.note_graph_capture("8 rows", 1.0)
    assert late_work.counts() == LateWorkCounts()
    assert not caplog.records


def test_each_event_is_counted_and_logged_once_with_name_and_milliseconds(caplog):
    late_work.set_ready(True)
    late_work.note_kernel("rms_norm(4096,)", 0.25)
    late_work.note_graph_capture("8 rows, greedy", 0.0625)
    assert late_work.counts() == (1, 1, 0.3125)
    kernel, graph = [record.getMessage() for record in caplog.records]
    assert kernel.startswith("kernel rms_norm(4096,) was compiled or loaded after start-up: 250 ms")
    assert graph.startswith("CUDA graph 8 rows, greedy was captured after start-up: 62 ms")
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_counts_are_the_same_object_until_there_is_an_event():
    late_work.set_ready(True)
    before = late_work.counts()
    assert late_work.counts() is before
    late_work.note_kernel("a", 0.0)
    assert late_work.counts() is not before


def test_many_events_are_counted_but_few_logged_in_a_minute(caplog, now):
    late_work.set_ready(True)
    for i in range(50):
        late_work.note_kernel(f"k{i}", 0.001)
    assert late_work.counts().kernel_compilations == 50
    assert len(caplog.records) == WARNINGS_PER_MINUTE
    now[0] = 61.0
    late_work.note_kernel("last", 0.001)
    assert f"({50 - WARNINGS_PER_MINUTE} more such events" in caplog.records[-1].getMessage()
    late_work.note_kernel("very last", 0.001)
    assert "more such events" not in caplog.records[-1].getMessage()


def test_what_another_engine_of_the_process_prepares_at_its_start_is_not_counted():
    late_work.set_ready(True)
    late_work.note_kernel("a", 1.0)
    with late_work.starting_up():
        late_work.note_kernel("b", 1.0)
    assert not late_work.is_ready()
    late_work.set_ready(True)
    assert late_work.counts() == LateWorkCounts()
    late_work.note_kernel("c", 1.0)
    with pytest.raises(KeyError), late_work.starting_up():
        raise KeyError
    assert late_work.is_ready()
    assert late_work.counts().kernel_compilations == 1


class Lazy(Executor):
    """Compiles a kernel in its third step, and captures a graph in the fourth."""

    def submit(self, plan):
        if plan.step == 3:
            late_work.note_kernel("late", 2.0)
        if plan.step == 4:
            late_work.note_graph_capture("late", 1.0)
        return super().submit(plan)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_engine_shows_the_counts_and_the_request_its_seconds(depth):
    engine = engine_over(Lazy(next_token), depth)
    late_work.set_ready(True)
    engine.add(request("a", max_tokens=6))
    updates = drain(engine)
    counters = metric_definitions.counters(engine.snapshot())
    assert counters["kernel_compilations_after_ready"] == {"": 1}
    assert counters["graph_captures_after_ready"] == {"": 1}
    timing = updates[-1].timing
    assert timing.compile > 0.0  # at most the time of those steps, which is less than was noted
    assert sum(timing.breakdown) == pytest.approx(timing.total)
    engine.add(request("b"))
    assert drain(engine)[-1].timing.compile == 0.0
