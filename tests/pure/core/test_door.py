"""Who is let in: exact bounds, limits by tenant, deadlines against a prediction that is honest."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.admission.admission_control import REJECT_REASONS, AdmissionControl
from quire.core.admission.prefill_backlog import PrefillBacklog
from quire.core.admission.ttft_estimator import TTFTEstimator
from quire.core.tenant_limits import TenantLimits
from quire.core.types import SequenceState
from quire.errors import Overloaded, RequestError
from tests.pure.core.made import request, sequence


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def enter(door, name, tokens=10, **fields):
    made = request(name, range(tokens), **fields)
    door.check_batch([made])
    door.add_request(made)
    return made


def compute(door, made, *counts):
    """Steps that give a prompt so many tokens each; its sequence."""
    seq = sequence(prompt=made.prompt)
    seq.request = made
    for n in counts:
        door.begin_step(1)
        door.take(seq, n)
        seq.planned += n
    return seq


def refused(door, name, tokens=10, **fields):
    with pytest.raises(Overloaded) as caught:
        door.check_batch([request(name, range(tokens), **fields)])
    assert caught.value.reason in REJECT_REASONS
    assert 1 <= caught.value.retry_after_s <= 60
    return caught.value


# -- bounds of the queue -----------------------------------------------------------------------


def test_as_many_requests_come_in_as_may_and_no_more(clock):
    door = AdmissionControl(max_requests=2, clock=clock)
    first = enter(door, "a")
    enter(door, "b")
    error = refused(door, "c")
    assert (error.reason, error.numbers["queued_requests"]) == ("max_num_queued_reqs", 2)
    assert error.numbers["max_queued_requests"] == 2
    assert "at most 2" in str(error)
    door.remove_request(first)
    enter(door, "c")


def test_tokens_count_until_they_are_computed(clock):
    door = AdmissionControl(max_tokens=25, clock=clock)
    first = enter(door, "a")
    enter(door, "b")
    error = refused(door, "c")
    assert (error.reason, error.numbers["queued_tokens"]) == ("max_num_queued_tokens", 20)
    seq = compute(door, first, 5)
    enter(door, "c")
    refused(door, "d", 1)
    door.undo(seq, 0)
    compute(door, first, 5)
    door.remove_request(first)
    refused(door, "d", 6)


def test_one_prompt_may_wait_however_long_it_is(clock):
    door = AdmissionControl(max_tokens=5, clock=clock)
    enter(door, "a", 100)
    refused(door, "b", 1)


def test_forks_and_what_a_gone_engine_had_come_in_whatever_waits(clock):
    door = AdmissionControl(max_requests=1, max_tokens=1, clock=clock)
    enter(door, "a")
    enter(door, "b", parent="a")
    enter(door, "c", resumed_tokens=((1,),))
    assert door.stats().requests == 3


def test_a_request_counts_as_its_answers_and_a_body_as_all_its_prompts(clock):
    door = AdmissionControl(max_requests=4, clock=clock)
    first = enter(door, "a", n=3)
    assert door.stats().requests == 3
    refused(door, "b", n=2)
    with pytest.raises(
        Overloaded, match="3 requests are active and 2 more were sent, and at most 4"
    ):
        door.check_batch([request("b"), request("c")])
    enter(door, "d")
    door.remove_request(first)
    assert door.stats().requests == 1
    door.check_batch([request("b"), request("c", n=2)])


def test_what_can_never_be_admitted_is_no_overload(clock):
    for door, fields in (
        (AdmissionControl(max_requests=4, clock=clock), {}),
        (AdmissionControl(clock=clock), {"tenant_limits": TenantLimits(max_requests=4)}),
    ):
        with pytest.raises(RequestError, match=r"has 5 requests.* 4 requests") as caught:
            door.check_batch([request("a", n=5, **fields)])
        assert caught.value.param == "n"
        with pytest.raises(RequestError) as caught:
            door.check_batch([request(str(i), **fields) for i in range(5)])
        assert caught.value.param == "prompt"


def test_prompts_of_one_body_may_wait_however_many_tokens_they_are(clock):
    """Each alone would be refused behind the other, for ever."""
    for door, fields in (
        (AdmissionControl(max_tokens=15, clock=clock), {}),
        (AdmissionControl(clock=clock), {"tenant_limits": TenantLimits(max_queued_tokens=15)}),
        (AdmissionControl(clock=clock), {"tenant_limits": TenantLimits(tokens_per_minute=15)}),
    ):
        body = [request(str(i), range(10), tenant=b"a", **fields) for i in range(3)]
        door.check_batch(body)
        for one in body:
            door.add_request(one)
        with pytest.raises(Overloaded):
            door.check_batch(body)


# -- limits of a tenant ------------------------------------------------------------------------


def test_a_tenant_has_bounds_of_its_own_and_others_do_not_feel_them(clock):
    door = AdmissionControl(clock=clock)
    mine = {"tenant": b"a", "tenant_limits": TenantLimits(max_requests=1, max_queued_tokens=15)}
    first = enter(door, "a", **mine)
    error = refused(door, "b", **mine)
    assert (error.reason, error.numbers["key_requests"]) == ("key_requests", 1)
    enter(door, "c", tenant=b"b", tenant_limits=TenantLimits(max_queued_tokens=15))
    assert refused(
        door, "d", tenant=b"b", tenant_limits=TenantLimits(max_queued_tokens=15)
    ).reason == ("key_queued_tokens")
    door.remove_request(first)
    enter(door, "b", **mine)


def test_tokens_a_minute_come_back_with_time(clock):
    door = AdmissionControl(clock=clock)
    mine = {"tenant": b"a", "tenant_limits": TenantLimits(tokens_per_minute=60)}
    enter(door, "a", 40, **mine)
    error = refused(door, "b", 40, **mine)
    assert (error.reason, error.retry_after_s) == ("key_tokens_per_minute", 20.0)
    assert error.numbers["key_tokens_left"] == 20
    clock.now += 19
    assert refused(door, "b", 40, **mine).retry_after_s == 1.0
    clock.now += 1
    enter(door, "b", 40, **mine)


def test_answers_count_as_they_are_generated_also_into_debt(clock):
    door = AdmissionControl(clock=clock)
    mine = {"tenant": b"a", "tenant_limits": TenantLimits(tokens_per_minute=60)}
    made = enter(door, "a", 50, **mine)
    seq = compute(door, made, 50)
    seq.tokens += [7] * 40
    seq.state = SequenceState.FINISHED
    assert refused(door, "b", 10, **mine).retry_after_s == 40.0
    assert door.stats().tenants[b"a".hex()].generated_tokens == 40


def test_a_prompt_of_more_than_a_minute_goes_in_when_nothing_was_used(clock):
    door = AdmissionControl(clock=clock)
    mine = {"tenant": b"a", "tenant_limits": TenantLimits(tokens_per_minute=60)}
    enter(door, "a", 500, **mine)
    assert refused(door, "b", 1, **mine).retry_after_s == 60.0


# -- deadlines and the prediction --------------------------------------------------------------


def test_who_cannot_be_answered_in_time_is_sent_away_at_once(clock):
    door = AdmissionControl(most=100, clock=clock)
    for _ in range(20):
        door.observe_step(100, 1.0)
    enter(door, "a", 1000)
    error = refused(door, "b", 1000, deadline_at=clock.now + 5)
    assert error.reason == "deadline"
    assert error.numbers["predicted_ttft_s"] == pytest.approx(20, rel=0.2)
    assert error.numbers["deadline_s"] == 5
    enter(door, "b", 1000, deadline_at=clock.now + 40)


def test_before_anything_is_known_nobody_is_sent_away_for_a_deadline(clock):
    enter(AdmissionControl(clock=clock), "a", deadline_at=clock.now + 0.001)


def test_refusals_are_counted_by_reason_and_tenant(clock):
    door = AdmissionControl(max_requests=1, clock=clock)
    enter(door, "a")
    for _ in range(3):
        refused(door, "b", tenant=b"x")
    assert door.stats().refused == {"max_num_queued_reqs": 3}
    assert door.stats().tenants[b"x".hex()].refused == 3


def steps_of(tokens, most, fixed_s, token_s):
    """What a device with these costs makes of a prompt: steps of at most so many tokens."""
    while tokens > 0:
        n = min(tokens, most)
        yield n, fixed_s + n * token_s
        tokens -= n


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.005, 20e-6), (0.0, 1e-3), (0.05, 1e-5)])
@pytest.mark.parametrize("tokens", [10, 1000, 20_000, 500_000])
def test_the_prediction_comes_near_what_a_steady_device_takes(fixed_s, token_s, tokens):
    forecast, rng = TTFTEstimator(2048), random.Random(1)
    for _ in range(40):
        for n, seconds in steps_of(rng.choice([50, 500, 3000, 9000]), 2048, fixed_s, token_s):
            forecast.observe_step(n, seconds, backlog=n == 2048)
    true = sum(seconds for _, seconds in steps_of(tokens, 2048, fixed_s, token_s))
    step = fixed_s + 2048 * token_s
    assert abs(forecast.estimate_seconds(tokens) - true) <= 0.25 * true + step


def test_a_queue_that_goes_down_slowly_for_another_reason_is_predicted_by_its_own_pace():
    forecast = TTFTEstimator(2048)
    for _ in range(50):
        forecast.observe_step(2048, 0.04, backlog=True)
        for _ in range(9):
            forecast.observe_step(0, 0.04, backlog=True)  # no seats: others have to end first
    assert forecast.estimate_seconds(20_480) == pytest.approx(4.0, rel=0.3)


def test_a_stall_does_not_make_the_prediction():
    forecast = TTFTEstimator(2048)
    for _ in range(50):
        forecast.observe_step(1000, 0.02, backlog=False)
    forecast.observe_step(1000, 30.0, backlog=False)
    assert forecast.estimate_seconds(1000) < 0.1


# -- the book of what waits --------------------------------------------------------------------

moves = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from([b"", b"x", b"y"]), st.integers(0, 300)),
    max_size=40,
)


@given(moves)
def test_the_backlog_is_the_sum_of_what_is_left(moves):
    book, left, of = PrefillBacklog(), {}, {}
    for name, tenant, tokens in moves:
        if name not in left:
            made = request(name, range(tokens + 1), tenant=tenant)
            book.add_request(made)
            left[name], of[name] = tokens + 1, made
        elif tokens % 7 == 0:
            book.remove_request(of[name])
            del left[name]
        else:
            left[name] = min(tokens, len(of[name].prompt))
            book.set_remaining(of[name], left[name])
        assert (book.total.requests, book.total.tokens) == (len(left), sum(left.values()))
        for one in (b"", b"x", b"y"):
            mine = [n for name, n in left.items() if of[name].tenant == one]
            assert (book.of_tenant(one).requests, book.of_tenant(one).tokens) == (
                len(mine),
                sum(mine),
            )
            assert book.of_tenant(one).tokens_before(1 << 20) == sum(mine)


def test_a_tenant_waits_for_as_much_of_others_as_it_gets_itself():
    book = PrefillBacklog()
    for i in range(100):
        book.add_request(request(f"a{i}", range(1000), tenant=b"a"))
    assert book.tokens_ahead(b"a", 1.0, 1000) == 100_000
    assert book.tokens_ahead(b"b", 1.0, 1000) == 1000
    assert book.tokens_ahead(b"b", 4.0, 1000) == 250


def test_a_short_prompt_waits_for_a_share_of_a_long_one():
    book = PrefillBacklog()
    book.add_request(request("long", range(30_000)))
    assert book.tokens_ahead(b"", 1.0, 300) == 100
    assert book.tokens_ahead(b"", 1.0, 60_000) == 30_000
