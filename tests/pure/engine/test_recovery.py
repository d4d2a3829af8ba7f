"""What a client does when its engine dies and another takes over, over a transport that is a list."""

import asyncio

import pytest

from quire.core.admission.request_blocklist import RequestBlocklist
from quire.core.params import SamplingParams
from quire.core.sequence_timing import BREAKDOWN_WITH_RECOVERY_FIELDS, SequenceTiming
from quire.core.types import Request, StopConditions, Update
from quire.engine.client.engine_client import EngineClient
from quire.engine.messages import (
    AbortRequests,
    AddRequests,
    CallReply,
    HeartbeatMessage,
    OutputBatch,
    UtilityCall,
    WireError,
    fingerprint,
    request_from_wire,
)
from quire.engine.supervise.process_pipe import EngineUnavailable
from quire.errors import (
    EngineAway,
    EngineCrashed,
    EngineDead,
    Quarantined,
    RequestError,
    ShuttingDown,
    StepFailed,
)


class Wire:
    """In place of a transport: what was sent to the engine that there is."""

    def __init__(self):
        self.sent, self.reasons = [], []

    def start(self, deliver, die, away, back):
        self.deliver, self.die, self._away, self._back = deliver, die, away, back

    def send(self, message):
        self.sent.append(message)

    def restart(self, reason):
        self.reasons.append(reason)

    async def stop(self):
        pass

    def close(self):
        pass

    # What the engine and its keeper do

    def lose(self, *, aboard=None, expected_s=3.0):
        self.sent = []
        self._away(
            EngineUnavailable(
                reason="it was killed", expected_restart_s=expected_s, running_ids=aboard
            )
        )

    def back(self):
        self._back()

    def say(self, *updates, answers=()):
        self.deliver(OutputBatch(list(updates), list(answers)))

    def accept(self):
        """Answer all requests to add."""
        self.say(answers=[CallReply(m.call_id) for m in self.sent if isinstance(m, AddRequests)])

    def added(self):
        return [
            request_from_wire(one)
            for m in self.sent
            if isinstance(m, AddRequests)
            for one in m.requests
        ]


class Watcher:
    """An observer that remembers."""

    def __init__(self):
        self.open, self.said, self.kept = [], [], None

    def on_requests_accepted(self, requests):
        self.open += [one.id for one in requests]

    def on_updates(self, updates):
        self.said += updates

    def on_sequence_ended(self, request_id, index):
        pass

    def retain_requests(self, request_ids):
        self.kept = sorted(request_ids)


def request(name, n=1, **more):
    return Request(
        name, (1, 2, 3), StopConditions(40), SamplingParams(max_tokens=40, n=n), n=n, **more
    )


def another(name):
    """With an input of its own."""
    return Request(name, (1, 2), StopConditions(40), SamplingParams(max_tokens=40))


def says(name, *tokens, index=0, **more):
    return Update(name, index, list(tokens), **more)


async def soon():
    for _ in range(5):
        await asyncio.sleep(0)


async def opened(client, wire, *requests):
    task = asyncio.create_task(client.generate(requests))
    await soon()
    wire.accept()
    return await task


def run(body):
    async def main():
        wire = Wire()
        client = EngineClient(wire)
        client.start()
        await body(client, wire)
        await client.stop()

    asyncio.run(main())


async def rest(stream):
    """The updates of a stream until it ends, without keepalives."""
    return [update async for updates in stream for update in updates]


def test_another_engine_gets_the_delivered_tokens_and_the_stream_continues():
    async def body(client, wire):
        stream = await opened(client, wire, request("a", n=3), request("b"))
        wire.say(says("a", 5, 6), says("a", 7, index=2, finish="stop"), says("b", 8))
        wire.lose()
        assert wire.sent == []
        wire.back()
        a, b = wire.added()
        assert (a.id, a.resumed_tokens) == ("a", ((5, 6), (), None))
        assert (b.id, b.resumed_tokens) == ("b", ((8,),))
        wire.say(says("a", 9, finish="stop"), says("a", 4, index=1, finish="stop"))
        wire.say(says("b", 3, finish="length"))
        told = await rest(stream)
        assert [u.token_ids for u in told if u[:2] == ("a", 0)] == [[5, 6, 9]]
        assert [u.token_ids for u in told if u[:2] == ("b", 0)] == [[8, 3]]
        assert client.restarts == 1

    run(body)


def test_unaccepted_requests_are_sent_again_with_the_same_call_id():
    async def body(client, wire):
        task = asyncio.create_task(client.generate([request("a"), request("b")]))
        await soon()
        (before,) = wire.sent
        wire.lose()
        wire.back()
        (again,) = wire.sent
        assert again.call_id == before.call_id
        wire.accept()
        assert (await task).request_ids == ("a", "b")

    run(body)


def test_a_stream_that_was_closed_meanwhile_is_not_taken_along():
    async def body(client, wire):
        client.observer = Watcher()
        gone = await opened(client, wire, request("a"))
        await opened(client, wire, request("b"))
        wire.lose()
        gone.close()
        wire.back()
        assert [one.id for one in wire.added()] == ["b"]
        assert client.observer.kept == ["b"]
        assert client.observer.open == ["a", "b"]  # nobody is opened twice

    run(body)


def test_sequences_that_are_ended_meanwhile_stay_so():
    async def body(client, wire):
        stream = await opened(client, wire, request("a", n=2))
        wire.lose()
        stream.end_sequence("a", 1)
        wire.back()
        assert [one.resumed_tokens for one in wire.added()] == [((), None)]

    run(body)


def test_a_request_that_two_dead_engines_ran_ends():
    async def body(client, wire):
        bad = await opened(client, wire, request("bad"))
        good = await opened(client, wire, another("good"))
        wire.lose(aboard=["bad", "good"])
        wire.back()
        wire.accept()
        wire.lose(aboard=["bad"])
        with pytest.raises(EngineCrashed, match="twice"):
            await rest(bad)
        wire.back()
        assert [one.id for one in wire.added()] == ["good"]
        wire.say(says("good", 1, finish="stop"))
        assert len(await rest(good)) == 1

    run(body)


def test_two_deaths_with_several_requests_end_none():
    async def body(client, wire):
        streams = [await opened(client, wire, request(name)) for name in "ab"]
        for deaths in (1, 2):
            wire.lose(aboard=["a", "b"])
            wire.back()
            wire.accept()
            assert [(one.id, one.engine_crashes) for one in wire.added()] == [
                ("a", deaths),
                ("b", deaths),
            ]
        wire.say(says("a", 1, finish="stop"), says("b", 2, finish="stop"))
        assert [len(await rest(one)) for one in streams] == [1, 1]

    run(body)


def test_but_a_third_does():
    async def body(client, wire):
        bad = await opened(client, wire, request("bad"))
        good = await opened(client, wire, another("good"))
        for aboard in (["bad", "good"], ["bad", "good"], ["bad", "another"]):
            wire.lose(aboard=aboard)
            wire.back()
            wire.accept()
        with pytest.raises(EngineCrashed, match="3 times"):
            await rest(bad)
        wire.say(says("good", 1, finish="stop"))
        assert len(await rest(good)) == 1

    run(body)


def test_the_most_suspect_request_is_resubmitted_last():
    async def body(client, wire):
        for name in "abc":
            await opened(client, wire, request(name))
        wire.lose(aboard=["a"])
        wire.back()
        wire.accept()
        wire.lose(aboard=["b", "a"])
        wire.back()
        assert [(one.id, one.engine_crashes) for one in wire.added()] == [
            ("c", 0),
            ("b", 1),
            ("a", 2),
        ]

    run(body)


def test_what_killed_an_engine_is_not_tried_again_for_a_while():
    async def body(client, wire):
        told = []
        client.on_input_blocked = told.append
        now = [0.0]
        client.blocklist = RequestBlocklist(for_s=60.0, clock=lambda: now[0])
        bad = await opened(client, wire, request("bad"))
        for _ in range(2):
            wire.lose(aboard=["bad"])
            wire.back()
        with pytest.raises(EngineCrashed):
            await rest(bad)
        assert told == [fingerprint(request("bad"))]
        for _ in range(2):
            with pytest.raises(Quarantined, match=r"not tried again for 60 s"):
                await client.generate([request("other"), request("again", arrived_at=3.0)])
        assert wire.added() == []
        await opened(client, wire, another("other"))
        now[0] = 60.0
        await opened(client, wire, request("again"))

    run(body)


def test_the_input_of_a_faulty_request_is_blocked_too():
    async def body(client, wire):
        bad = await opened(client, wire, request("bad", n=2))
        wire.say(*(says("bad", index=i, finish="error", error="x", fault="step") for i in (0, 1)))
        (update, _) = await rest(bad)
        assert isinstance(update.to_exception(), StepFailed)
        with pytest.raises(Quarantined):
            await client.generate([request("again", n=2)])
        await opened(client, wire, request("fewer"))

    run(body)


def test_an_unattributed_error_blocks_no_request():
    async def body(client, wire):
        bad = await opened(client, wire, request("bad"))
        wire.say(says("bad", finish="error", error="x", fault="numbers"))
        await rest(bad)
        await opened(client, wire, request("again"))

    run(body)


def test_one_that_never_was_accepted_ends_likewise():
    async def body(client, wire):
        task = asyncio.create_task(client.generate([request("bad")]))
        await soon()
        for _ in range(3):
            wire.lose()
            wire.back()
        with pytest.raises(EngineCrashed, match="3 times"):
            await task

    run(body)


def test_an_engine_that_dies_while_it_starts_ran_no_request():
    async def body(client, wire):
        stream = await opened(client, wire, request("a"))
        wire.lose()
        wire.lose(aboard=[])
        wire.back()
        assert [one.id for one in wire.added()] == ["a"]
        wire.say(says("a", 1, finish="stop"))
        assert len(await rest(stream)) == 1

    run(body)


def test_new_requests_wait_for_it():
    async def body(client, wire):
        wire.lose()
        task = asyncio.create_task(client.generate([request("a")]))
        await soon()
        assert wire.sent == []
        wire.back()
        await soon()
        wire.accept()
        assert (await task).request_ids == ("a",)

    run(body)


def test_but_not_for_long():
    async def body(client, wire):
        client.restart_wait_s = 0.0
        wire.lose(expected_s=7.0)
        with pytest.raises(EngineAway, match="takes longer") as told:
            await client.generate([request("a")])
        assert 6.0 < told.value.retry_after_s <= 7.0
        assert client.restart_reason == "it was killed"

    run(body)


def test_nor_too_many(monkeypatch):
    async def body(client, wire):
        wire.lose()
        waiting = [asyncio.create_task(client.generate([request(str(i))])) for i in range(2)]
        await soon()
        with pytest.raises(EngineAway, match="2 requests wait"):
            await client.generate([request("third")])
        client.fail_streams(ShuttingDown("over"))
        for one in waiting:
            with pytest.raises(ShuttingDown):
                await one

    monkeypatch.setattr("quire.engine.client.restart_wait.MAX_WAITING_REQUESTS", 2)
    run(body)


def test_every_waiting_request_ends():
    async def body(client, wire):
        stream = await opened(client, wire, request("a"))
        call = asyncio.create_task(client.stats())
        await soon()
        wire.lose()
        with pytest.raises(EngineAway):
            await call
        with pytest.raises(EngineAway):
            await client.stats()
        new = asyncio.create_task(client.generate([request("b")]))
        await soon()
        wire.die(EngineDead("too often"))
        for one in (rest(stream), new):
            with pytest.raises(EngineDead, match="too often"):
                await one

    run(body)


def test_streams_send_keepalives_while_the_engine_is_away(monkeypatch):
    async def body(client, wire):
        stream = await opened(client, wire, request("a"))
        wire.lose()
        assert [await anext(stream), await anext(stream)] == [[], []]
        wire.back()

    monkeypatch.setattr("quire.engine.client.engine_client.KEEPALIVE_S", 0.001)
    run(body)


def test_requests_can_be_ended_while_it_is_away():
    async def body(client, wire):
        stream = await opened(client, wire, request("a", n=2))
        wire.lose()
        await client.abort(["a", "nobody"])
        assert [u.finish for u in await rest(stream)] == ["abort", "abort"]
        wire.back()
        assert wire.sent == []

    run(body)


def test_a_request_that_another_engine_refuses_ends_alone():
    async def body(client, wire):
        bad = await opened(client, wire, request("bad"))
        good = await opened(client, wire, request("good"))
        wire.lose()
        wire.back()
        number = next(m.call_id for m in wire.sent if m.requests[0].id == "bad")
        wire.say(answers=[CallReply(number, error=WireError("TooLong", "it has less room"))])
        with pytest.raises(RequestError, match="less room"):
            await rest(bad)
        wire.say(says("good", 1, finish="stop"))
        assert len(await rest(good)) == 1

    run(body)


def test_what_slept_is_sent_to_sleep_again():
    async def body(client, wire):
        wire.deliver(HeartbeatMessage(("scheduling",)))
        await opened(client, wire, request("a"))
        wire.lose()
        wire.back()
        assert isinstance(wire.sent[0], UtilityCall)
        assert (wire.sent[0].method, wire.sent[0].args) == ("sleep", [0, "keep", False])
        assert [one.id for one in wire.added()] == ["a"]

    run(body)


def test_a_search_continues_without_the_kv_that_it_held():
    async def body(client, wire):
        await opened(client, wire, request("round 0", hold=True))
        wire.say(says("round 0", 1, finish="length"))
        wire.sent = []
        await opened(client, wire, request("round 1", hold=True))
        await opened(client, wire, request("child", parent="round 1"))
        assert wire.added()[1].parent == "round 1"
        wire.lose()
        wire.back()
        assert [one.parent for one in wire.added()] == [None, None]
        wire.accept()
        await opened(client, wire, request("again", parent="round 1"))
        await opened(client, wire, request("lost", parent="round 0"))
        assert [one.parent for one in wire.added()[2:]] == ["round 1", None]

    run(body)


def timing(accepted_at, ended_at, first=None, **cuts):
    return SequenceTiming.starting_at(accepted_at)._replace(
        ended_at=ended_at, first_token_at=first, **cuts
    )


def test_the_time_between_two_engines_is_reported_as_recovery():
    before = timing(10.0, 12.0, 12.0, queue=0.5, prefill=1.5)
    after = timing(20.0, 27.0, 23.0, queue=1.0, prefill=2.0, decode=3.5, engine_other=0.5)
    both = before.extended_to(15.0).followed_by(after)
    assert both.total == pytest.approx(sum(both.breakdown_with_recovery)) == 17.0
    told = dict(zip(BREAKDOWN_WITH_RECOVERY_FIELDS, both.breakdown_with_recovery))
    assert told["recovery"] == 5.0 + 3.0
    assert (told["queue"], told["prefill"], told["decode"]) == (0.5, 1.5, 3.0 + 3.5)
    assert both.first_token_at == 12.0


def test_a_request_without_output_continues_too():
    after = timing(20.0, 24.0, 23.0, queue=1.0, prefill=2.0, decode=1.0)
    both = SequenceTiming.starting_at(10.0).extended_to(15.0).followed_by(after)
    assert both.total == pytest.approx(sum(both.breakdown_with_recovery)) == 14.0
    assert (both.recovery, both.queue, both.first_token_at) == (10.0, 1.0, 23.0)


def test_updates_carry_it_all():
    async def body(client, wire):
        stream = await opened(client, wire, request("a"))
        accepted = stream._accepted_at
        wire.say(says("a", 5, timing=timing(accepted, accepted + 1, accepted + 1, prefill=1.0)))
        client.last_heartbeat_at = accepted + 3
        wire.lose()
        wire.back()
        late = timing(accepted + 5, accepted + 9, accepted + 6, prefill=1.0, decode=3.0)
        wire.say(says("a", 6, finish="stop", timing=late))
        (update,) = await rest(stream)
        assert update.timing.recovery == pytest.approx(3.0)
        assert update.timing.decode == pytest.approx(5.0)
        assert (
            update.timing.total
            == pytest.approx(sum(update.timing.breakdown_with_recovery))
            == pytest.approx(9.0)
        )

    run(body)


def test_a_restart_can_be_requested():
    async def body(client, wire):
        client.restart("it hangs")
        assert wire.reasons == ["it hangs"]

    run(body)


def test_no_message_is_sent_to_a_dead_engine():
    async def body(client, wire):
        stream = await opened(client, wire, request("a"))
        wire.lose()
        stream.close()
        assert not [m for m in wire.sent if isinstance(m, AbortRequests)]

    run(body)


def test_inputs_that_other_clients_blocked_are_refused():
    async def body(client, wire):
        told = []
        client.on_input_blocked = told.append
        client.block_fingerprint(fingerprint(request("theirs")))
        with pytest.raises(Quarantined):
            await client.generate([request("ours")])
        assert told == []  # they know
        await opened(client, wire, another("other"))

    run(body)


def test_a_waiting_request_whose_input_was_blocked_is_refused():
    async def body(client, wire):
        wire.lose(aboard=["theirs"])
        waiting = asyncio.create_task(client.generate([request("ours")]))
        await soon()
        client.block_fingerprint(fingerprint(request("theirs")))
        wire.back()
        with pytest.raises(Quarantined):
            await waiting
        assert wire.added() == []

    run(body)


def test_requests_with_the_faulty_input_end_with_it():
    """Each would cost another engine; but one with more tokens has passed where that one died."""

    async def body(client, wire):
        names = ("culprit", "alike", "further")
        streams = {name: await opened(client, wire, request(name)) for name in names}
        streams["other"] = await opened(client, wire, another("other"))
        wire.say(says("culprit", 1), says("further", 1, 2))
        wire.lose(aboard=["culprit", "further"])
        wire.back()
        wire.accept()
        wire.lose(aboard=["culprit"])
        with pytest.raises(EngineCrashed):
            await rest(streams["culprit"])
        with pytest.raises(Quarantined):
            await rest(streams["alike"])
        wire.back()
        assert {one.id for one in wire.added()} == {"further", "other"}

    run(body)


def test_a_request_with_an_input_blocked_elsewhere_ends_if_it_has_no_output():
    async def body(client, wire):
        streams = [await opened(client, wire, request(name)) for name in ("silent", "speaks")]
        await opened(client, wire, another("other"))
        wire.say(says("speaks", 1))
        wire.lose(aboard=["theirs"])
        client.block_fingerprint(fingerprint(request("theirs")))
        with pytest.raises(Quarantined):
            await rest(streams[0])
        wire.back()
        assert {one.id for one in wire.added()} == {"speaks", "other"}

    run(body)


def test_what_broke_steps_elsewhere_ends_nothing_here():
    """The engine finds the faulty request of a step, and no other ends."""

    async def body(client, wire):
        alike = await opened(client, wire, request("alike"))
        client.block_fingerprint(fingerprint(request("theirs")))
        wire.say(says("alike", 1, finish="stop"))
        assert len(await rest(alike)) == 1

    run(body)
