"""Joining a head: who is let in, who is refused, and by which message. No ranks are started."""

import contextlib
import re
import socket
import threading
import time

import pytest
import zmq

from quire import env
from quire.config.options import Options
from quire.distributed import node_address
from quire.distributed.cluster_secret import ClusterSecret
from quire.distributed.node_address import (
    Endpoint,
    address_warnings,
    endpoint_of,
    interface_of,
    listen,
    own_address,
    unreachable,
)
from quire.engine.startup import node_process
from quire.engine.startup.node_process import comparable_options, run_node
from quire.errors import ConfigError
from quire.executors import node_messages
from quire.executors.node_head import NodeHead
from quire.executors.node_messages import first_difference

SECRET = b"a secret of the tests"
OWN = Options.from_flat({"model": "embedded", "max_num_seqs": 8, "nnodes": 2})


@pytest.fixture
def head():
    listener = listen("127.0.0.1", 0, what="test")
    made = NodeHead(ClusterSecret(SECRET), listener, [1, 1], "cpu", open_store=None)
    yield made
    made.close()


@pytest.fixture
def agents(head, monkeypatch):
    """Runs agents in threads; their exit statuses come at the end."""
    monkeypatch.setattr(node_process, "HEAD_GONE_S", 0.5)
    monkeypatch.setattr(node_process, "FIRST_CONTACT_S", 60.0)
    statuses, threads = {}, []

    def run(name, node=1, secret=SECRET, options=OWN, port=head.endpoint.port):
        def serve():
            statuses[name] = run_node("127.0.0.1", port, node, secret, options)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return threads[-1]

    run.statuses = statuses
    yield run
    head.close()
    for one in threads:
        one.join()


def test_a_node_joins_and_ends_with_its_head(head, agents):
    agent = agents("one")
    head.gather(comparable_options(OWN))
    assert [str(one.probe.address) for one in head._nodes.values()] == ["127.0.0.1"]
    head.close()
    agent.join()
    assert agents.statuses == {"one": 0}


def test_an_agent_whose_head_goes_without_a_word_ends_too(head, agents, caplog):
    agent = agents("one")
    head.gather(comparable_options(OWN))
    head.end_ranks("a test")
    head.close()
    agent.join()
    assert agents.statuses == {"one": 1}
    assert "the head's engine has ended: a test" in caplog.text
    assert "the head is gone: nothing listens at 127.0.0.1:" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 9}, "has max_num_seqs=9, and node 0 (the head) 8"),
        ({"seed": 5}, "has seed=5, and node 0 (the head) its default"),
    ],
)
def test_other_options_are_refused_by_name(head, agents, caplog, options, message):
    other = Options.from_flat({"model": "/elsewhere", "max_num_seqs": 8, "nnodes": 2, **options})
    agent = agents("one", options=other)
    with pytest.raises(ConfigError) as raised:
        head.gather(comparable_options(OWN))
    assert message in str(raised.value)
    agent.join()
    assert agents.statuses == {"one": 1}
    assert message in caplog.text


def test_places_of_files_may_differ(head, agents):
    agents("one", options=Options.from_flat({"model": "/a", "max_num_seqs": 8, "nnodes": 2}))
    head.gather(comparable_options(OWN))


def test_other_versions_are_refused(head, agents, monkeypatch):
    seen = iter([{"quire": "1", "torch": "2"}, {"quire": "1", "torch": "3"}])
    monkeypatch.setattr(node_process, "node_versions", lambda: next(seen))
    monkeypatch.setattr("quire.executors.node_head.node_versions", lambda: next(seen))
    agents("one")
    with pytest.raises(ConfigError, match=r"node 1 \(127.0.0.1\) has version torch=2, and node 0"):
        head.gather(comparable_options(OWN))


@pytest.mark.parametrize("node", [0, 2, 7])
def test_a_number_that_is_not_of_a_node_is_refused(head, agents, caplog, node):
    stray, right = agents("stray", node), agents("right")
    head.gather(comparable_options(OWN))
    while stray.is_alive():
        assert head.poll() is None
        stray.join(0.05)
    assert agents.statuses == {"stray": 1}
    assert f"node_rank={node} is not in [1, 2), the other nodes" in caplog.text
    assert right.is_alive()


def test_a_second_of_the_same_number_is_refused(head, agents, caplog):
    agents("one")
    head.gather(comparable_options(OWN))
    second = agents("two")
    while second.is_alive():
        assert head.poll() is None
        second.join(0.05)
    assert agents.statuses == {"two": 1}
    assert "node 1 has joined already, from 127.0.0.1" in caplog.text


def test_another_secret_is_named_and_the_head_goes_on_waiting(head, agents, caplog):
    stranger = agents("stranger", secret=b"another secret of some bytes")
    stranger.join()
    assert agents.statuses == {"stranger": 1}
    assert "refuses this node: the cluster secrets differ" in caplog.text
    agents("one")
    head.gather(comparable_options(OWN))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("speaks", ["HTTP", "ZeroMQ without a secret"])
def test_an_agent_ends_where_no_head_listens(agents, caplog, monkeypatch, speaks, late):
    """late: the connection is refused before the agent sends its first message."""
    monkeypatch.setattr(node_process, "HEAD_GONE_S", 60.0)
    monkeypatch.setattr(node_process, "RETRY_LIMIT_S", 0.3)
    if late:
        made = node_process.endpoint_of  # is called between both
        monkeypatch.setattr(node_process, "endpoint_of", lambda one: time.sleep(0.3) or made(one))
    with contextlib.ExitStack() as stack:
        if speaks == "HTTP":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=refuse_as_http, args=(listener,), daemon=True).start()
            port = listener.getsockname()[1]
        else:
            context = stack.enter_context(zmq.Context())
            port = stack.enter_context(context.socket(zmq.ROUTER)).bind_to_random_port(
                "tcp://127.0.0.1"
            )
        agents("one", port=port).join(30)
        assert agents.statuses == {"one": 1}
    why = "it is no head"
    if speaks != "HTTP":  # of a busy machine: so many handshakes may fail before the limit
        why += "|the cluster secrets differ"
    assert re.search(f"at 127.0.0.1:{port} refuses this node: ({why})", caplog.text)


def refuse_as_http(listener):
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                if connection.recv(64):
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


def test_a_node_that_does_not_come_is_named(head):
    with pytest.raises(ConfigError, match=r"node 1 did not join within 0 s at 127\.0\.0\.1:\d+"):
        head.gather({}, limit_s=0.0)


def test_pairs_that_cannot_connect_are_named(head, agents, monkeypatch):
    blocked = socket.socket()
    blocked.bind(("127.0.0.1", 0))  # it does not listen
    where = endpoint_of(blocked)
    monkeypatch.setattr(node_process, "endpoint_of", lambda listener: where)
    agents("one")
    want = rf"node 0 \(127.0.0.1\) cannot connect to node 1 at {where}: Connection refused"
    with blocked, pytest.raises(ConfigError, match=want):
        head.gather(comparable_options(OWN))


# -- parts ------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_and_an_address_of_others_are_refused():
    taken = pytest.raises(ConfigError, match=r"\(--master-port\): Address already in use")
    with listen("127.0.0.1", 0, what="test") as one, taken:
        listen("127.0.0.1", endpoint_of(one).port, what="--master-port")
    with pytest.raises(ConfigError, match="must be an address of this machine"):
        listen("192.0.2.1", 0, what="test")


def test_addresses():
    assert own_address("127.0.0.1", None) == "127.0.0.1"
    assert own_address("127.0.0.1", "10.1.2.3") == "10.1.2.3"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert Endpoint("::1", 5).url == "tcp://[::1]:5"
    with listen("127.0.0.1", 0, what="test") as one:
        there = endpoint_of(one)
        assert unreachable([there, Endpoint("127.0.0.1", 1)], 5) == {1: "Connection refused"}
    assert node_address.unreachable([], 5) == {}


def test_ranks_get_the_network_but_not_the_secret(monkeypatch):
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", SECRET.decode())
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    variables = env.rank_environment(1, "eth7")
    assert "QUIRE_CLUSTER_SECRET" not in variables
    assert variables["NCCL_SOCKET_IFNAME"] == "mine"
    assert variables["GLOO_SOCKET_IFNAME"] == "eth7"


def test_suspect_addresses_are_warned_about():
    assert address_warnings(["10.0.0.1", "10.0.0.2"]) == []
    (one,) = address_warnings(["10.0.0.1", "127.0.0.1"])
    assert one.startswith("node 1 advertises 127.0.0.1, which only its own machine can reach")
    (one,) = address_warnings(["10.0.0.1", "10.0.0.2", "10.0.0.2"])
    assert one.startswith("nodes 1 and 2 both advertise 10.0.0.2")


def test_the_first_difference_is_named():
    assert first_difference("node 1", {"a": 1, "b": 2}, {"b": 2, "a": 1}, "") is None
    found = first_difference("node 1", {"b": 1}, {"b": 2, "a": 3}, "")
    assert found == "node 1 has a=3, and node 0 (the head) its default"


def test_options_of_a_node_are_not_compared():
    own = {"model": "a", "node_rank": 1, "nnodes": 2, "headless": True, "master_addr": "127.0.0.1"}
    assert comparable_options(Options.from_flat(own)) == {"nnodes": 2}
    assert set(node_messages.NODE_OPTIONS) <= set(Options().flat())
