"""Engines of other nodes, as a head has them: who may join, and what a node reports."""

import re
from dataclasses import replace

import pytest
import zmq

from quire.config.data_parallel import engine_layout
from quire.config.options import Options
from quire.distributed.cluster_secret import ClusterSecret
from quire.engine.client.zmq_transport import tcp_address
from quire.engine.cluster.engine_link import (
    config_difference,
    configure_link,
    engine_versions,
    shared_options,
)
from quire.engine.cluster.remote_engines import RemoteEngines
from quire.engine.supervise.process_pipe import (
    ClientGone,
    EngineDraining,
    EngineRestored,
    EngineTerminated,
    EngineUnavailable,
    JoinAnswer,
    JoinEngines,
    LinkBeat,
    NodeLost,
    NodeStarted,
    RestartEngine,
    StopProcess,
    decode,
    encode,
)
from quire.errors import ConfigError
from tests.pure.config.test_resolve import run

SECRET = ClusterSecret(b"a secret of the tests of nodes")
CONFIG = run().config
WAIT_MS = 20_000


class Head:
    """The remote engines 1 to 3 of a head."""

    def __init__(self, secret=SECRET, **more):
        self.options = Options.from_flat(
            {"data_parallel_size": 4, "data_parallel_size_local": 1, "max_num_seqs": 8, **more}
        )
        with zmq.Context() as context, context.socket(zmq.ROUTER) as one:
            port = one.bind_to_random_port("tcp://127.0.0.1")
        options = Options.from_flat({**self.options.non_default(), "data_parallel_rpc_port": port})
        self.address = tcp_address("127.0.0.1", port)
        self.remote = RemoteEngines(engine_layout(options), options, secret)

    def said(self):
        return self.remote.pipe.receive(WAIT_MS / 1e3)


class Node:
    """The link of a node."""

    def __init__(self, head, secret=SECRET):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        configure_link(self.socket, head.address, secret, server=False)
        self.socket.connect(head.address)

    def join(self, first=1, count=1, versions=None, **options):
        given = shared_options(
            Options.from_flat({"data_parallel_size": 4, "max_num_seqs": 8, **options})
        )
        versions = {**engine_versions(), **(versions or {})}
        self.send(
            JoinEngines(
                first_rank=first, count=count, host="here", versions=versions, options=given
            )
        )
        return self.told()

    def send(self, message):
        self.socket.send(encode(message))

    def told(self, wait_ms=WAIT_MS):
        """The next message but beats; None: there is none."""
        while self.socket.poll(wait_ms):
            message = decode(self.socket.recv())
            if not isinstance(message, LinkBeat):
                return message
        return None

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def head():
    made = Head()
    yield made
    made.remote.stop()


@pytest.fixture
def node(head):
    made = Node(head)
    yield made
    made.close()


def test_what_a_node_reports_is_of_the_ranks_of_the_head(head, node):
    assert node.join(2, 2) == JoinAnswer()
    node.send(NodeStarted(config=CONFIG, addresses=("tcp://a:1", "tcp://a:2")))
    head.remote.set_config(CONFIG)  # later than the node's
    assert head.said() == EngineRestored(address="tcp://a:1", engine=2)
    assert head.said() == EngineRestored(address="tcp://a:2", engine=3)
    node.send(EngineUnavailable(reason="x", expected_restart_s=1.0, running_ids=["r"], engine=1))
    assert head.said() == EngineUnavailable(
        reason="x", expected_restart_s=1.0, running_ids=["r"], engine=3
    )
    node.send(EngineRestored(address="tcp://a:3", engine=1))
    assert head.said() == EngineRestored(address="tcp://a:3", engine=3)
    node.send(EngineDraining(engine=0, move_after_s=1.0))
    assert head.said() == EngineDraining(engine=2, move_after_s=1.0)
    node.send(EngineTerminated(reason="too often", engine=0))
    gone = head.said()
    assert (type(gone), gone.reason, gone.engine) == (EngineUnavailable, "too often", 2)
    head.remote.send(RestartEngine(reason="why", engine=3))
    assert node.told() == RestartEngine(reason="why", engine=1)
    head.remote.send(ClientGone(client_name="api-0"))
    assert node.told() == ClientGone(client_name="api-0")


def test_a_node_that_is_gone_may_come_again(head, node):
    head.remote.set_config(CONFIG)
    other = Node(head)
    assert node.join(1) == JoinAnswer()
    assert other.join(2, 2) == JoinAnswer()
    other.close()
    lost = [head.said(), head.said()]
    assert [one.engine for one in lost] == [2, 3]
    assert {type(one) for one in lost} == {EngineUnavailable}
    assert all(one.running_ids == [] for one in lost)  # no request is to blame
    again = Node(head)
    assert again.join(2, 2) == JoinAnswer()
    again.send(NodeLost(reason="it was ended"))
    assert "it was ended" in head.said().reason
    again.close()
    head.remote.stop()
    assert node.told() == StopProcess()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"max_num_seqs": 9},
            "options differ: the node has max_num_seqs=9, and node 0 .the head. 8",
        ),
        ({"dtype": "float32"}, "has dtype=float32, and node 0 .the head. its default"),
        ({"versions": {"torch": "1.0"}}, "versions differ: the node has torch=1.0, and node 0"),
        ({"first": 0}, r"data_parallel_start_rank=0 .* expects ranks in \[1, 3\]"),
        ({"first": 3, "count": 2}, "start_rank=3 with 2 engines"),
        ({"first": 1, "count": 2}, "engine 2 is of node here"),
    ],
)
def test_who_may_not_join(head, node, asked, said):
    other = Node(head)  # without a name it would be collected, which closes its connection
    assert other.join(2) == JoinAnswer()
    answer = node.join(**asked)
    other.close()
    assert answer.refusal is not None
    assert re.search(said, answer.refusal), answer.refusal


def test_options_of_a_node_alone_may_differ(head, node):
    mine = {"model": "/elsewhere", "download_dir": "/d", "max_engine_restarts": 0, "headless": True}
    assert node.join(**mine) == JoinAnswer()


def test_another_config_is_refused_when_it_is_known(head, node):
    head.remote.set_config(CONFIG)
    assert node.join() == JoinAnswer()
    other = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_model_len=77))
    node.send(NodeStarted(config=other, addresses=("tcp://a:1",)))
    assert "the node has scheduler.max_model_len=77, and node 0" in node.told().refusal
    assert "scheduler.max_model_len=77" in head.said().reason
    smaller = replace(
        CONFIG,
        cache=replace(CONFIG.cache, num_blocks=1),
        device=replace(CONFIG.device, threads=99),
        parallel=replace(CONFIG.parallel, engines=9),
    )
    assert config_difference(smaller, CONFIG) is None
    other = replace(CONFIG, device=replace(CONFIG.device, kind="other"))
    assert "device.kind=other" in config_difference(other, CONFIG)


def test_nodes_without_the_secret_are_not_heard(head):
    for secret in (ClusterSecret(b"another secret of others"), None):
        stranger = Node(head, secret)
        stranger.socket.send(b"garbage")
        assert stranger.told(300) is None
        stranger.close()
    node = Node(head)
    node.socket.send(b"garbage")
    assert "cannot be decoded" in node.told().refusal
    node.send(EngineRestored(address="tcp://a:1", engine=0))  # it has not joined
    assert node.join() == JoinAnswer()
    head.remote.set_config(CONFIG)
    node.send(NodeStarted(config=CONFIG, addresses=("tcp://a:9",)))
    assert head.said() == EngineRestored(address="tcp://a:9", engine=1)
    node.close()


def test_an_address_that_is_taken_is_an_error(head):
    port = int(head.address.rpartition(":")[2])
    flat = {"data_parallel_size": 2, "data_parallel_size_local": 1}
    options = Options.from_flat({**flat, "data_parallel_rpc_port": port})
    with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
        RemoteEngines(engine_layout(options), options, None)
