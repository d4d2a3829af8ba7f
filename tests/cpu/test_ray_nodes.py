"""Ranks on Ray: the Ray process and its engine's side, over a fake of Ray (fake_ray)."""

import json
import os
import pathlib
import types

import pytest

from quire import env
from quire.config.options import Options
from quire.engine.cluster.ray_messages import PlaceRanks
from quire.engine.cluster.ray_nodes import RayNodes, describe_nodes, place_ranks
from quire.errors import ConfigError
from quire.executors.node_head import NodeHead

PARALLEL = types.SimpleNamespace(nodes=2, ranks_per_node=2)
CONFIG = types.SimpleNamespace(parallel=PARALLEL, device=types.SimpleNamespace(kind="cpu"))
OPTIONS = Options.from_flat({"distributed_executor_backend": "ray"})
FAKE = pathlib.Path(__file__).resolve().parents[1] / "fake_ray"
TWO = [
    {"id": "n1", "address": "127.0.0.2", "total": 2, "free": 2},
    {"id": "n2", "address": "127.0.0.1", "total": 2, "free": 2},
    {"id": "n3", "address": "10.0.0.3", "total": 8, "free": 8, "alive": False},
]


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Describes the fake cluster; returns a function that reads the log of its calls."""
    monkeypatch.syspath_prepend(str(FAKE))

    def describe(**given):
        found = {"nodes": TWO, "me": "n2", "groups": {}, "log": str(tmp_path / "log"), **given}
        monkeypatch.setenv("FAKE_RAY", json.dumps(found))
        return lambda: (tmp_path / "log").read_text().splitlines()

    return describe


def order(ranks, **given):
    defaults = {
        "device": "auto", "gpus_per_rank": 1.0, "timeout_s": 25.0, "address": "10.0.0.1:6379",
        "group": None, "indices": None, "variables": {"NCCL_DEBUG": "INFO"},
    }  # fmt: skip
    return PlaceRanks(ranks, **(defaults | given))


def test_ranks_are_placed_agents_run_and_all_is_given_back(cluster, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    log = cluster()
    nodes = RayNodes(OPTIONS, order(4))
    assert describe_nodes(nodes.nodes) == (
        "ranks 0 to 1 on host-n2 (127.0.0.1), GPU 0, 1; ranks 2 to 3 on host-n1 (127.0.0.2), GPU 2, 3"
    )
    assert nodes.options.parallel.nnodes == 2
    assert nodes.options.parallel.distributed_executor_backend == "mp"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setattr(NodeHead, "gather", lambda head, options, check: check())
    head = nodes.gather(CONFIG)
    assert list(head.ranks) == [2, 3]
    head.close()
    nodes.close()
    nodes.close()
    calls = log()
    assert calls[:2] == ["init 10.0.0.1:6379 0", f"group {[{'GPU': 1.0}] * 4} PACK"]
    assert "actor 0 1.0 0" in calls
    assert "prepare 2 ['NCCL_DEBUG'] ['2', '3']" in calls
    started = [one for one in calls if one.startswith("run ")]
    assert started == [f"run 2 127.0.0.1 {head.endpoint.port} 1 32"]
    assert calls[-6:] == ["kill 0", "kill 1", "kill 2", "kill 3", "remove", "shutdown"]


def test_a_rank_on_a_cpu_reserves_one(cluster):
    nodes = [one | {"total": 0} for one in TWO]
    log = cluster(nodes=nodes, groups={"ab": {"bundles": [{"CPU": 1.0}], "nodes": ["n2"]}})
    with_cpu = RayNodes(OPTIONS, order(1, device="cpu", group="ab"))
    assert with_cpu.nodes[0].devices == ()
    with_cpu.close()
    assert "actor 0 0 1.0" in log()


def test_an_existing_group_is_used_and_not_removed(cluster):
    bundles = [{"CPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]
    log = cluster(groups={"ab12": {"bundles": bundles, "nodes": ["n2", "n1", "n2"]}})
    nodes = RayNodes(OPTIONS, order(2, group="ab12", indices="2,1"))
    assert [one.bundles for one in nodes.nodes] == [(2,), (1,)]
    nodes.close()
    assert log()[-3:] == ["kill 2", "kill 1", "shutdown"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("given", "described", "message"),
    [
        ({}, {"error": "no GCS"}, r"no Ray cluster at 10.0.0.1:6379 \(no GCS\): start its nodes"),
        ({"ranks": 5, "timeout_s": 1.0}, {}, r"(?s)5 ranks.* in 1 s: the cluster has 4 GPUs.*host-n1"),
        ({"ranks": 1}, {"nodes": [TWO[0], TWO[1] | {"total": 0}]}, "this node has no GPU"),
        ({"group": "xy"}, {}, "'xy' is not the id of a placement group"),
        ({"group": "ab"}, {}, "the placement group ab is not ready: unknown"),
        ({"group": "ab"}, {"groups": {"ab": {"bundles": [], "state": "PENDING"}}}, "ready: PENDING"),
        ({"group": "ab"}, {"groups": {"ab": {"bundles": [{"GPU": 1.0}], "nodes": ["n2"]}}}, "1 are missing"),
    ],
    ids=["cluster", "shortage", "engine's node", "id", "unknown", "pending", "few"],
)  # fmt: skip
def test_a_placement_that_fails_says_why_and_leaves_nothing(cluster, given, described, message):
    log = cluster(**described)
    with pytest.raises(ConfigError, match=message):
        RayNodes(OPTIONS, order(given.pop("ranks", 2), **given))
    if "error" not in described:
        assert log()[-1] == "shutdown"
        assert ("remove" in log()) == any(one.startswith("wait") for one in log())


def test_ray_that_is_missing_is_named(cluster, monkeypatch, tmp_path):
    cluster()
    (tmp_path / "none/ray").mkdir(parents=True)
    (tmp_path / "none/ray/__init__.py").write_text("raise ImportError('no ray')")
    monkeypatch.syspath_prepend(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"pip install 'quire-llm\[ray\]'"):
        RayNodes(OPTIONS, order(1))


@pytest.mark.parametrize(
    ("ends", "message"),
    [("died", "RayActorError: it is gone$"), ("left", "ended with status 0")],
)
def test_an_agent_that_ends_ends_the_start(cluster, ends, message, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cluster(ends=ends)
    nodes = RayNodes(OPTIONS, order(4))
    with pytest.raises(ConfigError, match=rf"agent of node host-n1 \(127.0.0.2\) has .*{message}"):
        nodes.gather(CONFIG)
    nodes.close()


def test_the_options_say_what_is_reserved(cluster):
    log = cluster(groups={"ab": {"bundles": [{"CPU": 1.0}], "nodes": ["n2"]}})
    options = Options.from_flat(
        {"device": "cpu", "ray_placement_group": "ab", "ray_address": "h:1"}
    )
    place_ranks(options).close()
    assert log()[:2] == ["init h:1 0", "actor 0 0 1.0"]


@pytest.mark.parametrize("name", ["nnodes", "data_parallel_size"])
def test_options_that_ray_has_no_part_in_are_refused(name):
    options = Options.from_flat({"distributed_executor_backend": "ray", name: 2})
    with pytest.raises(ConfigError, match=f"{name}=2 and distributed_executor_backend='ray'"):
        place_ranks(options)


def test_variables_of_other_nodes_are_defaults_without_secrets_and_addresses(monkeypatch):
    monkeypatch.setattr(env.os, "environ", {})
    env.os.environ.update(
        NCCL_DEBUG="INFO", HF_HOME="/models", PYTHONHASHSEED="1", QUIRE_CHECK="1", MINE="1", MY_A="2",
        QUIRE_API_KEY="k", VLLM_API_KEY="k", QUIRE_CLUSTER_SECRET="s", QUIRE_HOST_IP="10.0.0.1",
        VLLM_PORT="1", CUDA_VISIBLE_DEVICES="3", LOCAL_RANK="1", PATH="/bin", QUIRE_CACHE="/c",
    )  # fmt: skip
    found = env.copied_variables(["MINE", "MY_*"])
    assert sorted(found) == [
        "HF_HOME",
        "MINE",
        "MY_A",
        "NCCL_DEBUG",
        "PYTHONHASHSEED",
        "QUIRE_CHECK",
    ]
    monkeypatch.setattr(env.os, "environ", {"NCCL_DEBUG": "WARN", "MINE": "1"})
    assert env.set_node_variables(found, ["2", "3"]) == ["NCCL_DEBUG"]
    assert env.os.environ == found | {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "2,3"}
