"""Messages between a process and its worker, with arrays behind them."""

import socket
import struct
import threading

import msgspec
import pytest

from quire.core.types import MediaTensor
from quire.media.media_worker import MEDIA_DECODER, MediaResult, MediaWorkerReady
from quire.sandbox.pipe import WorkerPipe

LARGE = bytes(range(256)) * 1000
RESULT = MediaResult(
    (
        MediaTensor("pixels", "uint8", (len(LARGE),), LARGE),
        MediaTensor("factors", "float32", (1,), bytes(4)),
        MediaTensor("more", "uint8", (2, len(LARGE)), LARGE * 2),
    ),
    b"{}",
)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield WorkerPipe(ours, MEDIA_DECODER), theirs


def sent_in_pieces(theirs, message, size):
    """Send a message through another socket pair, `size` bytes at a time."""
    source, sink = socket.socketpair()

    def write():
        with source:
            WorkerPipe(source, MEDIA_DECODER).send(message)

    def carry():
        with sink:
            while piece := sink.recv(size):
                theirs.sendall(piece)

    for work in (write, carry):
        threading.Thread(target=work, daemon=True).start()


@pytest.mark.parametrize("timeout", [None, 0.0001])
def test_arrays_arrive_behind_their_message(ends, timeout):
    """A receiver whose time is over, again and again, keeps what it has."""
    pipe, theirs = ends
    for _ in range(2):
        sent_in_pieces(theirs, RESULT, 50_000)
        found = None
        while found is None:
            try:
                found = pipe.receive(timeout)
                assert found is not None
            except TimeoutError:
                pass
        assert found == RESULT
        kept = found
        sent_in_pieces(theirs, MediaWorkerReady(), 50_000)
        assert pipe.receive(10) == MediaWorkerReady()
        assert kept == RESULT, "a later message has changed it"


def test_arrays_are_sent_from_their_own_memory():
    arrays = RESULT.detached()[1]
    assert [one is tensor.data for one, tensor in zip(arrays, RESULT.tensors[::2])] == [True] * 2
    assert len(msgspec.msgpack.encode(RESULT.detached()[0])) < 1000


@pytest.mark.parametrize(
    "lie",
    [
        struct.pack("!II", 1 << 31, 0),
        struct.pack("!II", 10, 1 << 30),
        struct.pack("!IIQ", 1, 1, 1 << 40) + b"x",
        struct.pack("!IIQ", 1, 1, 3) + b"\xc1abc",
    ],
)
def test_lies_of_a_worker_end_the_connection_without_their_memory(ends, lie):
    pipe, theirs = ends
    theirs.sendall(lie)
    assert pipe.receive(5) is None


def test_a_worker_that_is_killed_within_an_array_has_ended(ends):
    pipe, theirs = ends
    message = msgspec.msgpack.encode(RESULT.detached()[0])
    prefix = struct.pack("!IIQQ", len(message), 2, len(LARGE), 2 * len(LARGE))
    sender = threading.Thread(target=theirs.sendall, args=(prefix + message + LARGE[:-1],))
    sender.start()  # a socket may hold less than the array
    with pytest.raises(TimeoutError):
        pipe.receive(0.5)
    sender.join(10)
    assert not sender.is_alive()
    theirs.close()
    assert pipe.receive(5) is None


def test_a_message_without_an_array_that_it_names_is_invalid(ends):
    pipe, theirs = ends
    message = msgspec.msgpack.encode(RESULT.detached()[0])
    theirs.sendall(struct.pack("!II", len(message), 0) + message)
    assert pipe.receive(5) is None
