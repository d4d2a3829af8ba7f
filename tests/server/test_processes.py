"""The processes of `quire serve`: all end together, however one of them ends, and leave nothing."""

import collections
import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
import zmq

from quire.engine import message_codec
from quire.engine.client.zmq_transport import engine_address
from quire.engine.core.engine_rpc import EngineRpc
from quire.engine.core.process import EngineCoreProcess
from quire.engine.messages import PROTOCOL_VERSION, Hello, OutputBatch, UtilityCall
from quire.errors import ConfigError
from quire.server.options import ServerOptions
from quire.server.process import listen_sockets
from tests import tiers
from tests.faults import serve as faulty
from tests.faults.arming import Fault
from tests.server.harness import Executor, Reciter, make_engine
from tests.server.running import SMALL, serving, start, wait_until

LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture
def folder():
    """For the temporary files of a server; in the end it must be empty."""
    made = Path(tempfile.mkdtemp(prefix="q"))  # short: the path of a socket has 107 bytes at most
    yield made
    assert wait_until(lambda: not list(made.iterdir())), list(made.iterdir())
    made.rmdir()


def last_words(lines):
    """The events of a stream to its end, as far as it comes."""
    said = []
    try:
        for line in lines:
            said += [line] if line else []
    except httpx.HTTPError:
        said.append("broken off")
    return said


def connections(process):
    return sum(c.status == "ESTABLISHED" for c in process.net_connections("tcp"))


def test_processes_share_the_port_and_the_death_of_the_engine_ends_them_all(folder):
    words = ("--api-server-count", 2, "--max-engine-restarts", 0)
    with serving("embedded", *SMALL, *words, folder=folder) as server:
        clients = [httpx.Client(base_url=server.url, timeout=60) for _ in range(24)]
        ids = {c.get("/v1/models").json()["data"][0]["id"] for c in clients}
        assert ids == {"embedded"}
        shares = [connections(process) for process in server.api]
        assert sum(shares) == 24
        assert min(shares) > 0  # one of them having none: 1 in 8 million
        with clients[0].stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            server.engine.kill()
            said = last_words(lines)
        assert said[-1] == "data: [DONE]"
        assert json.loads(said[-2].removeprefix("data: "))["error"]["code"] == 500
        assert server.process.wait(60) == 1
        assert server.gone()
    for client in clients:
        client.close()


def test_nothing_outlives_the_first_process_even_if_it_is_killed(folder):
    with serving("embedded", *SMALL, folder=folder) as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=LONG, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.kill()
            last_words(lines)
        assert server.gone()


@pytest.mark.timeout(120)
def test_an_api_process_that_hangs_is_replaced_and_one_too_many_ends_the_server(folder):
    words = ("--api-watchdog-seconds", 3, "--max-engine-restarts", 1)
    body = {"prompt": "a", "max_tokens": 2}
    with faulty.serving("embedded", *SMALL, *words, folder=folder) as (server, faults):
        faults.arm(Fault("generate", "hang"))  # its event loop does
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        ask = partial(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)

        def answers():
            """503 while it starts; connections that the old one had accepted end with it."""
            with contextlib.suppress(httpx.TransportError):
                return ask().status_code == 200

        assert wait_until(answers, 60)
        children = psutil.Process(server.process.pid).children()
        assert server.engine.pid in {one.pid for one in children}, "the engine stays"
        (successor,) = [one for one in children if one.name() == "quire-api"]
        successor.kill()
        assert server.process.wait(60) == 1
        assert server.gone()
        said = server.process.stdout.read()
        assert "an API process makes no progress: no heartbeat" in said
        assert 'File "arming.py"' in said
        assert 'File "quire/server/generation/generation_stream.py"' in said
        assert "an API process ended: killed by signal 9" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, *tiers.long(signal.SIGINT)])
def test_a_start_can_be_given_up(number, folder):
    process = start("embedded", *SMALL, folder=folder)
    assert wait_until(lambda: list(folder.iterdir()), 60)  # the engine's process is being started
    process.send_signal(number)
    process.communicate(timeout=25)  # requests would have 30 s
    assert process.returncode == 0


def test_what_is_wrong_with_the_options_is_said_in_one_line(folder):
    process = start("embedded", "--max-model-len", 1000000, folder=folder)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "quire serve: error: --max-model-len 1000000 exceeds" in said
    assert "Traceback" not in said


def test_a_port_shared_by_our_processes_is_shared_with_nobody_else():
    ours = listen_sockets.bind_sockets(ServerOptions(port=0, api_server_count=3))
    ports = {one.getsockname()[1] for one in ours}
    assert len(ports) == 1
    for one in ours:
        one.listen()
    with pytest.raises(ConfigError, match="cannot listen"):
        listen_sockets.bind_sockets(ServerOptions(port=ports.pop(), api_server_count=3))
    for one in ours:
        one.close()


def test_processes_at_a_unix_socket_wait_at_one(tmp_path):
    ours = listen_sockets.bind_sockets(ServerOptions(uds=str(tmp_path / "s"), api_server_count=2))
    assert {one.getsockname() for one in ours} == {str(tmp_path / "s")}
    ours[0].listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "s"))
        accepted, _ = ours[1].accept()
        accepted.close()
    for one in ours:
        one.close()


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("quire.cli.serve", {"torch", "fastapi", "uvicorn", "zmq"}),
        ("quire.server.process.api_process", {"torch", "transformers"}),
        ("quire.engine.core.process_main", {"torch", "numpy", "quire.engine.build"}),
    ],
)
def test_processes_import_only_what_they_need(module, heavy):
    code = f"import sys, {module}; sys.exit(str({heavy!r} & sys.modules.keys() or ''))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stderr.strip() == ""


class Bell:
    """In place of the process that started an engine's."""

    def __init__(self):
        self.wakeup_socket, self._other = socket.socketpair()
        self.wakeup_socket.setblocking(False)
        self.stop_requested = False
        self.gone_clients = collections.deque()

    def clear(self):
        with contextlib.suppress(BlockingIOError):
            self.wakeup_socket.recv(64)

    def ring(self):
        self.stop_requested = True
        self._other.send(b"!")


@contextlib.contextmanager
def engine_server(tokenizer, folder):
    """The engine's side of the socket, in a thread; and a socket to speak to it."""
    bell = Bell()
    engine = make_engine(Executor(Reciter(tokenizer)), check=True)
    server = EngineCoreProcess(EngineRpc(engine), str(folder), bell, clients=1)
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(server.run()))
    thread.start()
    context = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.RCVTIMEO, 10_000)
    asker.setsockopt(zmq.LINGER, 0)
    asker.connect(engine_address(folder))
    try:
        yield asker
    finally:
        bell.ring()
        thread.join(60)
        asker.close()
        context.term()
    assert statuses == [0]


def answer(asker):
    """The first answer, past signs of life."""
    while True:
        message = message_codec.decode_from_engine(asker.recv())
        if isinstance(message, OutputBatch):
            return message.replies[0]


def test_words_that_cannot_be_read_hurt_only_who_said_them(tokenizer, folder):
    with engine_server(tokenizer, folder) as asker:
        asker.send(message_codec.encode(Hello(PROTOCOL_VERSION, "test")))
        assert message_codec.decode_from_engine(asker.recv()).protocol == PROTOCOL_VERSION
        assert wait_until(lambda: not folder.exists())  # all are connected: the door is closed
        folder.mkdir()
        for data in (b"", b"\xc1\xc1", msgspec.msgpack.encode(["Shout", 1])):
            asker.send(data)
        asker.send(msgspec.msgpack.encode(["AddRequests", 7, [{"id": 3}]]))
        assert answer(asker).error.error_type == "RequestError"
        asker.send(message_codec.encode(UtilityCall(8, "stats", [])))
        assert answer(asker).call_id == 8
