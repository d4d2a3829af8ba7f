"""Engines on other nodes: they join a head's pool, and are lost and come again as its own do."""

import asyncio
import signal
import socket
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests import tiers
from tests.server.running import SMALL, serving, start, wait_until
from tests.server.test_engines import counts
from tests.server.test_survive import Scene, asked

STREAMS = 12
SECRET = {"QUIRE_CLUSTER_SECRET": "a secret of the tests of nodes"}
OPTIONS = ("embedded", *SMALL, "--enable-prompt-embeds", "--data-parallel-size", 2)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Node:
    """A node with the second engine: started, ended and started again."""

    def __init__(self, port):
        self._port = port
        self.log = []
        self.start()

    def start(self, *more, **variables):
        words = ("--headless", "-dpr", 1, "-dpa", "127.0.0.1", "-dpp", self._port, *more)
        self.process = start(*OPTIONS, *words, **{**SECRET, **variables})

    def engine(self):
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if child.name() == "quire-engine")

    def end(self):
        """Return what it has printed, once."""
        self.process.kill()
        return "" if self.process.stdout.closed else self.process.communicate()[0]


@contextmanager
def head_and_node():
    port = free_port()
    node = Node(port)
    try:
        more = ("-dpl", 1, "-dpp", port, "--max-engine-restarts", 1000, "--enable-dev-routes")
        with serving(*OPTIONS, *more, **SECRET) as head:
            head.read_log(node.log)
            yield head, node
    finally:
        node.end()


@pytest.fixture(scope="module")
def pair():
    with head_and_node() as both:
        yield both


def answers(url, rank):
    """Whether this engine answers."""
    body = {"prompt": "a", "max_tokens": 1}
    headers = {"X-data-parallel-rank": str(rank), "X-Request-Timeout": "5"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    return answer.status_code == 200


def streams_while(head, disturb):
    """Run streams undisturbed, and again with disturb() after some chunks: they say the same."""
    bodies = [asked(i) for i in range(STREAMS)]
    want, _ = asyncio.run(Scene(head.url).all(bodies))

    async def later(scene):
        while scene.chunks < 2 * STREAMS:
            await asyncio.sleep(0.001)
        disturb()

    found, _ = asyncio.run(Scene(head.url).all(bodies, later))
    for i, (one, other) in enumerate(zip(found, want)):
        assert one == other, asked(i)


@pytest.mark.slow("a head and a node, each with an engine")
@pytest.mark.timeout(120)
def test_requests_run_on_both_nodes(pair):
    head, _ = pair
    assert answers(head.url, 0)
    assert answers(head.url, 1)
    with httpx.Client(base_url=head.url, timeout=60) as client:
        body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 4, "seed": 3, "x_timing": True}
        client.post("/v1/completions", json=body).raise_for_status()
        work = counts(head.url, "prompt_tokens_total")
        assert all(work.values())
        assert sorted(work) == ["0", "1"]
        client.post("/reset_prefix_cache").raise_for_status()
        assert len(client.get("/server_info").json()["engines"]) == 2


@pytest.mark.slow("uses a head and a node")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", ["node", *tiers.long("engine")])
def test_streams_continue_when_a_node_loses_what_runs(pair, what):
    head, node = pair
    assert wait_until(lambda: answers(head.url, 1), 60)
    process = node.engine() if what == "engine" else psutil.Process(node.process.pid)
    streams_while(head, process.kill)
    if what == "node":
        node.end()
        node.start()
    assert wait_until(lambda: answers(head.url, 1), 60)


@pytest.mark.long("ends a node under streams and starts it again")
@pytest.mark.timeout(240)
def test_a_node_that_is_ended_is_drained_and_comes_again(pair):
    head, node = pair
    assert wait_until(lambda: answers(head.url, 1), 60)
    streams_while(head, lambda: node.process.send_signal(signal.SIGTERM))
    assert node.process.wait(60) == 0
    said = node.end()
    assert "no new requests" in said, said
    assert wait_until(lambda: "is lost: it was ended" in "".join(node.log))
    assert answers(head.url, 0)


@pytest.mark.long("starts the node twice")
@pytest.mark.timeout(120)
def test_a_node_with_other_options_is_refused(pair):
    _, node = pair
    node.end()
    node.start("--max-num-seqs", 7)
    assert node.process.wait(60) == 2
    said = node.end()
    assert (
        "options differ: the node has --max-num-seqs 7, and node 0 (the head) its default" in said
    ), said
    assert wait_until(lambda: "is refused" in "".join(node.log))
    node.start(QUIRE_CLUSTER_SECRET="another secret of other nodes")
    lines = iter(node.process.stdout.readline, "")
    assert any("waiting for the head" in line for line in lines)
    node.end()


@pytest.mark.long("starts a node and ends its head")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_ends_with_its_head(number, request):
    if number == signal.SIGKILL:
        head, node = request.getfixturevalue("pair")
        node.log.clear()
        node.start()
        assert wait_until(lambda: "has joined" in "".join(node.log), 60)
        head.process.kill()
        assert node.process.wait(12) == 1
        return
    with head_and_node() as (head, node):
        engine = node.engine()
        head.process.send_signal(number)
        assert node.process.wait(60) == 0
        assert wait_until(lambda: not engine.is_running(), 5)
