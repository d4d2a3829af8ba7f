"""quire doctor: what is wrong with the nodes of a cluster, and how their reports are gathered."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading

import msgspec
import pytest

from quire.cli import doctor
from quire.distributed.cluster_secret import ClusterSecret
from quire.engine.cluster import node_report
from quire.engine.cluster.node_check import check_nodes
from quire.engine.cluster.node_exchange import NodeExchange
from quire.engine.cluster.node_report import NodeProbe, NodeReport
from quire.errors import ConfigError

GIB = 1 << 30
HEAD = NodeReport(
    host="a", address="10.0.0.1", port=4001,
    interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",), "ib0": ("10.1.0.1",)},
    versions={"Python": "3.11", "torch": "2.11.0", "NCCL": "2.28.3"},
    gpus=8, gpu_name="NVIDIA H100", gpu_bytes=80 * GIB, gpu_free_bytes=79 * GIB,
    shared_memory_bytes=10 * GIB, host_free_bytes=100 * GIB, rdma=("mlx5_0",), variables={},
)  # fmt: skip
OTHER = msgspec.structs.replace(
    HEAD,
    host="b", address="10.0.0.2", port=4002,
    interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.2",), "ib0": ("10.1.0.2",)},
)  # fmt: skip


def changed(**values):
    return msgspec.structs.replace(OTHER, **values)


def test_equal_nodes_that_reach_each_other_are_fine():
    assert check_nodes([HEAD, OTHER], {"10.0.0.1": {}, "10.0.0.2": {}}) == []
    assert check_nodes([HEAD], {}) == []


@pytest.mark.parametrize(
    ("node", "level", "message"),
    [
        (changed(versions=HEAD.versions | {"NCCL": "2.27.5"}), "error", "NCCL is 2.27.5, and 2.28.3 on a (10.0.0.1)"),
        (changed(versions={"Python": "3.11", "torch": "2.11.0"}), "error", "NCCL is not installed, and 2.28.3"),
        (changed(address="10.0.9.9"), "error", "no interface has the address 10.0.9.9; it has lo 127.0.0.1, eth0 10.0.0.2"),
        (changed(address="127.0.0.1"), "error", "a loopback address, which no other node can reach"),
        (changed(ray_address="10.1.0.2"), "error", "Ray knows it as 10.1.0.2, and its address is 10.0.0.2"),
        (changed(gpus=0, gpu_name="no driver"), "error", "no GPU: no driver"),
        (changed(gpus=4), "warning", "4 x NVIDIA H100, and 8 x NVIDIA H100 on a (10.0.0.1)"),
        (changed(gpu_free_bytes=40 * GIB), "warning", "40.00 GiB of the first GPU's 80.00 GiB are in use"),
        (changed(shared_memory_bytes=64 << 20), "error", "/dev/shm has 64.00 MiB free, and NCCL needs 1.00 GiB: start the container with --shm-size"),
        (changed(rdma=()), "warning", "no RDMA device: sums over nodes use TCP"),
        (changed(variables={"NCCL_SOCKET_IFNAME": "enp"}), "error", "NCCL_SOCKET_IFNAME=enp matches no interface; it has"),
        (changed(variables={"GLOO_SOCKET_IFNAME": "ib0"}), "warning", "GLOO_SOCKET_IFNAME=ib0, and its address 10.0.0.2 is on eth0"),
        (changed(variables={"NCCL_SOCKET_IFNAME": "^lo,ib"}), None, ""),
        (changed(variables={"NCCL_SOCKET_IFNAME": "=eth0"}), None, ""),
        (changed(variables={"NCCL_SOCKET_IFNAME": "=eth"}), "error", "=eth matches no interface"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_node(node, level, message):
    found = check_nodes([HEAD, node], {})
    if level is None:
        assert found == []
        return
    (one,) = found
    assert (one.level, one.node) == (level, node.name)
    assert message in one.message


def test_pairs_that_do_not_connect_are_named_both():
    (found,) = check_nodes([HEAD, OTHER], {"10.0.0.1": {"10.0.0.2": "timed out"}})
    assert found.node == "a (10.0.0.1)"
    assert "cannot connect to b (10.0.0.2), interface eth0, port 4002: timed out" in found.message


def test_a_model_must_be_the_same_on_each_node(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    assert node_report.model_files(folder) is None
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"1234")
    files = node_report.model_files(folder)
    assert files["model.safetensors"] == "4 bytes"
    head = msgspec.structs.replace(HEAD, model=files)
    assert check_nodes([head, changed(model=dict(files))], {}, model="/m") == []
    (found,) = check_nodes([head, OTHER], {}, model="/m")
    assert "no model in /m" in found.message
    (folder / "config.json").write_text("{ }")
    (found,) = check_nodes([head, changed(model=node_report.model_files(folder))], {}, model="/m")
    assert "/m/config.json is 3 bytes, sha256" in found.message
    (found,) = check_nodes([HEAD, changed(model=files)], {}, model="/m")
    assert found.node == HEAD.name


def test_a_probe_reports_this_machine_and_connects(monkeypatch):
    monkeypatch.setenv("QUIRE_HOST_IP", "127.0.0.1")
    probe = NodeProbe()
    try:
        report = probe.report(None)
        assert report.interfaces["lo"][0] == "127.0.0.1"
        assert probe.connect({"127.0.0.1": report.port}) == {}
    finally:
        probe.close()
    assert list(probe.connect({"127.0.0.1": report.port})) == ["127.0.0.1"]
    monkeypatch.setenv("QUIRE_HOST_IP", "203.0.113.1")  # of no interface
    probe = NodeProbe()
    report = probe.report(None)
    assert (report.address, report.port) == ("203.0.113.1", 0)


# -- without Ray --------------------------------------------------------------------------------


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def exchange_on(nodes, secrets, timeout_s=60.0):
    """What gather() returns or raises on each of these nodes, each in a thread."""
    port, results = free_port(), {}

    def run(at, node):
        try:
            end = NodeExchange("127.0.0.1", port, node, 3, secrets[at])
        except ConfigError as error:
            results[at] = error
            return
        try:
            results[at] = [end.gather(b"%d" % node, timeout_s), end.gather(b"x", timeout_s)]
        except ConfigError as error:
            results[at] = error
        finally:
            end.close()

    threads = [threading.Thread(target=run, args=one) for one in enumerate(nodes)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return results


@pytest.fixture(scope="module")
def secrets():
    return ClusterSecret(b"s" * 16), ClusterSecret(b"t" * 16)


@pytest.mark.parametrize("secured", [False, True])
def test_values_reach_all_nodes_in_order(secured, secrets):
    results = exchange_on([2, 0, 1], [secrets[0] if secured else None] * 3)
    assert list(results.values()) == [[[b"0", b"1", b"2"], [b"x"] * 3]] * 3


def test_a_node_that_is_missing_or_has_another_secret_is_named(secrets):
    results = exchange_on([0, 1, 2], [secrets[0], secrets[0], secrets[1]], timeout_s=1)
    assert re.match("nodes (1, )?2 of 3 have not connected to 127.0.0.1:", str(results[0]))
    assert re.match("the check has failed on node 0|node 0 has not answered", str(results[1]))
    assert "node 0 has not answered at 127.0.0.1:" in str(results[2])


def test_two_nodes_with_one_rank_are_an_error():
    results = exchange_on([0, 1, 1], [None] * 3)
    assert "two nodes have node_rank 1" in str(results[0])
    assert "the check has failed on node 0" in str(results[1]) + str(results[2])


def test_nothing_listens_beyond_loopback_without_a_secret():
    with pytest.raises(ConfigError, match=r"master_addr=10.0.0.1 is not loopback.*openssl rand"):
        NodeExchange("10.0.0.1", 1, 0, 2, None)
    port = free_port()
    first = NodeExchange("127.0.0.1", port, 0, 2, None)
    with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
        NodeExchange("127.0.0.1", port, 0, 2, None)
    first.close()


def test_two_nodes_check_each_other_from_the_command_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("QUIRE_HOST_IP", "127.0.0.1")
    port = str(free_port())
    status = {}

    def run(node):
        args = ["--cluster", "--nnodes", "2", "--node-rank", node, "--master-port", port, "--json"]
        status[node] = doctor.main([*args, str(tmp_path)])

    threads = [threading.Thread(target=run, args=(node,)) for node in "01"]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert status == {"0": 1, "1": 1}  # no model, and loopback
    found = json.JSONDecoder().raw_decode(capsys.readouterr().out)[0]
    assert len(found["nodes"]) == 2
    assert {one["message"][:16] for one in found["findings"] if one["level"] == "error"} == {
        "there is no mode", "it is known by a",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["model"], "give the absolute path"),
        (["--nnodes", "2"], "need --cluster"),
        (
            ["--cluster", "--nnodes", "2", "--node-rank", "2"],
            "node_rank=2 must be less than nnodes=2",
        ),
        (["--cluster", "--nnodes", "2", "--master-addr", "10.0.0.1"], "need a common secret"),
    ],
)
def test_wrong_arguments_are_refused(args, message):
    with pytest.raises(ConfigError, match=message):
        doctor.main(args)


# -- with Ray -----------------------------------------------------------------------------------


def test_nodes_of_a_ray_cluster_report_from_the_command_line(tmp_path):
    """Over the fake of Ray: two nodes are this machine, and one has no quire."""
    nodes = [
        {"id": "other", "address": "127.0.0.1", "total": 0, "free": 0},
        {"id": "own", "address": "127.0.0.1", "total": 0, "free": 0},
        {"id": "broken", "address": "10.0.0.3", "total": 0, "free": 0},
    ]
    cluster = {"nodes": nodes, "me": "own", "log": str(tmp_path / "log")}
    root = pathlib.Path(__file__).resolve().parents[3]
    path = os.pathsep.join([str(root / "tests/fake_ray"), str(root)])
    environment = os.environ | {"FAKE_RAY": json.dumps(cluster), "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-m", "quire", "doctor", "--cluster"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 1, run.stderr
    assert (
        "error: host-broken (10.0.0.3): it does not report: RayActorError: ModuleNot" in run.stdout
    )
    assert "it is known by a loopback address" in run.stdout
    assert (tmp_path / "log").read_text().splitlines() == ["init auto 0", "shutdown"]
