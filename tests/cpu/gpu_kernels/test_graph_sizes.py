"""Which graphs there are and how they are captured: with graphs that are only names."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from quire.runner.gpu import cuda_graphs
from quire.runner.gpu.cuda_graphs import (
    CudaGraphCache,
    DecodeGraph,
    capture_sizes,
    decode_graph_groups,
    decode_graphs,
    padded_sample_rows,
    variant_sizes,
)
from quire.runner.long_contexts import LongContextRows
from quire.runner.parts.base import PLAIN


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


def test_a_decode_step_is_one_graph_if_small_and_two_otherwise():
    assert decode_graphs(8, "random") == (DecodeGraph(8, "whole", "random"),)
    assert decode_graphs(8, None) == (DecodeGraph(8, "forward"),)
    for size, kind in ((8, "penalised"), (12, "greedy")):
        assert decode_graphs(size, kind) == (
            DecodeGraph(size, "forward"),
            DecodeGraph(size, "sampling", kind),
        )


@pytest.mark.parametrize("rows", [1, 7, 256, 1024])
def test_groups_hold_every_graph_of_every_step_once_and_begin_with_the_largest(rows):
    groups = decode_graph_groups(rows)
    found = [graph for group in groups for graph in group]
    wanted = {
        graph
        for size in capture_sizes(rows)
        for kind in (None, "greedy", "random", "penalised")
        for graph in decode_graphs(size, kind)
    }
    assert len(found) == len(set(found))
    assert set(found) == wanted
    assert {graph.part for graph in groups[0]} == {"forward"}
    for group in groups:
        assert group == sorted(group, reverse=True)
    assert sum(graph.part != "sampling" for graph in found) <= 42


def cache(monkeypatch, body=lambda key: None):
    """A cache whose graphs run the body again, and the list of its captures."""
    captures = []

    def capture(self, launch):
        captures.append(launch)
        launch()
        return type("Graph", (), {"replay": lambda self: launch()})()

    monkeypatch.setattr(CudaGraphCache, "_reserve", lambda self, size: setattr(self, "_pool", 1))
    monkeypatch.setattr(CudaGraphCache, "_capture", capture)
    return CudaGraphCache(body, torch.device("cuda")), captures


def test_what_was_not_captured_is_launched(monkeypatch):
    ran = []
    graphs, captures = cache(monkeypatch, ran.append)
    graphs.run(5)
    assert (ran, captures) == ([5], [])
    graphs.capture([7, 6], 0)
    ran.clear()
    for key in (7, 6, 5):
        graphs.run(key)
    assert ran == [7, 6, 5]
    assert len(captures) == len(graphs) == 2
    assert 6 in graphs
    assert 5 not in graphs
    graphs.clear()
    assert 6 not in graphs


def test_a_capture_that_loaded_a_kernel_is_tried_again(monkeypatch):
    failures = [RuntimeError("not permitted when stream is capturing")]

    def body(key):
        if failures:
            raise failures.pop()

    graphs, _ = cache(monkeypatch, body)
    graphs.capture([2, 1], 0)
    assert len(graphs) == 2


def test_where_captures_fail_the_rest_is_launched_and_a_warning_names_it(monkeypatch, caplog):
    def body(key):
        if key == 2:
            raise RuntimeError("out of memory")

    graphs, captures = cache(monkeypatch, body)
    graphs.capture([3, 2, 1], 0)
    assert [key in graphs for key in (3, 2, 1)] == [True, False, False]
    assert len(captures) == 3
    graphs.run(1)
    assert "such as 2 run without CUDA graphs from now on: out of memory" in caplog.text


def test_a_body_that_waits_is_found(monkeypatch, caplog):
    mode = [0]
    monkeypatch.setattr(cuda_graphs.torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(
        cuda_graphs.torch.cuda, "set_sync_debug_mode", lambda m: mode.__setitem__(0, m)
    )

    def body(key):
        if key == "waits" and mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if key == "fails":
            raise RuntimeError("broken")

    graphs = CudaGraphCache(body, torch.device("cuda"))
    assert graphs.launch_without_waits("goes on")
    assert not graphs.launch_without_waits("waits")
    assert "such as waits run without CUDA graphs" in caplog.text
    with pytest.raises(RuntimeError, match="broken"):
        graphs.launch_without_waits("fails")
    assert mode == [0]


def test_steps_with_long_contexts_have_half_of_the_sizes_and_their_sampling_apart():
    variant = LongContextRows()
    found = variant_sizes(capture_sizes(256), variant)
    assert found == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]
    assert variant_sizes(capture_sizes(5), variant) == [1, 2, 4, 5]
    plain, own = ({graph for group in decode_graph_groups(256, one) for graph in group}
                  for one in (PLAIN, variant))  # fmt: skip
    assert not plain & own
    for size in found:
        for kind in (None, "greedy", "random", "penalised"):
            graphs = decode_graphs(size, kind, variant)
            assert graphs[0].part == "forward"
            assert {*graphs} <= plain | own
    assert len(own) == len(found) + 2 * 4, "forward passes, and sampling of 1, 2, 4 and 8 rows"
