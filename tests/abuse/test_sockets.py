"""Sockets: checklist 5.7, 45. Who may speak to which, and what comes of those who speak nonsense."""

import os
import random
import resource
import socket
import stat
import struct
import threading
import time
from contextlib import contextmanager
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
from quire.sandbox.pipe import WorkerPipe
from quire.text.templates.render_worker import RENDER_DECODER, RenderJob, RenderResult
from tests.server import running
from tests.server.harness import Executor, Reciter, make_engine, make_tokenizer
from tests.server.test_processes import Bell

LISTENS = "00010000"  # flag of /proc/net/unix


def listening(pid):
    """(kind, where) of each socket at which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[6] in inodes and words[3] == LISTENS:
            yield "unix", words[7] if len(words) > 7 else ""
    for link in psutil.Process(pid).net_connections("inet"):
        if link.status == psutil.CONN_LISTEN:
            yield "tcp", link.laddr.ip
        elif link.type == socket.SOCK_DGRAM:
            yield "udp", link.laddr.ip


def closed(path):
    """Nobody but we may connect: it is ours alone, or gone, or in a folder that is ours alone."""
    if not path.exists():
        return True
    folder, own = path.parent.stat(), path.stat()
    return folder.st_uid == own.st_uid == os.getuid() and (
        stat.S_IMODE(folder.st_mode) == 0o700 or stat.S_IMODE(own.st_mode) == 0o600
    )


def test_a_server_listens_where_it_was_told_and_nowhere_else(tmp_path):
    flags = ("--kv-cache-memory-bytes", "64MiB", "--trust-request-chat-template")
    with running.serving("embedded", *flags, "--api-server-count", "2", folder=tmp_path) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            for more in (
                {"chat_template": "{{ 1 }}"},
                {"guided_regex": "[ab]"},
            ):  # workers of both kinds
                assert client.post("/v1/chat/completions", json=said | more).status_code == 200
        family = psutil.Process(server.process.pid).children(recursive=True)
        names = {one.name() for one in family}
        assert {"quire-templates", "quire-grammars", "quire-engine", "quire-api"} <= names
        found = [(one.name(), *where) for one in family for where in listening(one.pid)]
        found += [("first", *where) for where in listening(server.process.pid)]
        assert {where for _, kind, where in found if kind == "tcp"} == {"127.0.0.1"}
        assert {name for name, kind, _ in found if kind == "tcp"} <= {"quire-api", "first"}
        assert not [one for one in found if one[1] == "udp"]
        paths = [Path(where) for _, kind, where in found if kind == "unix"]
        assert all(path.is_absolute() for path in paths), "an abstract socket is anybody's"
        assert all(map(closed, paths)), paths
        assert all(stat.S_IMODE(one.stat().st_mode) & 0o077 == 0 for one in tmp_path.iterdir())


# -- nonsense at the engine's own socket ------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@contextmanager
def engine_server(tokenizer, folder):
    """The engine's side of the socket, in a thread; its door stays open."""
    bell = Bell()
    server = EngineCoreProcess(
        EngineRpc(make_engine(Executor(Reciter(tokenizer)), check=True)), str(folder), bell
    )
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(server.run()))
    thread.start()
    try:
        yield
    finally:
        bell.ring()
        thread.join(60)
    assert statuses == [0]


@contextmanager
def asker(folder):
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.RCVTIMEO, 10_000)
    made.setsockopt(zmq.LINGER, 0)
    made.connect(engine_address(str(folder)))
    try:
        yield made
    finally:
        made.close()
        context.term()


def works(folder):
    """Somebody who speaks sense is answered."""
    with asker(folder) as one:
        one.send(message_codec.encode(Hello(PROTOCOL_VERSION, "test")))
        assert message_codec.decode_from_engine(one.recv()).protocol == PROTOCOL_VERSION
        one.send(message_codec.encode(UtilityCall(1, "stats", [])))
        while not isinstance(said := message_codec.decode_from_engine(one.recv()), OutputBatch):
            pass
        return said.replies[0].error is None


GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 16 + b"\0" + b"\0" * 31
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
RAW = {
    "nothing": b"",
    "random": random.Random(1).randbytes(100_000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "half a greeting": GREETING[:20],
    "another version": b"\xff" + b"\0" * 8 + b"\x7f\x09",
    "another mechanism": GREETING.replace(b"NULL", b"EVIL"),
    "a frame of 4 GB": GREETING + READY + b"\x02" + struct.pack("!Q", 1 << 32) + b"a" * 1000,
    "a frame of 2**63": GREETING + READY + b"\x02" + struct.pack("!Q", 1 << 63),
    "a frame cut short": GREETING + READY + b"\x00\x50abc",
    "a command that is none": GREETING + b"\x04\x05\x09EVIL" + b"\0" * 100,
    "parts without end": GREETING + READY + b"\x01\x00" * 50_000,
}


def test_bytes_that_are_no_words_hurt_nobody(tokenizer, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with engine_server(tokenizer, tmp_path):
        for raw in RAW.values():
            with socket.socket(socket.AF_UNIX) as made:
                made.connect(engine_address(str(tmp_path)).removeprefix("ipc://"))
                made.settimeout(0.3)
                try:
                    made.sendall(raw)
                    made.shutdown(socket.SHUT_WR)
                    while made.recv(65536):
                        pass
                except OSError:
                    pass  # it hung up, or waits for more
            assert works(tmp_path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown << 10 < 1 << 28


pack = msgspec.msgpack.encode
WORDS_WRONG = {
    "nothing": b"",
    "no msgpack": b"\xc1\xc1",
    "random": random.Random(2).randbytes(10_000),
    "an unknown word": pack(["Shout", 1]),
    "a word for the other side": pack(["Ready", 1]),
    "fields of other kinds": pack(["AddRequests", 7, [{"id": 3}]]),
    "a number too large": pack(["AddRequests", 2**63, []]),
    "nothing to add": pack(["AddRequests", 7, []]),
    "an unknown method": pack(["UtilityCall", 8, "__class__", []]),
    "a private method": pack(["UtilityCall", 8, "_stats", []]),
    "arguments too many": pack(["UtilityCall", 8, "stats", [1, 2, 3]]),
    "arguments of other kinds": pack(["UtilityCall", 8, "abort_named", [{"a": [1]}]]),
    "somebody else's": pack(["Abort", ["nobody"]]),
    "a sequence of nobody's": pack(["AbortSequence", "nobody", -5]),
    "deep": b"\x91" * 100_000 + b"\x01",
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "a text of four billion": b"\xdb\xff\xff\xff\xff",
    "Hello again": pack(["Hello", PROTOCOL_VERSION, "a" * 10_000]),
    "another protocol": pack(["Hello", -1, "a"]),
}


def test_words_that_make_no_sense_hurt_nobody(tokenizer, tmp_path):
    with engine_server(tokenizer, tmp_path):
        for greets in (False, True):
            with asker(tmp_path) as one:
                if greets:
                    one.send(message_codec.encode(Hello(PROTOCOL_VERSION, "rude")))
                for data in WORDS_WRONG.values():
                    one.send(data)
                    one.send_multipart([data, b"", data])
                time.sleep(0.05)  # so that it is read before we are gone; nothing depends on it
            assert works(tmp_path)


# -- nonsense from a worker -------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"\0\0", struct.pack("!II", 5, 0) + b"ab", struct.pack("!II", (1 << 30) + 1, 0)),
        *(struct.pack("!II", 2**32 - 1, 0) + b"a" * 1000, struct.pack("!II", 2, 0) + b"\xc1\xc1"),
        struct.pack("!II", 3, 0) + pack([1, 2]),
        struct.pack("!II", 5, 0) + b"\xa4\xff\xfe\xfd\xfc",
        struct.pack("!II", len(pack({"type": "Evil"})), 0) + pack({"type": "Evil"}),
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_a_worker_that_speaks_nonsense_is_taken_for_gone(raw):
    ours, theirs = socket.socketpair()
    pipe = WorkerPipe(ours, RENDER_DECODER)
    with theirs:
        theirs.sendall(raw)
    assert pipe.receive(5) is None
    pipe.close()


def test_words_of_a_pipe_arrive_in_whatever_pieces():
    ours, theirs = socket.socketpair()
    pipe, other = WorkerPipe(ours, RENDER_DECODER), WorkerPipe(theirs, RENDER_DECODER)
    word = RenderJob("{{ 1 }}", {"a": ["b"]}, b"{}", 5, 1.0, 1 << 20)
    other.send(word)
    assert pipe.receive(5) == word
    data = msgspec.msgpack.encode(RenderResult(b'"a"'))
    theirs.sendall(struct.pack("!II", len(data), 0) + data[:3])
    with pytest.raises(TimeoutError):
        pipe.receive(0.01)
    theirs.sendall(data[3:])
    assert pipe.receive(5) == RenderResult(b'"a"')
    pipe.close()
    other.close()
