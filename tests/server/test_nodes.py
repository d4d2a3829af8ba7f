"""`quire serve` on several nodes: streams go on after a failure, and nothing outlives its head."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from quire.env import child_environment
from tests import fork_server
from tests.server import running
from tests.server.running import SMALL, serving, wait_until
from tests.server.test_rank_recovery import BODIES, ready
from tests.server.test_survive import Scene

pytestmark = [pytest.mark.slow("engines of several processes"), pytest.mark.timeout(300)]

ADDRESS = f"127.{1 + os.getpid() // 60000}.{os.getpid() // 250 % 240}.{1 + os.getpid() % 250}"
SECRET = "a secret of the tests"
TWO = ("embedded", "--device", "cpu", "-tp", "2", "--nnodes", "2", "--max-model-len", 512, *SMALL)
ENDS_S = 60.0
"""Patience of the tests; what is promised is 10 s."""


@contextmanager
def headless(*words, wrap=()):
    """Another node. wrap: a command before its command."""
    fork_server.start()
    command = [sys.executable, "-m", "quire", "serve", *map(str, (*TWO, *words))]
    command += ["--node-rank", "1", "--headless"]
    started = (subprocess.Popen if wrap else fork_server.Popen)(
        [*wrap, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(QUIRE_CLUSTER_SECRET=SECRET),
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


@contextmanager
def serving_two(*words):
    with headless(*words) as node, serving(*TWO, *words, QUIRE_CLUSTER_SECRET=SECRET) as server:
        yield server, node


def ranks_of(node):
    return [p for p in psutil.Process(node.pid).children() if p.name().startswith("quire-rank")]


@pytest.mark.long("two starts of an engine")
def test_streams_continue_on_the_next_engine_without_another_command():
    where = ("--master-addr", ADDRESS)
    with serving_two(*where) as (server, node):
        want, _ = asyncio.run(Scene(server.url).all(BODIES))
        (before,) = ranks_of(node)

        async def disturb(scene):
            while scene.chunks < 12:
                await asyncio.sleep(0.002)
            before.kill()

        found, _ = asyncio.run(Scene(server.url).all(BODIES, disturb))
        assert found == want
        assert wait_until(lambda: ready(server), 60)
        (after,) = ranks_of(node)
        assert after.pid != before.pid
        server.process.send_signal(signal.SIGTERM)
        assert node.wait(ENDS_S) == 0, "it ends with its head, in order"


@pytest.mark.long("two starts of an engine")
def test_a_node_may_be_stopped_and_another_started():
    where = ("--master-addr", ADDRESS)
    with serving_two(*where) as (server, node):
        want, _ = asyncio.run(Scene(server.url).all(BODIES[:1]))
        lines = []
        server.read_log(lines)
        node.send_signal(signal.SIGTERM)
        assert node.wait(ENDS_S) == 0
        assert wait_until(lambda: "was stopped by SIGTERM" in "".join(lines), 60), lines
        assert wait_until(lambda: not ready(server), 60)
        with headless(*where) as other:
            assert wait_until(lambda: ready(server), 60)
            found, _ = asyncio.run(Scene(server.url).all(BODIES[:1]))
            assert found == want
            assert ranks_of(other)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.long("a start of an engine")
def test_a_node_ends_with_its_head(number):
    where = ("--master-addr", ADDRESS)
    with serving_two(*where) as (server, node):
        ranks = ranks_of(node)
        server.process.send_signal(number)
        began = time.monotonic()
        status = node.wait(ENDS_S)
        print(f"{number.name}: the node ended after {time.monotonic() - began:.1f} s")
        assert status == (1 if number == signal.SIGKILL else 0)
        assert not psutil.wait_procs(ranks, ENDS_S)[1]
        assert server.gone(ENDS_S)


def can_make_networks():
    if shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "quire-try"], capture_output=True)
    subprocess.run(["ip", "netns", "del", "quire-try"], capture_output=True)
    return made.returncode == 0


@pytest.fixture
def network():
    """Another network on this machine: the words that run a command in it, and what cuts it off."""
    if not can_make_networks():
        pytest.skip("no permission for network namespaces")
    name, third = f"quire-{os.getpid()}", os.getpid() % 250
    here, there = f"q{os.getpid()}a", f"q{os.getpid()}b"

    def ip(*words):
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there)
        ip("link", "set", there, "netns", name)
        ip("addr", "add", f"10.213.{third}.1/24", "dev", here)
        ip("link", "set", here, "up")
        inside = ("netns", "exec", name, "ip")
        ip(*inside, "addr", "add", f"10.213.{third}.2/24", "dev", there)
        ip(*inside, "link", "set", there, "up")
        ip(*inside, "link", "set", "lo", "up")
        yield (
            f"10.213.{third}.1",
            ("ip", "netns", "exec", name),
            lambda: ip("link", "set", here, "down"),
        )
    finally:  # a process that is still in the network keeps it, and with it both ends of the pair
        subprocess.run(["ip", "link", "del", here], check=False)
        subprocess.run(["ip", "netns", "del", name], check=True)
        assert here not in os.listdir("/sys/class/net")


@pytest.mark.long("a start of an engine")
def test_a_network_that_is_cut_ends_both_sides(network):
    """The head names the node; the node ends its ranks and itself."""
    address, wrap, cut = network
    where = ("--master-addr", address, "--max-engine-restarts", 0)
    with headless(*where, wrap=wrap) as node:
        lines = []
        with serving(*TWO, *where, QUIRE_CLUSTER_SECRET=SECRET) as server:
            server.read_log(lines)
            want, _ = asyncio.run(Scene(server.url).all(BODIES[:1]))
            assert want[0][-1] is None, want
            ranks = ranks_of(node)
            assert ranks
            cut()
            began = time.monotonic()
            assert server.process.wait(ENDS_S) == 1
            print(f"the head found out after {time.monotonic() - began:.1f} s")
            status = node.wait(ENDS_S)
            print(f"the node ended after {time.monotonic() - began:.1f} s")
            assert status == 1
            assert not psutil.wait_procs(ranks, ENDS_S)[1]
            assert server.gone(ENDS_S)
    assert "node 1 (10.213." in "".join(lines)


def test_a_node_without_a_head_or_a_number_is_refused():
    for words, message in (
        (("--node-rank", "1"), "--headless needs a secret that all machines share"),
        (("--headless",), "is one of --nnodes N, and its --node-rank is from 1 to N - 1"),
    ):
        process = running.start(*TWO, *words, QUIRE_CLUSTER_SECRET="")
        said, _ = process.communicate(timeout=60)
        assert process.returncode
        assert message in said
