"""Adapter store: names and generations, copies in host memory, and reading in a thread."""

import threading
from pathlib import Path

import pytest

from quire.core.types import AdapterRef
from quire.engine.core.adapter_store import AdapterStore
from quire.errors import EngineError, RequestError, WeightError
from quire.weights.adapters.adapter import Adapter


class Files:
    """Folders and their content; reads can be held up, and are recorded."""

    def __init__(self, **content):
        self.content = content
        self.reads = []
        self.gate = threading.Event()
        self.gate.set()

    def read(self, folder):
        self.reads.append(folder.name)
        self.gate.wait(30)
        value = self.content[folder.name]
        if isinstance(value, Exception):
            raise value
        return Adapter(f"{value:02x}", 1, 1, {})


def new_store(files, capacity):
    return AdapterStore(files.read, capacity, lambda given, **_: Path(given))


def wait_for(store):
    """Outcomes, once there are some."""
    event = threading.Event()
    store.set_outcome_callback(event.set)
    if not store.has_outcomes:
        assert event.wait(30)
    return dict(store.outcomes())


def test_a_name_means_what_was_read_when_it_was_registered():
    files = Files(a=1, b=2)
    store = new_store(files, 2)
    first = store.register("x", "a")
    assert first == AdapterRef("x", b"\1", "a") == store.find("x")
    files.content["a"] = 3
    assert store.find("x") == first
    second = store.register("x", "a")
    assert second.digest == b"\3"
    assert [one.ref for one in store.cards()] == [second]
    assert not store.acquire(first), "nobody held the older copy"
    store.release(first)
    assert store.remove("x")
    assert not store.remove("x")
    assert store.find("x") is None
    store.check()


def test_held_generations_survive_their_names():
    files = Files(a=1, b=2)
    store = new_store(files, 2)
    old = store.register("x", "a")
    assert store.acquire(old)
    new = store.register("x", "b")
    assert store.weights(old).digest == "01"
    assert store.acquire(new)
    store.remove("x")
    assert store.weights(new).digest == "02"
    store.release(old)
    store.release(new)
    assert not store._copies
    store.check()


def test_dropped_copies_are_read_again_by_a_thread():
    files = Files(a=1, b=2, c=3)
    store = new_store(files, 2)
    refs = [store.register(name, name) for name in "abc"]
    assert len(store._copies) == 2
    assert not store.acquire(refs[0])
    assert wait_for(store) == {b"\1": None}
    assert store.weights(refs[0]).digest == "01"
    assert files.reads == ["a", "b", "c", "a"]
    store.check()
    files.content["b"] = 9
    assert not store.acquire(refs[1])
    (error,) = wait_for(store).values()
    assert isinstance(error, RequestError)
    assert "changed" in str(error)
    store.close()


def test_copies_beyond_the_capacity_wait_for_those_that_are_held():
    files = Files(a=1, b=2)
    store = new_store(files, 1)
    a, b = (store.register(name, name) for name in "ab")
    assert store.acquire(b)
    assert not store.acquire(a)
    assert not store.acquire(a)
    assert files.reads == ["a", "b"]
    store.check()
    store.release(b)
    assert wait_for(store) == {b"\1": None}
    assert list(store._copies) == [b"\1"]
    assert files.reads == ["a", "b", "a"]
    store.check()
    store.close()


def test_what_is_wanted_no_longer_is_not_read():
    files = Files(a=1, b=2)
    store = new_store(files, 1)
    a, b = (store.register(name, name) for name in "ab")
    store.acquire(b)
    store.acquire(a)
    store.release(a)
    store.release(b)
    assert files.reads == ["a", "b"]
    assert not store._wanted
    store.check()


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(WeightError("no such module"), RequestError), (OSError("disk"), EngineError)],
)
def test_errors_of_reading_end_the_wait(raised, kind):
    files = Files(a=1, b=2)
    store = new_store(files, 1)
    a, _ = (store.register(name, name) for name in "ab")
    files.content["a"] = raised
    store.acquire(a)
    (error,) = wait_for(store).values()
    assert isinstance(error, kind)
    assert str(raised) in str(error)
    store.release(a)
    files.content["a"] = 1
    assert not store.acquire(a)
    assert wait_for(store) == {b"\1": None}
    store.close()


def test_an_unheld_copy_of_a_finished_read_takes_no_more_room_than_there_is():
    files = Files(a=1, b=2)
    store = new_store(files, 1)
    a, b = (store.register(name, name) for name in "ab")
    files.gate.clear()
    store.acquire(a)
    store.release(a)
    assert not store.acquire(b) or list(store._copies) == [b"\2"]
    files.gate.set()
    for _ in range(2):
        if store._reading:
            wait_for(store)
    assert store.weights(b).digest == "02"
    store.check()
    store.close()


@pytest.mark.parametrize("freed", [False, True])
def test_registering_what_requests_wait_for_ends_their_wait_or_leaves_it(freed):
    files = Files(a=1, b=2)
    store = new_store(files, 1)
    a, b = (store.register(name, name) for name in "ab")
    store.acquire(b)
    store.acquire(a)  # waits: b has the only place
    if freed:
        store._holds.clear()  # as if b could be dropped now
        store._holds[a.digest] = 1
    assert store.register("again", "a").digest == a.digest
    store.check()
    if freed:
        assert wait_for(store) == {b"\1": None}
        assert store.weights(a).digest == "01"
    else:
        store.release(b)
        assert wait_for(store) == {b"\1": None}
        assert store.weights(a).digest == "01"
    store.close()


def test_a_copy_is_dropped_of_the_tenant_that_has_most():
    files = Files(a1=1, a2=2, a3=3, b1=11, b2=12)
    store = new_store(files, 3)
    refs = {}

    def use(name, tenant):
        if name not in refs:
            refs[name] = store.register(name, name, tenant=tenant)
        if not store.acquire(refs[name], tenant):
            wait_for(store)
        store.release(refs[name])
        store.check()
        return sorted(one.digest for one in store._copies.values())

    for name, tenant in [("b1", b"b"), ("a1", b"a"), ("a2", b"a"), ("a3", b"a")]:
        found = use(name, tenant)
    assert found == ["02", "03", "0b"], "b's copy, the oldest, is there"
    assert use("a1", b"a") == ["01", "03", "0b"]
    assert use("b2", b"b") == ["01", "0b", "0c"]
    assert use("a2", b"a") == ["01", "02", "0c"], "now b has most"
    assert store.stats().evictions == 4
    assert len(store._users) == 3
    store.close()


def test_who_holds_fewest_copies_is_served_first():
    files = Files(a1=1, a2=2, a3=3, b1=11)
    store = new_store(files, 2)
    refs = {name: store.register(name, name) for name in files.content}
    for name in ("a1", "a2", "a3"):
        store.acquire(refs[name], b"a")
    while store._reading:
        wait_for(store)
    store.acquire(refs["b1"], b"b")  # after a's third, which waits
    assert list(store._wanted) == [b"\3", b"\x0b"]
    store.release(refs["a1"])
    assert wait_for(store) == {b"\x0b": None}
    assert list(store._wanted) == [b"\3"]
    store.release(refs["b1"])
    assert wait_for(store) == {b"\3": None}
    for name in ("a2", "a3"):
        store.release(refs[name])
    assert len(store._users) == len(store._copies) == 2
    store.check()
    store.close()


def test_a_pinned_name_keeps_its_copy_through_reloads_until_it_is_removed():
    files = Files(a=1, b=2, c=3, d=4)
    store = new_store(files, 2)
    for name in "abc":
        store.register(name, name)
    assert b"\1" not in store._copies
    store.pin("a")  # it is read again
    assert wait_for(store) == {b"\1": None}
    with pytest.raises(RequestError, match="2 adapters cannot be pinned: host memory holds 2"):
        store.pin("b")
    store.pin("a")
    store.check()
    files.content["a"] = 9
    store.register("a", "a")
    for name in "bcd":
        ref = store.register(name, name)
        if not store.acquire(ref):
            wait_for(store)
        store.release(ref)
        store.check()
        assert b"\x09" in store._copies
    assert store.remove("a")
    assert b"\x09" not in store._copies
    assert not store.pinned_digests()
    with pytest.raises(RequestError, match="'a' is not loaded"):
        store.pin("a")
    store.close()


def test_counts_of_reads():
    files = Files(a=1, bad=WeightError("no such module"))
    store = new_store(files, 1)
    store.register("a", "a")
    with pytest.raises(RequestError):
        store.register("bad", "bad")
    found = store.stats()
    assert (found.names, found.host_copies, found.loads, found.load_failures) == (1, 1, 1, 1)
    assert found.load_seconds > 0
