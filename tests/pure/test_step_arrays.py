"""Memory of arrays that an engine shares with the ranks of its host."""

import errno
import os
import random
from types import SimpleNamespace

import pytest

from quire.executors import step_arrays
from quire.executors.rank_group import RankGroup
from quire.executors.step_arrays import StepArrayReader, StepArrayWriter, create_area

MIB = 1 << 20


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr(step_arrays, "AREA_BYTES", 4 * MIB)
    fd = create_area()
    writer = StepArrayWriter(fd)
    yield writer, StepArrayReader(fd), fd
    writer.close()
    os.close(fd)


def test_arrays_are_read_where_they_were_written(ends):
    writer, reader, fd = ends
    places = writer.place(1, [b"abc", b"", memoryview(b"x" * 100_000)])
    views = reader.views(places)
    assert views == [b"abc", b"", b"x" * 100_000]
    assert all(one.readonly for one in views)
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"), "no file can be left"


def test_memory_is_used_again_from_the_beginning(ends):
    writer, _, _ = ends
    for number in range(50):
        assert writer.place(number, [bytes(300_000)])[0].start == 0
        writer.release(number)
    assert writer.taken_bytes == MIB
    assert writer.held_messages == 0


def test_what_is_in_flight_is_never_overwritten(ends):
    writer, reader, _ = ends
    chance, flight, refused = random.Random(5), [], 0
    for number in range(400):
        arrays = [bytes([chance.randrange(256)]) * chance.randrange(600_000) for _ in range(3)]
        places = writer.place(number, arrays)
        if places is None:
            refused += 1
        else:
            flight.append((number, arrays, places))
        while flight and (places is None or chance.random() < 0.4):
            done, before, at = flight.pop(0)
            assert reader.views(at) == before
            writer.release(done)
            places = ()
        for _, before, at in flight:
            assert reader.views(at) == before
    assert refused > 10
    assert writer.taken_bytes <= 4 * MIB


def test_steps_are_whole_where_other_nodes_have_ranks(ends):
    """place_arrays() divides the places among data-parallel ranks."""
    writer, reader, _ = ends
    group = RankGroup.__new__(RankGroup)
    group._nodes, group._number, group._local = None, 6, SimpleNamespace(arrays=writer)
    places = group.place_arrays([[b"a", b"bc"], [], [b"d"]])
    assert [reader.views(some) for some in places] == [[b"a", b"bc"], [], [b"d"]]
    writer.release(6)
    assert writer.held_messages == 1
    writer.release(7)
    assert writer.held_messages == 0
    group._nodes = object()
    assert group.place_arrays([[b"a"]]) is None


def test_a_step_without_space_is_told_so(ends):
    writer, _, _ = ends
    assert writer.place(1, [bytes(5 * MIB)]) is None
    assert writer.place(2, [bytes(3 * MIB)]) is not None
    assert writer.place(3, [bytes(2 * MIB)]) is None
    writer.release(2)
    assert writer.place(4, [bytes(2 * MIB)]) is not None


def test_a_host_without_memory_is_told_once_and_what_it_gave_is_used(ends, monkeypatch, caplog):
    writer, _, _ = ends
    assert writer.place(1, [bytes(MIB)]) is not None

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert [writer.place(2 + i, [bytes(MIB)]) for i in range(3)] == [None] * 3
    (line,) = caplog.messages
    assert "raise the memory limit of the container" in line
    writer.release(1)
    assert writer.place(9, [bytes(MIB)]) is not None
