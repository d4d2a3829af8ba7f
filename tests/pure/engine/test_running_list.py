"""The running list of an engine is readable after its death."""

from quire.engine.core import running_list_shm
from quire.engine.core.running_list_shm import (
    RunningListWriter,
    create_running_list,
    read_running_list,
)


def test_the_last_list_is_read():
    with create_running_list() as made:
        assert read_running_list(made) == []
        writer = RunningListWriter(made.fileno())
        for names in (["a", "b", "a"], ["c"], ["a", "ü"]):
            writer.write(names)
            assert read_running_list(made) == list(dict.fromkeys(names))
        writer.write([])
        assert read_running_list(made) == []


def test_a_list_that_is_half_written_does_not_count():
    with create_running_list() as made:
        writer = RunningListWriter(made.fileno())
        writer.write(["a", "b"])
        writer._memory[1 : 1 + 8] = b"garbage!"  # the other half
        assert read_running_list(made) == ["a", "b"]


def test_a_list_of_too_many_ids_is_unknown():
    with create_running_list() as made:
        writer = RunningListWriter(made.fileno())
        writer.write(f"{i:0100}" for i in range(running_list_shm.HALF_BYTES // 100))
        assert read_running_list(made) is None
        writer.write(["a"])
        assert read_running_list(made) == ["a"]
