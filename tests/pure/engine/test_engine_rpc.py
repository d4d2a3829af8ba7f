"""Engine RPC without a transport: which client gets which message, and that none harms another."""

import msgspec
import pytest

from quire.core.admission.admission_control import AdmissionControl
from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache import KVCache
from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.scheduling.grammar_wait import GrammarWait
from quire.core.scheduling.limits.base import by_contract
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.scheduling.limits.token_budget import TokenBudget
from quire.core.scheduling.order.fifo import Fifo
from quire.core.scheduling.scheduler import Scheduler
from quire.core.types import Request, StopConditions
from quire.engine.core.engine_core import EngineCore
from quire.engine.core.engine_rpc import EngineRpc
from quire.engine.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    AbortSequence,
    AddRequests,
    EngineDeadMessage,
    EngineReady,
    Hello,
    UtilityCall,
    request_to_wire,
)
from quire.executors.fake import Executor
from tests.pure.core.builders import FakeGrammars, fake_constraint


class Forgetful(Executor):
    def release_kv_memory(self):
        self.forgot = True


def service(grammars=None, most=None, checks=()):
    kv = KVCache(BlockPool(64), 4)
    door = AdmissionControl(max_requests=most, clock=lambda: 0.0)
    limits = [door, TokenBudget(64), MaxSeqsLimit(8), GrammarWait(grammars, 100)]
    scheduler = Scheduler(kv, Fifo(), **by_contract(limits), max_seqs=8, max_len=100)
    engine = EngineCore(scheduler, Forgetful(lambda tokens: len(tokens)), check=True)
    return EngineRpc(engine, checks)


def request(
    name, max_tokens=5, *, n=1, prompt=3, kind=RequestOutputKind.DELTA, constraint=None, **params
):
    made = SamplingParams(n=n, max_tokens=max_tokens, output_kind=kind, **params)
    stop = StopConditions(max_tokens)
    return request_to_wire(Request(name, (1,) * prompt, stop, made, n=n, constraint=constraint))


def add(to, sender, *requests, number=0):
    to.handle(sender, AddRequests(number, list(requests)))


def turns(to, count=100):
    """(sender, news) of turns until nothing is left to do."""
    told = []
    for _ in range(count):
        if to.idle:
            break
        told += to.run_step()
    return told


def updates(told, sender):
    return [u for who, news in told if who == sender for u in news.updates]


def answers(told, sender):
    return [a for who, news in told if who == sender for a in news.replies]


def test_each_client_gets_its_own_outputs_once_per_step():
    to = service()
    add(to, 1, request("a"), request("b"))
    add(to, 2, request("c"))
    while not to.idle:
        told = to.run_step()
        assert len({who for who, _ in told}) == len(told)
        assert {u.request_id for u in updates(told, 1)} <= {"a", "b"}
        assert {u.request_id for u in updates(told, 2)} <= {"c"}
    assert not to._owned


def test_a_refused_request_takes_the_others_of_its_message_with_it():
    to = service()
    add(to, 1, request("a"), request("b", prompt=101), number=7)
    assert to.engine.idle  # "a" does not run
    told = turns(to)
    assert updates(told, 1) == []
    (answer,) = answers(told, 1)
    assert (answer.call_id, answer.error.error_type) == (7, "TooLong")
    assert to.engine.stats().held_blocks == 0
    assert not to._owned


def test_a_used_id_is_refused_and_the_first_request_continues():
    to = service()
    add(to, 1, request("a"))
    add(to, 2, request("a"), number=3)
    told = turns(to)
    assert answers(told, 2)[0].error.error_type == "RequestError"
    assert updates(told, 1)[-1].finish == "length"


def test_an_abort_is_reported_to_the_owner_whichever_client_requested_it():
    to = service()
    add(to, 1, request("a", 50))
    to.run_step()
    to.handle(2, AbortRequests(["a", "nobody"]))
    assert [u.finish for u in updates(turns(to), 1)] == ["abort"]


def test_requests_are_aborted_by_the_name_that_clients_know():
    to = service()
    add(to, 1, request("x-1-0", 50), request("x-1-1", 50), request("x-12-0"))
    to.run_step()
    to.handle(2, UtilityCall(5, "abort_named", [["x-1"]]))
    told = turns(to)
    assert answers(told, 2)[0].result == 2
    ends = {u.request_id: u.finish for u in updates(told, 1) if u.finish}
    assert ends == {"x-1-0": "abort", "x-1-1": "abort", "x-12-0": "length"}


def test_an_ended_sequence_gets_no_update_and_its_request_is_removed():
    to = service()
    add(to, 1, request("a", 50, n=2, temperature=1.0))
    to.run_step()
    to.handle(1, AbortSequence("a", 0))
    to.handle(1, AbortSequence("a", 0))
    assert {u.index for u in updates([*to.run_step(), *to.run_step()], 1)} == {1}
    to.handle(1, AbortSequence("a", 7))
    to.handle(1, AbortSequence("nobody", 0))
    to.handle(1, AbortSequence("a", 1))
    assert to.engine.stats().running == 0
    assert not to._owned


def test_final_only_outputs_are_sent_at_the_end():
    to = service()
    add(to, 1, request("a", 20, kind=RequestOutputKind.FINAL_ONLY), request("b", 20))
    add(to, 1, request("c", 20, kind=RequestOutputKind.FINAL_ONLY, stop=["x"]))
    told = turns(to)
    by_id = {}
    for u in updates(told, 1):
        by_id.setdefault(u.request_id, []).append(u)
    assert {name: len(us) for name, us in by_id.items()} == {"a": 1, "b": 20, "c": 20}
    assert by_id["a"][0].token_ids == [t for u in by_id["b"] for t in u.token_ids]
    assert by_id["a"][0].finish == "length"


@pytest.mark.parametrize(
    ("name", "args"), [("no_such_call", []), ("stats", [1, 2]), ("sleep", [1]), ("wake_up", [7])]
)
def test_a_call_that_makes_no_sense_is_answered_with_a_fault(name, args):
    to = service()
    to.handle(1, UtilityCall(9, name, args))
    (answer,) = answers(turns(to), 1)
    assert answer.call_id == 9
    assert answer.error is not None


def test_another_protocol_is_refused():
    to = service()
    assert isinstance(to.handle(1, Hello(PROTOCOL_VERSION, "x")), EngineReady)
    refusal = to.handle(2, Hello(PROTOCOL_VERSION + 1, "x"))
    assert isinstance(refusal, EngineDeadMessage)
    assert "two versions" in refusal.reason


def test_checks_of_logits_processors_are_made_where_they_live():
    def check(params):
        if params.extra_args:
            raise ValueError("no extras")

    to = service(checks=[check])
    add(to, 1, request("a", extra_args={"x": 1}))
    (answer,) = answers(turns(to), 1)
    assert (answer.error.error_type, answer.error.param) == ("RequestError", "extra_args")


# -- sleep --------------------------------------------------------------------------------------


def call(to, name, *args, number=1):
    to.handle(1, UtilityCall(number, name, list(args)))


def test_sleep_ends_what_runs_frees_the_cache_and_refuses_what_comes():
    to = service()
    add(to, 2, request("a", 50))
    to.run_step()
    call(to, "sleep", 1, "abort", False)
    told = turns(to)
    assert updates(told, 2)[-1].finish == "abort"
    assert sorted(answers(told, 1)[0].result) == ["kv_cache", "scheduling", "weights"]
    assert to.engine._executor.forgot
    add(to, 2, request("b"), number=4)
    (answer,) = answers(to.run_step(), 2)
    assert answer.error.error_type == "Overloaded"
    assert to.heartbeat().sleeping_tags == ("kv_cache", "scheduling", "weights")
    call(to, "wake_up", None)
    assert answers(turns(to), 1)[0].result == []
    add(to, 2, request("c"))
    assert updates(turns(to), 2)[-1].finish == "length"


def test_a_sleep_that_waits_is_answered_when_the_last_request_has_ended():
    to = service()
    add(to, 2, request("a", 10))
    to.run_step()
    call(to, "sleep", 1, "wait", False)
    add(to, 2, request("b"), number=4)
    told = turns(to)
    assert updates(told, 2)[-1].finish == "length"
    assert answers(told, 2)[-1].error.error_type == "Overloaded"
    assert answers(told, 1)[0].error is None
    assert to.heartbeat().sleeping_tags


def test_a_pause_keeps_what_runs_and_lets_what_comes_wait():
    to = service()
    add(to, 2, request("a", 10))
    to.run_step()
    call(to, "sleep", 0, "keep", False)
    add(to, 2, request("b", 10))
    told = turns(to)
    assert to.idle
    assert updates(told, 2) == []
    call(to, "wake_up", None)
    ends = [u for u in updates(turns(to), 2) if u.finish]
    assert [(u.request_id, u.finish) for u in ends] == [("a", "length"), ("b", "length")]


def test_what_is_kept_keeps_its_cache():
    to = service()
    add(to, 2, request("a", 10))
    to.run_step()
    for args in ((1, "keep", False), (0, "keep", True), (2, "abort", False), (0, "nap", False)):
        call(to, "sleep", *args)
        assert answers(to.run_step(), 1)[0].error is not None
    assert to.heartbeat().sleeping_tags == ()


def test_a_cache_in_use_is_reset_only_with_its_requests():
    to = service()
    add(to, 2, request("a", 50))
    to.run_step()
    call(to, "reset_prefix_cache")
    assert answers(to.run_step(), 1)[0].result is False
    call(to, "reset_prefix_cache", True)
    told = turns(to)
    assert answers(told, 1)[0].result is True
    assert updates(told, 2)[-1].finish == "abort"


def test_requests_over_the_limit_get_a_retry_hint():
    to = service(most=2)
    add(to, 1, request("a", 2), request("b"), number=1)
    add(to, 2, request("c"), number=2)
    told = to.run_step()
    (answer,) = answers(told, 2)
    assert (answer.error.error_type, answer.error.retry_after_s) == ("Overloaded", 1.0)
    assert "2 requests are active and 1 more were sent, and at most 2" in answer.error.message
    assert answer.error.reason == "max_num_queued_reqs"
    assert answer.error.details["queued_requests"] == 2
    turns(to)
    add(to, 2, request("d"), request("e"), request("f"), number=3)
    assert answers(to.run_step(), 2)[0].error.error_type == "RequestError"  # no room ever
    add(to, 2, request("g"), number=4)
    assert answers(to.run_step(), 2)[0].error is None


def test_forks_of_a_held_request_find_room_in_a_full_engine():
    to = service(most=1)
    add(to, 1, msgspec.structs.replace(request("a", 2), hold=True), number=1)
    turns(to)
    add(to, 1, request("fills it"), number=2)
    to.run_step()
    add(to, 1, msgspec.structs.replace(request("b"), parent="a"), number=3)
    assert answers(to.run_step(), 1)[0].error is None


# -- requests that wait for a grammar ----------------------------------------------------------


def test_while_all_wait_for_a_grammar_there_is_nothing_to_do_until_one_is_there():
    grammars = FakeGrammars()
    to = service(grammars)
    rung = []
    to.engine.set_ready_callback(lambda: rung.append(to.idle))
    add(
        to,
        1,
        request("a", constraint=fake_constraint(1)),
        request("b", constraint=fake_constraint(2)),
    )
    to.run_step()
    assert to.idle
    grammars.tick()
    assert rung == [False]
    assert [u.request_id for u in updates(turns(to), 1)] == ["a"] * 5
    assert to.idle


def test_a_grammar_failure_is_sent_to_its_owner_alone_even_when_idle():
    grammars = FakeGrammars()
    to = service(grammars)
    add(to, 1, request("a", constraint=fake_constraint(1, fails=True)))
    add(to, 2, request("b", constraint=fake_constraint(9)))
    to.run_step()
    grammars.tick()
    told = turns(to)
    assert [(u.finish, u.fault, u.error) for u in updates(told, 1)] == [("error", "request", "no")]
    assert updates(told, 2) == []


def test_a_client_that_leaves_takes_its_request_that_waits_for_a_grammar_along():
    grammars = FakeGrammars()
    to = service(grammars)
    add(to, 1, request("a", constraint=fake_constraint(1)))
    to.handle(1, AbortRequests(["a"]))
    assert [u.finish for u in updates(turns(to), 1)] == ["abort"]
    assert to.engine.empty
    assert not +grammars.held


def test_sleep_that_waits_for_the_last_request_waits_for_one_without_a_grammar():
    grammars = FakeGrammars()
    to = service(grammars)
    add(to, 1, request("a", constraint=fake_constraint(1)))
    to.run_step()
    to.handle(1, UtilityCall(5, "sleep", [1, "wait", False]))
    assert to.idle
    assert to.run_step() == []  # as for a sign of life
    grammars.tick()
    told = turns(to)
    assert [u.finish for u in updates(told, 1)][-1] == "length"
    assert [a.call_id for a in answers(told, 1)] == [5]


def test_a_paused_engine_runs_no_request_until_it_is_resumed():
    grammars = FakeGrammars()
    to = service(grammars)
    add(to, 1, request("a", constraint=fake_constraint(1)))
    to.handle(1, UtilityCall(1, "sleep", [0, "keep", False]))
    grammars.tick()
    assert updates(turns(to), 1) == []
    assert to.idle or to.run_step()
    to.handle(1, UtilityCall(2, "wake_up", [None]))
    assert updates(turns(to), 1)[-1].finish == "length"


def test_a_client_that_connects_again_has_no_requests():
    """Its connection was lost, and updates with it: it sends what has not ended again."""
    to = service()
    add(to, 1, request("a", 50))
    add(to, 2, request("b"))
    assert to.run_step()
    assert isinstance(to.handle(1, Hello(PROTOCOL_VERSION, "x")), EngineReady)
    assert to.num_requests == 1
    told = turns(to)
    assert {sender for sender, _ in told} == {2}
    add(to, 1, request("a"), number=7)
    told = turns(to)
    assert [len(one.token_ids) for one in updates(told, 1)] == [1] * 5
