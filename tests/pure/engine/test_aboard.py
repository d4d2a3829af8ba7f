"""Whom an engine runs is known when it is gone."""

from quire.engine import aboard
from quire.engine.aboard import Writer, page, read


def test_the_last_list_is_read():
    with page() as made:
        assert read(made) == []
        writer = Writer(made.fileno())
        for names in (["a", "b", "a"], ["c"], ["a", "ü"]):
            writer.write(names)
            assert read(made) == list(dict.fromkeys(names))
        writer.write([])
        assert read(made) == []


def test_a_list_that_is_half_written_does_not_count():
    with page() as made:
        writer = Writer(made.fileno())
        writer.write(["a", "b"])
        writer._memory[1 : 1 + 8] = b"garbage!"  # the other half
        assert read(made) == ["a", "b"]


def test_of_too_many_nobody_is_known():
    with page() as made:
        writer = Writer(made.fileno())
        writer.write(f"{i:0100}" for i in range(aboard.HALF // 100))
        assert read(made) is None
        writer.write(["a"])
        assert read(made) == ["a"]
