"""Where the time of an HTTP request went: each delay is found under its own name, and all sum up."""

import asyncio

import pytest

from quire.core.params import SamplingParams
from quire.core.sequence_timing import SequenceTiming
from quire.core.types import Request, StopConditions, Update
from quire.server.telemetry.request_timer import RequestTimer, wrap_send
from quire.text.input_processor import PreparedRequest

NAMES = ("prepare", "transport", "inbox", "grammar", "queue", "prefill", "others")
NAMES += ("preempted", "decode", "engine_other", "compile", "recovery", "detokenize", "client")


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


def prepared(name="r", n=1):
    request = Request(name, (1, 2), StopConditions(9), n=n)
    return PreparedRequest(request, "hi", SamplingParams(n=n))


def timing(accepted_at, queue=0.5, prefill=1.0, decode=2.0, step_before=None):
    ended_at = accepted_at + queue + prefill + decode
    first = accepted_at + queue + prefill
    cuts = (0.0, queue, prefill, 0.0, 0.0, decode, 0.0, 0.0)
    return SequenceTiming(accepted_at, ended_at, first, *cuts, step_before=step_before)


def update(told, index=0, name="r", tokens=(7,)):
    return Update(name, index, list(tokens), timing=told)


class Scene:
    """A request that came at 50, was handed over a second later and accepted another one later."""

    def __init__(self, *requests, sink=None):
        self.clock = Clock()
        self.watch = RequestTimer(50.0, {}, sink, self.clock)
        self.watch.enable()
        self.clock.now += 1.0
        self.watch.record_submitted("public", requests or (prepared(),))
        self.clock.now += 1.0

    def after(self, seconds):
        self.clock.now += seconds
        return self.watch

    def send(self, seconds):
        async def send(message):
            self.clock.now += seconds

        asyncio.run(self.watch.send_timed(send, {"type": "http.response.body"}))

    def shown(self):
        found = self.watch.breakdown()
        assert sum(found[f"{name}_s"] for name in NAMES) == pytest.approx(found["total_s"])
        return {name: found[f"{name}_s"] for name in NAMES if found[f"{name}_s"]}


ENGINE = {"prepare": 1.0, "transport": 1.0, "queue": 0.5, "prefill": 1.0, "decode": 2.0}


def test_what_the_engine_says_is_told_between_preparing_and_the_end():
    scene = Scene()
    scene.after(3.5).record_updates([update(timing(52.0))])
    assert scene.shown() == ENGINE


def test_a_late_delivery_is_transport():
    scene = Scene()
    scene.after(3.5 + 2.0).record_updates([update(timing(52.0))])
    assert scene.shown() == ENGINE | {"transport": 3.0}


@pytest.mark.parametrize(
    ("step", "inbox"),
    [((40.0, 50.5), 0.0), ((40.0, 51.75), 0.75), ((51.25, 51.75), 0.5), ((51.5, 53.0), 0.5)],
)
def test_the_part_of_the_way_in_which_a_step_was_made_is_inbox(step, inbox):
    scene = Scene()
    scene.after(3.5).record_updates([update(timing(52.0, step_before=step))])
    want = ENGINE | {"transport": 1.0 - inbox} | ({"inbox": inbox} if inbox else {})
    assert scene.shown() == want


def test_text_work_after_the_end_is_detokenize():
    scene = Scene()
    scene.after(3.5).record_updates([update(timing(52.0))])
    scene.after(4.0)
    assert scene.shown() == ENGINE | {"detokenize": 4.0}


def test_text_work_of_the_turn_before_that_held_up_the_last_one_counts_too():
    scene = Scene()
    scene.after(3.0).record_updates([update(None)])
    scene.after(2.0).record_updates([update(timing(52.0))])  # the engine was done 1.5 s ago
    assert scene.shown() == ENGINE | {"detokenize": 1.5}


def test_a_client_that_takes_its_time_after_the_end_is_client():
    scene = Scene()
    scene.after(3.0).record_updates([update(None)])
    scene.send(5.0)  # the engine was done 4.5 s ago
    scene.watch.record_updates([update(timing(52.0))])
    assert scene.shown() == ENGINE | {"client": 4.5}


def test_text_work_and_sending_while_the_engine_works_cost_nothing():
    scene = Scene()
    scene.after(0.5).record_updates([update(None)])
    scene.clock.now += 0.5
    scene.send(0.5)
    scene.after(2.0).record_updates([update(timing(52.0))])
    assert scene.shown() == ENGINE


def test_waiting_is_neither_text_nor_client():
    scene = Scene()
    scene.after(1.0).record_updates([update(None)])
    scene.watch.record_waiting()
    scene.after(4.5).record_updates([update(timing(52.0))])
    assert scene.shown() == ENGINE | {"transport": 3.0}


def test_the_choice_that_ended_last_is_told_and_all_of_them_are_listed():
    scene = Scene(prepared("a", n=2), prepared("b"))
    scene.after(3.5).record_updates(
        [update(timing(52.0), 1, "a"), update(timing(52.0, decode=1.0), 0, "b")]
    )
    assert scene.shown() == ENGINE
    choices = scene.watch.breakdown()["choices"]
    assert [(one["index"], one["decode_s"]) for one in choices] == [(1, 2.0), (2, 1.0)]


def test_nothing_is_shown_before_the_engine_has_said_anything():
    assert Scene().watch.breakdown() is None
    assert RequestTimer(50.0, {}).breakdown() is None


def test_metrics_have_the_names_that_clients_know():
    scene = Scene()
    scene.after(3.5).record_updates([update(timing(52.0), tokens=(1, 2, 3, 4, 5))])
    assert scene.watch.latency_metrics() == {
        "time_to_first_token_ms": 1000.0,
        "generation_time_ms": 2000.0,
        "queue_time_ms": 500.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 2.5,
    }


def test_metrics_of_one_token_have_no_rate():
    scene = Scene()
    scene.after(3.5).record_updates([update(timing(52.0, decode=0.0))])
    found = scene.watch.latency_metrics()
    assert (found["mean_itl_ms"], found["tokens_per_second"]) == (None, None)


def test_metrics_are_of_one_choice_only():
    scene = Scene(prepared(n=2))
    scene.after(3.5).record_updates([update(timing(52.0), 0), update(timing(52.0), 1)])
    assert scene.watch.latency_metrics() is None


class Sent:
    def __init__(self):
        self.messages = []

    async def __call__(self, message):
        self.messages.append(message)


def test_the_sender_passes_everything_on_and_tells_of_the_beginning():
    sent, began, watch = Sent(), [], RequestTimer(0.0, {})
    send = wrap_send(watch, sent, began.append)
    messages = [{"type": "http.response.start", "status": 201}, {"type": "http.response.body"}]

    async def run():
        await send(messages[0])
        watch.enable()
        await send(messages[1])

    asyncio.run(run())
    assert sent.messages == messages
    assert began == messages[:1]
    assert [kind for kind, *_ in watch._intervals] == ["prepare", "send"]
