"""A trace has the requested steps, and ranges cost nothing otherwise."""

import json

from quire.executors.profiled import Executor
from quire.runner.profiler import StepProfiler, span
from tests.cpu.engine_of import engine_of, request, run


def test_a_trace_of_some_steps_is_written_with_its_ranges(tmp_path):
    engine = engine_of()
    engine._executor = Executor(engine._executor, StepProfiler(tmp_path, skip=2, steps=3))
    run(engine, [request("a", range(5), 9)])
    (path,) = tmp_path.iterdir()
    names = [e.get("name") for e in json.loads(path.read_text())["traceEvents"]]
    assert names.count("prepare") == names.count("launch") == 3


def test_a_trace_that_was_not_reached_leaves_nothing(tmp_path):
    engine = engine_of()
    engine._executor = Executor(engine._executor, StepProfiler(tmp_path, skip=50, steps=3))
    run(engine, [request("a", range(5), 9)])
    assert not list(tmp_path.iterdir())


def test_disabled_ranges_are_one_shared_object():
    assert span("a") is span("b")
