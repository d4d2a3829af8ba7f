"""Messages through shared memory: all arrive, in order, whole, whoever sleeps."""

import os
import random
import subprocess
import sys
import threading
import time

import pytest

from quire.errors import ConfigError, EngineError
from quire.executors import shm_broadcast
from quire.executors.shm_broadcast import BLOCK_BYTES, RingReader, RingWriter, create_ring
from tests import tiers


@pytest.fixture
def ring():
    made = []

    def make(readers=1, blocks=4):
        made.append(create_ring(readers, blocks))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_messages_of_all_lengths_arrive_in_order_at_every_reader(ring):
    """Also those that are longer than the ring. Readers sleep at moments of their own."""
    handle, rng = ring(readers=2), random.Random(1)
    lengths = [0, 1, BLOCK_BYTES - 32, BLOCK_BYTES - 31, BLOCK_BYTES, 9 * BLOCK_BYTES]
    lengths += [rng.randrange(0, 3 * BLOCK_BYTES) for _ in range(tiers.amount(60, 3000))]
    sent = [(i, rng.randbytes(length)) for i, length in enumerate(lengths)]
    received = [[], []]

    def read(index):
        reader, naps = RingReader(handle, index, spin_s=0.001 * index), random.Random(index)
        for _ in sent:
            received[index].append(reader.receive())
            time.sleep(naps.choice((0, 0, 0.001)))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    writer = RingWriter(handle)
    for number, data in sent:
        writer.send(number, data)
    for thread in threads:
        thread.join()
    assert received == [sent, sent]


class SlowPoll:
    """A poll object: between the comparison and the sleep, `meanwhile` runs."""

    def __init__(self, poll, meanwhile):
        self.poll_now, self.meanwhile = poll, meanwhile

    def poll(self, *timeout):
        if not timeout:
            self.meanwhile()
        return self.poll_now.poll(*(timeout or (60_000,)))


def test_a_message_between_the_look_and_the_sleep_ends_the_sleep(ring):
    handle = ring()
    writer, reader = RingWriter(handle), RingReader(handle, 0)
    reader._poll = SlowPoll(reader._poll, lambda: writer.send(1, b"a"))
    began = time.monotonic()
    assert reader.receive() == (1, b"a")
    assert time.monotonic() - began < 30, "it slept until the poll's own limit"


def test_a_reader_that_was_woken_before_sleeps_again(ring):
    """The wake-up of a message that it found without sleeping is no message."""
    handle = ring()
    writer, reader = RingWriter(handle), RingReader(handle, 0)
    writer.send(1, b"a")
    assert reader.receive() == (1, b"a")
    sleeps = []
    reader._poll = SlowPoll(
        reader._poll, lambda: sleeps.append(1) if len(sleeps) < 1 else writer.send(2, b"b")
    )
    threading.Timer(0.05, lambda: reader.wake()).start()
    assert reader.receive() == (2, b"b")
    assert len(sleeps) == 1


def test_a_wait_ends_with_what_its_check_raises(ring):
    handle = ring(blocks=1)
    writer, reader = RingWriter(handle), RingReader(handle, 0)
    gone = []

    def check():
        if gone:
            raise KeyError("gone")

    def end():
        gone.append(1)
        reader.wake()

    threading.Timer(0.05, end).start()
    with pytest.raises(KeyError):
        reader.receive(check)
    writer.send(1, b"")
    with pytest.raises(KeyError):  # full: no reader will read
        writer.send(2, b"", check)


def test_a_long_message_whose_wait_was_interrupted_is_whole(ring):
    handle = ring()
    writer, reader = RingWriter(handle), RingReader(handle, 0)
    data, piece = os.urandom(3 * BLOCK_BYTES), shm_broadcast._PIECE_BYTES

    def write(at):
        place = shm_broadcast._PLACE.pack(len(data), 5, at)
        writer._write_block(place, memoryview(data)[at : at + piece], None)

    def interrupt():
        raise KeyboardInterrupt

    write(0)
    with pytest.raises(KeyboardInterrupt):
        reader.receive(interrupt)
    for at in range(piece, len(data), piece):
        write(at)
    assert reader.receive() == (5, data)


def test_overwritten_memory_is_found(ring, monkeypatch):
    monkeypatch.setattr(shm_broadcast, "CHECKSUM_ATTEMPTS", 2)
    handle = ring()
    writer, reader = RingWriter(handle), RingReader(handle, 0)
    writer.send(1, b"abcdef")
    writer._blocks[0][shm_broadcast._HEADER_BYTES + 2] ^= 1
    with pytest.raises(EngineError, match="checksum"):
        reader.receive()


def test_too_little_memory_is_an_error_with_its_numbers(monkeypatch):
    def full(fd, at, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"\d{6} bytes .* 3 ranks .*tensor_parallel_size"):
        create_ring(3, 8)
    assert len(os.listdir("/proc/self/fd")) == before


READER = """
import resource, sys
from quire.executors.shm_broadcast import RingHandle, RingReader
fds = list(map(int, sys.argv[1:]))
reader = RingReader(RingHandle(fds[0], tuple(fds[1:]), 4), 0, spin_s=0.002)
reader.receive()
began = resource.getrusage(resource.RUSAGE_SELF)
reader.receive()
now = resource.getrusage(resource.RUSAGE_SELF)
print(now.ru_utime - began.ru_utime + now.ru_stime - began.ru_stime)
"""


def test_a_reader_that_waits_uses_no_processor_and_leaves_nothing(ring):
    handle = ring()
    before = set(os.listdir("/dev/shm"))
    child = subprocess.Popen(
        [sys.executable, "-c", READER, *map(str, handle.fds)],
        pass_fds=handle.fds,
        stdout=subprocess.PIPE,
        text=True,
    )
    writer = RingWriter(handle)
    writer.send(1, b"")
    time.sleep(1.0)
    writer.send(2, b"")
    out, _ = child.communicate()
    assert float(out) < 0.1, "seconds of the processor in a second of waiting"
    assert set(os.listdir("/dev/shm")) <= before


def test_a_reader_that_spins_leaves_the_interpreter_to_other_threads(ring):
    """A thread that has waited for a GPU runs at once, and not after the 5 ms of a forced switch."""
    handle = ring()
    writer, reader, turns = RingWriter(handle), RingReader(handle, 0, spin_s=5.0), 60

    def wait_often(number):
        for _ in range(turns):
            time.sleep(1e-4)
        writer.send(number, b"")

    taken = []
    for number in range(3):  # other processes may have the cores for a while
        thread = threading.Thread(target=wait_often, args=(number,))
        began = time.perf_counter()
        thread.start()
        assert reader.receive() == (number, b"")
        taken.append(time.perf_counter() - began)
        thread.join()
    assert min(taken) < turns * 0.004, taken
