"""Waiting for named resources: one state machine for grammars and whatever comes next."""

from __future__ import annotations

import pytest

from quire.core.scheduling.grammar_wait import GrammarWait
from quire.core.scheduling.waiting import ResourceProvider, ResourceWaits
from quire.core.types import SequenceState
from quire.errors import EngineError, Overloaded, Unsupported
from tests.pure.core.made import FakeGrammars, bound, request
from tests.pure.core.workload import Run, Setup, check_outcome


def asked(limit, *requests):
    for one in requests:
        limit.check_request(one)
        assert limit.add_request(one) == (one.constraint is not None)


def test_a_request_without_a_constraint_is_not_kept():
    limit = ResourceWaits([GrammarWait(FakeGrammars(), 100)])
    asked(limit, request("a"))
    assert not limit.has_results


def test_all_who_wait_for_a_grammar_are_let_go_with_it():
    grammars = FakeGrammars()
    limit = ResourceWaits([GrammarWait(grammars, 100)])
    first, other = bound(1), bound(2)
    asked(limit, request("a", constraint=first), request("b", constraint=other))
    asked(limit, request("c", constraint=first))
    assert not limit.has_results
    grammars.tick()
    assert limit.has_results
    assert limit.results() == [("a", None), ("c", None)]
    asked(limit, request("d", constraint=first))
    assert limit.results() == [("d", None)]


def test_a_grammar_that_fails_is_the_fault_of_the_request():
    grammars = FakeGrammars()
    limit = ResourceWaits([GrammarWait(grammars, 100)])
    asked(limit, request("a", constraint=bound(0, fails=True)))
    [(name, error)] = limit.results()
    assert (name, str(error)) == ("a", "no")


@pytest.mark.parametrize(
    ("most", "prompt", "max_len", "param"),
    [(5, 3, 100, None), (4, 3, 100, "max_tokens"), (9, 3, 8, None), (9, 3, 7, "prompt")],
)
def test_a_text_that_cannot_be_whole_is_refused(most, prompt, max_len, param):
    grammars = FakeGrammars()
    limit = ResourceWaits([GrammarWait(grammars, max_len)])
    asked(limit, request("a", range(prompt), most, constraint=bound(0, 5)))
    [(_, error)] = limit.results()
    assert (error and error.param) == param
    assert error is None or "5 tokens" in str(error) or "has 5" in str(error)


def test_what_ended_while_it_waited_is_not_named_and_holds_nothing():
    grammars = FakeGrammars()
    limit = ResourceWaits([GrammarWait(grammars, 100)])
    gone, other = request("a", constraint=bound(1)), request("b", constraint=bound(1))
    asked(limit, gone, other)
    limit.remove_request(gone)
    grammars.tick()
    assert limit.results() == [("b", None)]
    limit.remove_request(other)
    assert not +grammars.held


def test_without_grammars_a_constraint_is_refused_at_once():
    with pytest.raises(Unsupported, match="tokenizer"):
        GrammarWait(None, 100).check_request(request("a", constraint=bound()))


# -- a second provider --------------------------------------------------------------------------


class FakeAdapters(ResourceProvider):
    """Loads the adapter that a salt names."""

    def __init__(self):
        self.held, self.news, self.callback = [], [], lambda: None

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
        self.news.append(((kind, salt), error))
        self.callback()

    @property
    def has_outcomes(self):
        return bool(self.news)

    def set_outcome_callback(self, callback):
        self.callback = callback

    def report(self, waits):
        news, self.news = self.news, []
        for name, error in news:
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
    while not run.scheduler.idle or run.flying:
        run.step()


def test_a_request_waits_for_all_its_resources_of_both_providers():
    one = request("a", salt=b"x", constraint=bound(2))
    run, adapters, grammars, rings = started(one, request("b"))
    run.scheduler.check()
    adapters.loaded("adapter", b"x")
    drain(run)  # the other one passes, and the grammar is ready meanwhile
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


def test_one_resource_that_fails_ends_all_who_wait_for_it_and_no_one_else():
    both = request("a", salt=b"x", constraint=bound(90))
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


def test_a_request_that_is_aborted_while_it_waits_holds_nothing():
    run, adapters, grammars, _ = started(request("a", salt=b"x", constraint=bound(5), n=3))
    assert [update.finish for update in run.scheduler.abort("a")] == ["abort"] * 3
    assert not adapters.held
    assert not +grammars.held
    adapters.loaded("adapter", b"x")
    assert not run.scheduler.has_ready
    run.scheduler.check()


def test_a_request_that_a_provider_refuses_leaves_nothing_behind():
    run, adapters, grammars, _ = started()
    with pytest.raises(Overloaded):
        run.scheduler.add(request("a", salt=b"too big", constraint=bound(5)))
    assert not adapters.held
    assert not +grammars.held
    assert run.scheduler.idle
    assert not run.scheduler.any_waiting_for_resources


def test_a_provider_that_raises_has_the_others_release_the_request():
    class Broken(ResourceProvider):
        def request(self, request):
            raise RuntimeError("broken")

    adapters = FakeAdapters()
    run = Run(Setup(more=[adapters, Broken()]), [])
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
