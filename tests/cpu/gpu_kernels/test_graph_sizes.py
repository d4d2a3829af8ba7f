"""When a size gets a graph of its own: policy alone, with graphs that are only names."""

from itertools import pairwise

import pytest

pytest.importorskip("triton")

from quire.runner.gpu import cuda_graphs
from quire.runner.gpu.cuda_graphs import (
    STEPS_BEFORE_CAPTURE,
    CudaGraphCache,
    capture_sizes,
    padded_sample_rows,
)


@pytest.fixture
def graphs(monkeypatch):
    def capture(self, key):
        self._captured[key] = graph = type("Graph", (), {"replay": lambda self: None})()
        return graph

    monkeypatch.setattr(CudaGraphCache, "_capture", capture)
    monkeypatch.setattr(
        CudaGraphCache, "_run_sync_check", lambda self, size, kind: self._sync_free_kinds.add(kind)
    )
    return CudaGraphCache(lambda size, kind: None, 1024, eager=False)


def step(graphs, rows, kind="greedy", spare=0.0):
    size = graphs.size_for(rows, kind, spare)
    graphs.run(size, kind)
    return size


def test_sizes_grow_with_the_rows_and_end_with_the_largest_step():
    found = capture_sizes(1000)
    assert found[:8] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert found == sorted(set(found))
    assert found[-1] == 1000
    assert all(b <= a * 1.5 + 1 for a, b in pairwise(found))
    assert all(b <= a * 1.25 for a, b in pairwise(found) if a >= 64)
    assert len(found) < 32
    assert capture_sizes(1) == [1]
    assert capture_sizes(5) == [1, 2, 3, 4, 5]


def test_what_is_sampled_outside_has_few_sizes():
    assert [padded_sample_rows(rows, 1000) for rows in (0, 1, 2, 3, 5, 64, 65, 600, 1000)] == [
        0, 1, 2, 4, 8, 64, 128, 1000, 1000
    ]  # fmt: skip


def test_the_first_step_of_a_kind_is_run_and_the_second_captured(graphs):
    assert step(graphs, 7) == 8
    assert not graphs._captured
    assert step(graphs, 7) == 8
    assert set(graphs._captured) == {(8, "greedy")}


def test_a_somewhat_larger_graph_serves_until_patience_ends(graphs):
    for _ in range(2):
        assert step(graphs, 1024) == 1024
    for _ in range(STEPS_BEFORE_CAPTURE):
        assert step(graphs, 850) == 1024
    assert step(graphs, 850) == 896
    assert step(graphs, 300) == 320, "1024 rows are too many for 300"


def test_a_busy_device_gives_time_to_capture(graphs):
    for _ in range(2):
        step(graphs, 1024)
    assert step(graphs, 850, spare=1.0) == 896
    assert (896, "greedy") in graphs._captured


def test_kinds_have_graphs_of_their_own(graphs):
    for _ in range(2):
        step(graphs, 64, "greedy")
    assert step(graphs, 60, "random") == 64
    assert (64, "random") not in graphs._captured
    step(graphs, 60, "random")
    assert (64, "random") in graphs._captured


def test_eager_steps_have_their_own_size_and_no_graph():
    ran = []
    graphs = CudaGraphCache(lambda size, kind: ran.append((size, kind)), 1024, eager=True)
    for rows in (5, 5, 700):
        step(graphs, rows, None)
    assert ran == [(5, None), (5, None), (700, None)]
    assert not graphs._captured


def test_a_body_that_waits_runs_eagerly_for_ever(monkeypatch):
    mode = [0]
    monkeypatch.setattr(cuda_graphs.torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(
        cuda_graphs.torch.cuda, "set_sync_debug_mode", lambda m: mode.__setitem__(0, m)
    )
    ran = []

    def body(size, kind):
        if mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        ran.append(size)

    graphs = CudaGraphCache(body, 64, eager=False)
    for rows in (5, 5, 9):
        graphs.run(graphs.size_for(rows, "greedy"), "greedy")
    assert ran == [6, 5, 9]
    assert mode == [0]
