"""Admission control: exact limits, limits per tenant, deadlines, and the TTFT estimate."""

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
from tests.pure.core.builders import request, sequence


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def admit(admission, name, tokens=10, **fields):
    req = request(name, range(tokens), **fields)
    admission.check_batch([req])
    admission.add_request(req)
    return req


def compute(admission, req, *counts):
    """Run steps that compute so many tokens of the prompt each. Returns its sequence."""
    seq = sequence(prompt=req.prompt)
    seq.request = req
    for n in counts:
        admission.begin_step(1)
        admission.take(seq, n)
        seq.planned += n
    return seq


def refused(admission, name, tokens=10, **fields):
    with pytest.raises(Overloaded) as caught:
        admission.check_batch([request(name, range(tokens), **fields)])
    assert caught.value.reason in REJECT_REASONS
    assert 1 <= caught.value.retry_after_s <= 60
    return caught.value


# -- bounds of the queue -----------------------------------------------------------------------


def test_requests_are_admitted_up_to_max_requests(clock):
    admission = AdmissionControl(max_requests=2, clock=clock)
    first = admit(admission, "a")
    admit(admission, "b")
    error = refused(admission, "c")
    assert (error.reason, error.numbers["queued_requests"]) == ("max_num_queued_reqs", 2)
    assert error.numbers["max_queued_requests"] == 2
    assert "at most 2" in str(error)
    admission.remove_request(first)
    admit(admission, "c")


def test_queued_tokens_count_until_they_are_computed(clock):
    admission = AdmissionControl(max_tokens=25, clock=clock)
    first = admit(admission, "a")
    admit(admission, "b")
    error = refused(admission, "c")
    assert (error.reason, error.numbers["queued_tokens"]) == ("max_num_queued_tokens", 20)
    seq = compute(admission, first, 5)
    admit(admission, "c")
    refused(admission, "d", 1)
    admission.undo(seq, 0)
    compute(admission, first, 5)
    admission.remove_request(first)
    refused(admission, "d", 6)


def test_a_single_prompt_may_exceed_max_queued_tokens(clock):
    admission = AdmissionControl(max_tokens=5, clock=clock)
    admit(admission, "a", 100)
    refused(admission, "b", 1)


def test_forks_and_resumed_requests_are_always_admitted(clock):
    admission = AdmissionControl(max_requests=1, max_tokens=1, clock=clock)
    admit(admission, "a")
    admit(admission, "b", parent="a")
    admit(admission, "c", resumed_tokens=((1,),))
    assert admission.stats().requests == 3


def test_a_request_counts_as_n_and_a_body_as_all_its_prompts(clock):
    admission = AdmissionControl(max_requests=4, clock=clock)
    first = admit(admission, "a", num_beams=3)
    assert admission.stats().requests == 3
    refused(admission, "b", n=2)
    with pytest.raises(
        Overloaded, match="3 requests are active and 2 more were sent, and at most 4"
    ):
        admission.check_batch([request("b"), request("c")])
    admit(admission, "d")
    admission.remove_request(first)
    assert admission.stats().requests == 1
    admission.check_batch([request("b"), request("c", n=2)])


def test_a_batch_that_never_fits_raises_request_error(clock):
    for admission, fields in (
        (AdmissionControl(max_requests=4, clock=clock), {}),
        (AdmissionControl(clock=clock), {"tenant_limits": TenantLimits(max_requests=4)}),
    ):
        with pytest.raises(RequestError, match=r"has 5 requests.* 4 requests") as caught:
            admission.check_batch([request("a", n=5, **fields)])
        assert caught.value.param == "n"
        with pytest.raises(RequestError, match=r"has 5 requests.* 4 requests") as caught:
            admission.check_batch([request("a", num_beams=5, **fields)])
        assert caught.value.param == "n"
        with pytest.raises(RequestError) as caught:
            admission.check_batch([request(str(i), **fields) for i in range(5)])
        assert caught.value.param == "prompt"


def test_prompts_of_one_body_may_exceed_token_limits_together(clock):
    """Otherwise each prompt would always be refused behind the others."""
    for admission, fields in (
        (AdmissionControl(max_tokens=15, clock=clock), {}),
        (AdmissionControl(clock=clock), {"tenant_limits": TenantLimits(max_queued_tokens=15)}),
        (AdmissionControl(clock=clock), {"tenant_limits": TenantLimits(tokens_per_minute=15)}),
    ):
        body = [request(str(i), range(10), tenant=b"a", **fields) for i in range(3)]
        admission.check_batch(body)
        for one in body:
            admission.add_request(one)
        with pytest.raises(Overloaded):
            admission.check_batch(body)


# -- limits of a tenant ------------------------------------------------------------------------


def test_tenant_limits_apply_to_that_tenant_only(clock):
    admission = AdmissionControl(clock=clock)
    tenant_fields = {
        "tenant": b"a",
        "tenant_limits": TenantLimits(max_requests=1, max_queued_tokens=15),
    }
    first = admit(admission, "a", **tenant_fields)
    error = refused(admission, "b", **tenant_fields)
    assert (error.reason, error.numbers["key_requests"]) == ("key_requests", 1)
    admit(admission, "c", tenant=b"b", tenant_limits=TenantLimits(max_queued_tokens=15))
    assert refused(
        admission, "d", tenant=b"b", tenant_limits=TenantLimits(max_queued_tokens=15)
    ).reason == ("key_queued_tokens")
    admission.remove_request(first)
    admit(admission, "b", **tenant_fields)


def test_the_token_bucket_refills_with_time(clock):
    admission = AdmissionControl(clock=clock)
    tenant_fields = {"tenant": b"a", "tenant_limits": TenantLimits(tokens_per_minute=60)}
    admit(admission, "a", 40, **tenant_fields)
    error = refused(admission, "b", 40, **tenant_fields)
    assert (error.reason, error.retry_after_s) == ("key_tokens_per_minute", 20.0)
    assert error.numbers["key_tokens_left"] == 20
    clock.now += 19
    assert refused(admission, "b", 40, **tenant_fields).retry_after_s == 1.0
    clock.now += 1
    admit(admission, "b", 40, **tenant_fields)


def test_generated_tokens_may_make_the_bucket_negative(clock):
    admission = AdmissionControl(clock=clock)
    tenant_fields = {"tenant": b"a", "tenant_limits": TenantLimits(tokens_per_minute=60)}
    req = admit(admission, "a", 50, **tenant_fields)
    seq = compute(admission, req, 50)
    seq.tokens += [7] * 40
    seq.state = SequenceState.FINISHED
    assert refused(admission, "b", 10, **tenant_fields).retry_after_s == 40.0
    assert admission.stats().tenants[b"a".hex()].generated_tokens == 40


def test_a_prompt_above_the_bucket_size_is_admitted_by_a_full_bucket(clock):
    admission = AdmissionControl(clock=clock)
    tenant_fields = {"tenant": b"a", "tenant_limits": TenantLimits(tokens_per_minute=60)}
    admit(admission, "a", 500, **tenant_fields)
    assert refused(admission, "b", 1, **tenant_fields).retry_after_s == 60.0


# -- deadlines and the prediction --------------------------------------------------------------


def test_a_deadline_before_the_predicted_ttft_is_refused(clock):
    admission = AdmissionControl(most=100, clock=clock)
    for _ in range(20):
        admission.observe_step(100, 1.0)
    admit(admission, "a", 1000)
    error = refused(admission, "b", 1000, deadline_at=clock.now + 5)
    assert error.reason == "deadline"
    assert error.numbers["predicted_ttft_s"] == pytest.approx(20, rel=0.2)
    assert error.numbers["deadline_s"] == 5
    admit(admission, "b", 1000, deadline_at=clock.now + 40)


def test_no_deadline_is_refused_before_the_first_step(clock):
    admit(AdmissionControl(clock=clock), "a", deadline_at=clock.now + 0.001)


def test_refusals_are_counted_by_reason_and_tenant(clock):
    admission = AdmissionControl(max_requests=1, clock=clock)
    admit(admission, "a")
    for _ in range(3):
        refused(admission, "b", tenant=b"x")
    assert admission.stats().refused == {"max_num_queued_reqs": 3}
    assert admission.stats().tenants[b"x".hex()].refused == 3


def steps_of(tokens, most, fixed_s, token_s):
    """Yield (tokens, seconds) of the steps of a prompt on a device with these costs."""
    while tokens > 0:
        n = min(tokens, most)
        yield n, fixed_s + n * token_s
        tokens -= n


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.005, 20e-6), (0.0, 1e-3), (0.05, 1e-5)])
@pytest.mark.parametrize("tokens", [10, 1000, 20_000, 500_000])
def test_the_estimate_is_close_for_a_steady_device(fixed_s, token_s, tokens):
    estimator, rng = TTFTEstimator(2048), random.Random(1)
    for _ in range(40):
        for n, seconds in steps_of(rng.choice([50, 500, 3000, 9000]), 2048, fixed_s, token_s):
            estimator.observe_step(n, seconds, backlog=n == 2048)
    true = sum(seconds for _, seconds in steps_of(tokens, 2048, fixed_s, token_s))
    step = fixed_s + 2048 * token_s
    assert abs(estimator.estimate_seconds(tokens) - true) <= 0.25 * true + step


def test_a_slow_backlog_is_estimated_by_its_measured_rate():
    estimator = TTFTEstimator(2048)
    for _ in range(50):
        estimator.observe_step(2048, 0.04, backlog=True)
        for _ in range(9):
            estimator.observe_step(
                0, 0.04, backlog=True
            )  # no free slot: other requests have to end first
    assert estimator.estimate_seconds(20_480) == pytest.approx(4.0, rel=0.3)


def test_one_stalled_step_barely_changes_the_estimate():
    estimator = TTFTEstimator(2048)
    for _ in range(50):
        estimator.observe_step(1000, 0.02, backlog=False)
    estimator.observe_step(1000, 30.0, backlog=False)
    assert estimator.estimate_seconds(1000) < 0.1


# -- the book of what waits --------------------------------------------------------------------

moves = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from([b"", b"x", b"y"]), st.integers(0, 300)),
    max_size=40,
)


@given(moves)
def test_the_backlog_is_the_sum_of_remaining_tokens(moves):
    book, left, of = PrefillBacklog(), {}, {}
    for name, tenant, tokens in moves:
        if name not in left:
            req = request(name, range(tokens + 1), tenant=tenant)
            book.add_request(req)
            left[name], of[name] = tokens + 1, req
        elif tokens % 7 == 0:
            book.remove_request(of[name])
            del left[name]
        else:
            left[name] = min(tokens, len(of[name].prompt))
            book.set_remaining(of[name], left[name])
        assert (book.total.requests, book.total.tokens) == (len(left), sum(left.values()))
        for one in (b"", b"x", b"y"):
            tenant_fields = [n for name, n in left.items() if of[name].tenant == one]
            assert (book.of_tenant(one).requests, book.of_tenant(one).tokens) == (
                len(tenant_fields),
                sum(tenant_fields),
            )
            assert book.of_tenant(one).tokens_before(1 << 20) == sum(tenant_fields)


def test_tokens_ahead_of_other_tenants_are_at_most_equal_service():
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
