"""Loads and unloads by clients: racing ones, tenants and their bounds, unloads of what is read."""

import threading
from concurrent.futures import wait
from pathlib import Path

import pytest

from quire.engine.core.adapter_calls import AdapterCalls
from quire.engine.core.adapter_store import AdapterStore
from quire.engine.messages import AdapterLoad
from quire.errors import RequestError, WeightError
from quire.weights.adapters.adapter import Adapter

A, B = b"a" * 16, b"b" * 16


class Calls:
    """AdapterCalls over folders whose name is their content; reads wait for the gate."""

    def __init__(self):
        self.reads = []
        self.gate = threading.Event()
        self.gate.set()
        self.store = AdapterStore(self._read, 4, lambda given, **_: Path(given))
        self.calls = AdapterCalls(self.store)
        self._number = 0

    def _read(self, folder):
        self.reads.append(folder.name)
        assert self.gate.wait(30)
        if folder.name == "bad":
            raise WeightError("no such module")
        return Adapter(folder.name.encode().hex(), 1, 1, {})

    def start(self, name, given="x", **more):
        """Its call id, or the card that was there."""
        self._number += 1
        return self.calls.load(0, self._number, AdapterLoad(name, given, **more)) or self._number

    def results(self):
        """Call id -> card or error, of all loads."""
        self.gate.set()
        wait([one.future for one in self.calls._loads.values()], 30)
        found = {}
        for _, number, finish in self.calls.take_results():
            try:
                found[number] = finish()
            except RequestError as error:
                found[number] = str(error)
        assert not self.calls.has_results
        return found

    def load(self, name, given="x", **more):
        number = self.start(name, given, **more)
        return self.results()[number] if isinstance(number, int) else number


def test_racing_loads_that_may_join_read_once_and_others_are_refused():
    calls = Calls()
    calls.gate.clear()
    first = calls.start("n")
    joined = [calls.start("n", if_loaded="keep") for _ in range(3)]
    for mode in ("refuse", "replace"):
        with pytest.raises(RequestError, match="is being loaded"):
            calls.start("n", if_loaded=mode)
    found = calls.results()
    assert list(found) == [first, *joined]
    assert {one.name for one in found.values()} == {"n"}
    assert calls.reads == ["x"]
    assert calls.start("n", if_loaded="keep").name == "n"
    with pytest.raises(RequestError, match="has already been loaded"):
        calls.start("n")


def test_a_failed_load_fails_for_all_who_wait_and_leaves_no_name():
    calls = Calls()
    calls.gate.clear()
    calls.start("n", "bad")
    calls.start("n", "bad", if_loaded="keep")
    assert set(calls.results().values()) == {"no such module"}
    assert calls.reads == ["bad"]
    assert calls.calls.cards() == []
    assert calls.load("n").name == "n"


def test_a_failed_load_in_place_keeps_what_was_there():
    calls = Calls()
    before = calls.load("n")
    assert calls.load("n", "bad", if_loaded="replace") == "no such module"
    assert calls.calls.cards() == [before]


def test_unloading_what_is_being_loaded_ends_the_load():
    calls = Calls()
    calls.gate.clear()
    number = calls.start("n")
    assert calls.calls.unload("n")
    assert calls.calls.has_results
    assert "was unloaded while" in calls.results()[number]
    assert calls.calls.cards() == []
    assert not calls.calls.unload("n")
    assert calls.load("n").name == "n"


def test_names_of_tenants_are_apart_and_bounded():
    calls = Calls()
    for tenant in (A, B, b""):
        assert calls.load("n", tenant.hex() or "x", tenant=tenant).tenant == tenant
    assert len({card.digest for card in calls.calls.cards()}) == 3
    calls.load("m", tenant=A, max_names=2)
    for name in ("k", "l"):
        with pytest.raises(RequestError, match="has loaded 2 adapters, which is its limit"):
            calls.start(name, tenant=A, max_names=2)
    assert calls.load("m", "y", tenant=A, max_names=2, if_loaded="replace").digest == b"y"
    assert calls.load("k", tenant=B, max_names=2).name == "k"
    assert calls.calls.unload("n", A)
    assert not calls.calls.unload("m", B)
    assert calls.load("k", tenant=A, max_names=2).name == "k"
    assert calls.store.find("n") is not None


def test_loads_under_way_count_as_names():
    calls = Calls()
    calls.gate.clear()
    calls.start("a", tenant=A, max_names=1)
    with pytest.raises(RequestError, match="limit"):
        calls.start("b", tenant=A, max_names=1)
    calls.results()
