"""Grammars come from processes that may be killed, hang or eat memory; the engine never notices."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass

import psutil
import pytest

from quire.core.constraint import Constraint
from quire.engine.startup.grammar_setup import build_compile_service
from quire.engine.supervise.process_pipe import spawn_process
from quire.errors import EngineError, Overloaded, RequestError
from quire.grammar.compilation.compile_threads import CompilePool
from quire.grammar.compilation.grammar_cache import CacheBounds, GrammarCache
from tests.cpu.grammar_worker import VOCABULARY, Panic

PATIENCE_S = 60.0


def hire(what=""):
    ours, theirs = socket.socketpair()
    with theirs:
        return spawn_process("tests.cpu.grammar_worker", theirs, [what]), ours


@dataclass
class Built:
    min_tokens: int
    size: int
    pid: int

    def guide(self):
        return self


class Load:
    def __init__(self):
        self.prepared = threading.Event()

    def prepare(self, vocabulary):
        assert vocabulary == VOCABULARY
        self.prepared.set()

    def __call__(self, done):
        if done.grammar_data == b"ok not":
            raise ValueError("cannot be built")
        if done.grammar_data == b"ok oh":
            raise Panic("cannot be built")
        return Built(done.min_completion["least"], 1000, done.min_completion["pid"])


class Pool:
    """Grammars, and their published outcomes."""

    def __init__(self, what="", *, seconds=20.0, memory=1 << 28, **bounds):
        self.rung, self.load = threading.Event(), Load()
        self.compile_pool = CompilePool(
            functools.partial(hire, what), self.load, seconds=seconds, memory=memory
        )
        self.grammars = GrammarCache(self.compile_pool, CacheBounds(**bounds))
        self.grammars.set_outcome_callback(self.rung.set)
        self.told = {}

    def ask(self, *forms):
        for form in forms:
            self.grammars.acquire(Constraint(form))

    def wait(self, *forms):
        """The outcomes of these, when all of them are published."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(form in self.told for form in forms):
            assert time.monotonic() < deadline, self.told
            self.rung.wait(0.5)
            self.rung.clear()
            self.told |= {c.form: outcome for c, outcome in self.grammars.outcomes()}
        return [self.told.pop(form) for form in forms]

    def wait_any(self):
        """Grammars whose outcomes were published now."""
        assert self.rung.wait(PATIENCE_S)
        self.rung.clear()
        return [c.form for c, _ in self.grammars.outcomes()]

    def get(self, form):
        self.ask(form)
        [outcome] = self.wait(form)
        return outcome

    def release(self, *forms):
        for form in forms:
            self.grammars.release(Constraint(form))

    @property
    def stats(self):
        return self.grammars.stats()


@pytest.fixture
def pool():
    made, before = [], set(threading.enumerate())

    def make(*given, **named):
        made.append(Pool(*given, **named))
        return made[-1]

    yield make
    for one in made:
        pids = one.compile_pool.workers
        one.grammars.close()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
    started = set(threading.enumerate()) - before
    assert not [t for t in started if t.name == "quire-grammars"]


def test_vocabulary_tables_are_built_before_the_first_grammar(pool):
    one = pool()
    one.grammars.prepare()
    assert one.load.prepared.wait(PATIENCE_S)
    workers = one.compile_pool.workers
    one.grammars.prepare()
    assert one.get("ok") >= 0
    assert one.compile_pool.workers == workers
    assert one.stats.compiled == 1


def test_a_worker_has_the_tables_of_its_vocabulary_before_its_first_grammar():
    """They take most of a second with 128,000 tokens, which the first request would wait for."""
    service = build_compile_service(VOCABULARY)
    assert {"token_classes"} <= set(vars(service))
    assert list(service._compilers) == ["llguidance"]


def test_a_worker_that_cannot_start_early_is_reported_when_it_is_needed(pool):
    one = pool("broken")
    one.grammars.prepare()
    assert isinstance(one.get("ok"), EngineError)


def test_nothing_is_started_before_the_first_request(pool):
    to = pool()
    assert to.compile_pool.workers == []
    assert not to.grammars.has_outcomes


def test_a_grammar_is_compiled_in_another_process_and_deserialized_in_this_one(pool):
    to = pool()
    assert to.get("ok") == 2
    built = to.grammars.get(Constraint("ok"))
    assert [built.pid] == to.compile_pool.workers != [os.getpid()]
    assert (to.stats.compiled, to.stats.cached, to.stats.waiting) == (1, 1, 0)
    assert to.stats.compile_seconds > 0


def priorities(pid):
    """Of the threads of a process that live."""
    return {os.getpriority(os.PRIO_PROCESS, one.id) for one in psutil.Process(pid).threads()}


def test_long_work_runs_at_the_lowest_priority(pool):
    to = pool()
    to.get("ok")
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert priorities(to.compile_pool.workers[0]) == {here}
    to.ask("spin 10")
    deadline = time.monotonic() + PATIENCE_S
    while priorities(to.compile_pool.workers[0]) != {here, 19}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_request_gets_it_at_once(pool):
    to = pool()
    to.get("ok")
    to.ask("ok")
    assert to.grammars.has_outcomes
    assert list(to.grammars.outcomes()) == [(Constraint("ok"), 2)]
    assert (to.stats.compiled, to.stats.hits) == (1, 1)


def test_two_requests_for_one_grammar_compile_it_once(pool):
    to = pool()
    to.ask("ok", "ok")
    to.wait("ok")
    to.release("ok")
    assert to.grammars.get(Constraint("ok")).min_tokens == 2
    assert (to.stats.compiled, to.stats.failed) == (1, 0)


def test_a_refusal_of_a_grammar_is_cached(pool):
    to = pool()
    for _ in range(2):
        error = to.get("refuse it")
        assert isinstance(error, RequestError)
        assert (str(error), error.param) == ("refused: it", "pattern")
        to.release("refuse it")
    assert (to.stats.failed, to.stats.hits) == (1, 1)
    assert to.get("ok") == 2


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("fail", "ZeroDivisionError"),
        ("panic", "Panic"),
        ("ok not", "ValueError"),
        ("ok oh", "Panic"),
    ],
)
def test_an_internal_error_ends_one_grammar_and_is_not_cached(pool, form, why, caplog):
    to = pool()
    for _ in range(2):
        error = to.get(form)
        assert isinstance(error, EngineError)
        assert why in str(error)
        to.release(form)
    assert "Traceback" in caplog.text
    assert to.get("ok") == 2
    assert (to.stats.failed, to.stats.hits, to.stats.cached) == (2, 0, 1)


def test_work_over_its_time_limit_is_killed_and_reported(pool):
    to = pool(seconds=0.15)
    error = to.get("spin 1000")
    assert isinstance(error, RequestError)
    assert "more than 0.15 s of processor time" in str(error)
    assert "grammar_compile_seconds" in str(error)
    assert to.get("ok") == 2


def test_a_worker_without_progress_is_killed_and_its_grammar_is_not_refused(pool):
    to = pool(seconds=0.05)
    error = to.get("sleep 1000")
    assert isinstance(error, EngineError)
    assert "too busy" in str(error)
    to.release("sleep 1000")
    assert to.stats.cached == 0


@pytest.mark.parametrize("form", ["eat 800", "eat 800000"])
def test_what_takes_too_much_memory_is_refused(pool, form):
    to = pool(memory=200 << 20)
    error = to.get(form)
    assert isinstance(error, RequestError)
    assert "more than 200 MiB of memory" in str(error)
    assert "grammar_compile_memory" in str(error)
    assert to.get("eat 50") == 6


def test_memory_that_earlier_grammars_left_behind_does_not_count(pool):
    to = pool(memory=200 << 20)
    pids = set()
    for i in range(6):
        assert to.get(f"leak 100 {i}") == len(f"leak 100 {i}")
        pids.add(to.grammars.get(Constraint(f"leak 100 {i}")).pid)
    assert len(pids) == 2, "a worker that has grown too big is replaced"


def test_a_worker_that_is_killed_is_replaced_and_its_job_done(pool, tmp_path):
    to = pool()
    assert isinstance(to.get(f"die_once {tmp_path / 'died'}"), int)
    assert to.stats.failed == 0


def test_an_idle_worker_that_is_killed_is_replaced(pool):
    to = pool()
    to.get("ok 1")
    [pid] = to.compile_pool.workers
    os.kill(pid, signal.SIGKILL)
    assert to.get("ok 2") == 4
    assert to.compile_pool.workers != [pid]


def test_a_form_that_ends_two_workers_is_at_fault(pool):
    to = pool()
    error = to.get("die")
    assert isinstance(error, RequestError)
    assert "crashed, twice" in str(error)
    assert to.get("ok") == 2


def test_a_grammar_whose_workers_are_killed_from_outside_is_tried_again(pool):
    to = pool()
    for _ in range(2):
        error = to.get("be_killed")
        assert isinstance(error, EngineError)
        assert "killed, twice" in str(error)
        to.release("be_killed")
    assert to.stats.cached == 0


@pytest.mark.parametrize(("what", "why"), [("broken", "no tokenizer here"), ("dead", "ended")])
def test_a_worker_that_cannot_start_blocks_no_grammar_and_is_started_again(pool, what, why):
    to = pool(what)
    for _ in range(2):
        error = to.get("ok")
        assert isinstance(error, EngineError)
        assert why in str(error)
        to.release("ok")
    assert to.stats.cached == 0
    assert to.stats.failed == 2


def test_one_slow_job_does_not_hold_up_the_others(pool):
    to = pool()
    to.ask("sleep 1000", "ok 1", "ok 2")
    assert to.wait("ok 1", "ok 2") == [4, 4]
    assert len(to.compile_pool.workers) == 2


def test_grammars_without_waiting_requests_are_not_compiled(pool):
    to = pool()
    to.ask("sleep 1", "ok 1", "ok 2")
    to.release("ok 1")
    to.wait("sleep 1", "ok 2")
    assert to.stats.compiled == 2
    assert Constraint("ok 1") not in to.grammars._entries


def test_a_grammar_that_was_given_up_is_compiled_when_requested_again(pool):
    to = pool()
    to.ask("sleep 0.2", "ok")
    to.release("ok", "sleep 0.2")
    to.ask("ok")
    assert to.wait("ok") == [2]


def test_the_ones_used_longest_ago_are_forgotten_and_those_in_use_are_not(pool):
    to = pool(cache_size=2)
    for form in ("ok 1", "ok 2", "ok 3", "ok 4"):
        to.get(form)
    to.release("ok 4", "ok 2", "ok 1")
    assert [c.form for c in to.grammars._entries] == ["ok 1", "ok 2", "ok 3"]
    to.get("ok 2")
    to.release("ok 2", "ok 3")
    assert [c.form for c in to.grammars._entries] == ["ok 2", "ok 3"]
    to.get("ok 3")
    assert to.grammars.get(Constraint("ok 3")).min_tokens == 4


def test_memory_bounds_what_is_kept(pool):
    to = pool(cache_memory=2500)
    for i in range(5):
        to.get(f"ok {i}")
        to.release(f"ok {i}")
    assert (to.stats.cached, to.stats.cached_bytes) == (2, 2008)


def test_a_flood_keeps_within_the_memory_limit_and_all_are_compiled(pool):
    to = pool(use_size=8, cache_size=3)
    forms = [f"ok {i}" for i in range(100)]
    to.ask(*forms)
    most, left = 0, set(forms)
    while left:
        found = to.wait_any()
        most = max(most, to.stats.cached)
        to.release(*found)
        left -= set(found)
    assert most <= 11
    assert to.stats.compiled == 100


def test_too_many_that_wait_are_turned_away_but_not_those_that_are_known(pool):
    to = pool(waiting=2, use_size=1)
    to.get("ok")
    to.ask("ok 1", "ok 2")
    with pytest.raises(Overloaded, match="2 grammars"):
        to.grammars.check_constraint(Constraint("ok 3"))
    to.grammars.check_constraint(Constraint("ok"))
    to.grammars.check_constraint(Constraint("ok 1"))


def test_forms_that_wait_take_bounded_memory(pool):
    to = pool(waiting_memory=100, use_size=1)
    to.get("ok")
    to.ask("ok " + "x" * 90)
    with pytest.raises(Overloaded):
        to.grammars.check_constraint(Constraint("ok and more"))


def test_closing_ends_workers_in_the_middle_of_a_job(pool):
    to = pool()
    to.ask("sleep 1000", "ok")
    while not to.compile_pool.workers:
        time.sleep(0.01)
    to.grammars.close()
    assert to.compile_pool.workers == []


def test_closing_ends_a_worker_that_is_only_beginning(pool):
    to = pool("slow")
    to.ask("ok")
    while not to.compile_pool.workers:
        time.sleep(0.001)
    began = time.monotonic()
    to.grammars.close()
    assert to.compile_pool.workers == []
    assert time.monotonic() - began < 4.0


def test_a_worker_ends_with_the_process_that_started_it():
    ours, theirs = socket.socketpair()
    with theirs, ours:
        process = spawn_process("tests.cpu.grammar_worker", theirs, [""])
    assert process.wait(PATIENCE_S) == 1
