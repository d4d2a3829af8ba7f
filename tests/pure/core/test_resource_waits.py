"""Resource waits: one state machine for grammars and other named resources."""

from __future__ import annotations

import pytest

from quire.core.scheduling.grammar_wait import GrammarWait
from quire.core.scheduling.waiting import ResourceProvider, ResourceWaits
from quire.core.types import SequenceState
from quire.errors import EngineError, Overloaded, Unsupported
from tests.pure.core.builders import FakeGrammars, fake_constraint, request
from tests.pure.core.workload import Run, Setup, check_outcome


def add_request(limit, *requests):
    for one in requests:
        limit.check_request(one)
        assert limit.add_request(one) == (one.constraint is not None)


def test_a_request_without_a_constraint_does_not_wait():
    limit = ResourceWaits([GrammarWait(FakeGrammars(), 100)])
    add_request(limit, request("a"))
    assert not limit.has_results


def test_a_ready_grammar_queues_all_requests_that_wait_for_it():
    grammars = FakeGrammars()
    limit = ResourceWaits([GrammarWait(grammars, 100)])
    first, other = fake_constraint(1), fake_constraint(2)
    add_request(limit, request("a", constraint=first), request("b", constraint=other))
    add_request(limit, request("c", constraint=first))
    assert not limit.has_results
    grammars.tick()
    assert limit.has_results
    assert limit.results() == [("a", None), ("c", None)]
    add_request(limit, request("d", constraint=first))
    assert limit.results() == [("d", None)]


def test_a_failed_grammar_is_a_request_error():
    grammars = FakeGrammars()
    limit = ResourceWaits([GrammarWait(grammars, 100)])
    add_request(limit, request("a", constraint=fake_constraint(0, fails=True)))
    [(name, error)] = limit.results()
    assert (name, str(error)) == ("a", "no")


@pytest.mark.parametrize(
    ("most", "prompt", "max_len", "param"),
    [(5, 3, 100, None), (4, 3, 100, "max_tokens"), (9, 3, 8, None), (9, 3, 7, "prompt")],
)
def test_a_length_below_the_shortest_text_is_refused(most, prompt, max_len, param):
    grammars = FakeGrammars()
    limit = ResourceWaits([GrammarWait(grammars, max_len)])
    add_request(limit, request("a", range(prompt), most, constraint=fake_constraint(0, 5)))
    [(_, error)] = limit.results()
    assert (error and error.param) == param
    assert error is None or "5 tokens" in str(error) or "has 5" in str(error)


def test_a_request_that_ended_in_its_wait_has_no_result_and_holds_nothing():
    grammars = FakeGrammars()
    limit = ResourceWaits([GrammarWait(grammars, 100)])
    gone, other = (
        request("a", constraint=fake_constraint(1)),
        request("b", constraint=fake_constraint(1)),
    )
    add_request(limit, gone, other)
    limit.remove_request(gone)
    grammars.tick()
    assert limit.results() == [("b", None)]
    limit.remove_request(other)
    assert not +grammars.held


def test_without_grammars_a_constraint_is_refused_at_once():
    with pytest.raises(Unsupported, match="tokenizer"):
        GrammarWait(None, 100).check_request(request("a", constraint=fake_constraint()))


# -- a second provider --------------------------------------------------------------------------


class FakeAdapters(ResourceProvider):
    """Provides the adapter that a salt names."""

    def __init__(self):
        self.held, self.ready, self.callback = [], [], lambda: None

    def check_request(self, request):
        if request.salt == b"too big":
            raise Overloaded("no memory for it", retry_after_s=1.0)

    def request(self, request):
        if not request.salt:
            return ()
        self.held.append(request.id)
        return ("adapter", request.salt), ("base of", request.salt)

    def release(self, request):
        if request.salt:
            self.held.remove(request.id)

    def loaded(self, kind, salt, error=None):
        self.ready.append(((kind, salt), error))
        self.callback()

    @property
    def has_outcomes(self):
        return bool(self.ready)

    def set_outcome_callback(self, callback):
        self.callback = callback

    def report(self, waits):
        ready, self.ready = self.ready, []
        for name, error in ready:
            if error is None:
                waits.ready(name)
            else:
                waits.failed(name, error)


def started(*requests):
    adapters, grammars, rings = FakeAdapters(), FakeGrammars(), []
    run = Run(Setup(more=[adapters], grammars=grammars), [])
    run.scheduler.set_ready_callback(lambda: rings.append(1))
    for one in requests:
        run.requests.append(one)
        run.add(one)
    return run, adapters, grammars, rings


def drain(run):
    while not run.scheduler.idle or run.in_flight:
        run.step()


def test_a_request_waits_for_all_its_resources_of_both_providers():
    one = request("a", salt=b"x", constraint=fake_constraint(2))
    run, adapters, grammars, rings = started(one, request("b"))
    run.scheduler.check()
    adapters.loaded("adapter", b"x")
    drain(run)  # the other request overtakes, and the grammar is ready meanwhile
    assert run.out.finish == {("b", 0): "length"}
    assert run.scheduler.is_waiting_for_resources("a")
    assert len(rings) == 2
    adapters.loaded("base of", b"x")
    assert run.scheduler.has_ready
    drain(run) if not run.scheduler.idle else run.step()
    drain(run)
    check_outcome(run, run.out)
    assert not adapters.held
    assert not +grammars.held


def test_a_failed_resource_ends_exactly_the_requests_that_wait_for_it():
    both = request("a", salt=b"x", constraint=fake_constraint(90))
    run, adapters, grammars, _ = started(both, request("b", salt=b"x"), request("c", salt=b"y"))
    adapters.loaded("adapter", b"x", EngineError("no such file"))
    run.step()
    assert run.out.finish == {("a", 0): "error", ("b", 0): "error"}
    assert adapters.held == ["c"]
    assert not +grammars.held
    adapters.loaded("base of", b"x")  # late
    run.step()
    for kind in ("adapter", "base of"):
        adapters.loaded(kind, b"y")
    run.step()
    drain(run)
    assert run.out.finish["c", 0] == "length"


def test_requests_are_queued_in_the_order_in_which_they_become_ready():
    names = [request(name, salt=name.encode()) for name in "abc"]
    run, adapters, _, _ = started(*names)
    for salt in (b"c", b"a", b"b"):
        adapters.loaded("adapter", salt)
    for salt in (b"b", b"c", b"a"):
        adapters.loaded("base of", salt)
    assert run.scheduler.enqueue_ready().queued == ["b", "c", "a"]


def test_a_request_aborted_in_its_wait_holds_nothing():
    run, adapters, grammars, _ = started(
        request("a", salt=b"x", constraint=fake_constraint(5), n=3)
    )
    assert [update.finish for update in run.scheduler.abort("a")] == ["abort"] * 3
    assert not adapters.held
    assert not +grammars.held
    adapters.loaded("adapter", b"x")
    assert not run.scheduler.has_ready
    run.scheduler.check()


def test_a_request_refused_by_a_provider_leaves_no_state():
    run, adapters, grammars, _ = started()
    with pytest.raises(Overloaded):
        run.scheduler.add(request("a", salt=b"too big", constraint=fake_constraint(5)))
    assert not adapters.held
    assert not +grammars.held
    assert run.scheduler.idle
    assert not run.scheduler.any_waiting_for_resources


def test_an_exception_in_a_provider_releases_the_request_at_the_others():
    class RaisingProvider(ResourceProvider):
        def request(self, request):
            raise RuntimeError("broken")

    adapters = FakeAdapters()
    run = Run(Setup(more=[adapters, RaisingProvider()]), [])
    with pytest.raises(RuntimeError):
        run.scheduler.add(request("a", salt=b"x"))
    assert not adapters.held
    assert next(run.scheduler.sequences(), None) is None
    adapters.loaded("adapter", b"x")
    assert not run.scheduler.has_ready


def test_sequences_that_wait_for_resources_hold_no_slot():
    run, *_ = started(request("a", salt=b"x", n=2))
    assert {seq.state for seq in run.scheduler.sequences()} == {SequenceState.WAITING}
    assert run.scheduler.stats().waiting_for_resources == 1
