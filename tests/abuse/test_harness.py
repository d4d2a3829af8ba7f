"""The harness sees what it is there to see."""

import copy
import os
import signal
import time

import httpx
import pytest

from tests.abuse import dialects
from tests.abuse.harness import AUTH, BESIDE, CANARY, KEY, Answer, Case, Figures, quarrels

PLAIN = Case(id="plain", origin="-", expect="answered", everywhere=True)


def test_a_plain_request_is_answered_by_every_dialect_and_leaves_nothing(victim):
    with victim.unharmed():
        answers = victim.check([PLAIN])
    assert len(answers) == 11


def test_a_case_that_comes_to_something_else_is_told(victim):
    with pytest.raises(AssertionError, match="answered, not refused"):
        victim.check([Case(id="plain", origin="-", expect="refused")])
    with pytest.raises(AssertionError, match="refused, not answered"):
        victim.check([Case(id="n", origin="-", fields={"n": -1}, expect="answered")])


def answered(text, status=400, route=dialects.CHAT, case=PLAIN, seconds=0.1):
    return Answer(case, route, False, status, text, {}, seconds, b"{}")


FINE = '{"error":{"message":"n must be 1","type":"BadRequestError","param":"n","code":400}}'
BAD = Case(id="bad", origin="-", expect="refused")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no JSON", "no error of this dialect"),
        ('{"detail":"x"}', "no error of this dialect"),
        ('{"error":{"code":400}}', "without a message"),
        (FINE.replace("n must", "/usr/lib/x.so: n must"), "tells '/usr/l'"),
        (FINE.replace("n must", "<object at 0x7f12345678>"), "tells '0x7f12345678'"),
        (FINE.replace("n must", "Traceback (most"), "tells 'Traceback'"),
        (FINE.replace("n must", f"{CANARY} must"), "text of another user"),
        (FINE.replace("n must", f"{KEY} must"), "tells a key"),
        (FINE.replace("n must", "n" * 5000), "message of"),
    ],
)
def test_an_error_that_tells_too_much_is_found(text, says):
    found = answered(text, case=BAD).faults()
    assert any(says in one for one in found), found


def test_an_error_that_is_as_it_should_be_is_no_fault():
    assert not answered(FINE, case=BAD).faults()
    anthropic = '{"type":"error","error":{"type":"invalid_request_error","message":"n"}}'
    assert not answered(anthropic, route=dialects.MESSAGES, case=BAD).faults()
    assert answered(FINE, route=dialects.MESSAGES, case=BAD).faults()


def test_faults_of_the_server_and_lateness_are_found():
    assert "failed (500)" in answered(FINE, 500, case=BAD).faults()[0]
    assert "failed (0)" in answered("", 0, case=BAD).faults()[0]
    assert "took 9999.0 s" in " ".join(answered(FINE, case=BAD, seconds=9999).faults())


def test_dialects_that_differ_are_found_unless_the_case_says_why():
    either = Case(id="x", origin="-", expect="either")
    two = [answered(FINE, case=either), answered("{}", 200, dialects.COMPLETE, either)]
    assert quarrels(two)
    excused = Case(id="x", origin="-", expect="either", differs={dialects.COMPLETE: "answered"})
    assert not quarrels(
        [answered(FINE, case=excused), answered("{}", 200, dialects.COMPLETE, excused)]
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("pids", {"first": 2}), ("rss", {"first": 1 << 40}), ("fds", {"first": 9})),
        *(("threads", {"first": 9}), ("children", 9), ("listening", {"0.0.0.0:1"})),
        *(("files", {"left"}), ("held", 0.5), ("busy", 1.0), ("ready", 503)),
    ],
)
def test_whatever_is_not_as_it_was_is_harm(name, value):
    one = {"first": 1}
    before = Figures(one, one, one, one, 1, {"127.0.0.1:1"}, set(), 0.0, 0.0, 200)
    now = copy.deepcopy(before)
    assert not now.harm(before)
    setattr(now, name, value)
    assert len(now.harm(before)) == 1


def test_a_request_that_is_left_running_is_harm(victim):
    """And so is a file; both are seen by a server that is there."""
    before = victim.settled(victim.rest, growth=1 << 40)
    body = {**BESIDE, "max_tokens": 2000}
    with (
        httpx.Client(headers=AUTH, timeout=60) as client,
        client.stream("POST", f"{victim.url}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()  # kept: letting it go would close the stream
        next(lines)
        (victim.folder / "left").write_text("x")
        harm = " ".join(victim.figures().harm(before))
        assert "busy" in harm
        assert "held" in harm
        assert "files" in harm
    (victim.folder / "left").unlink()
    assert not victim.settled(before).harm(before)


def test_a_bystander_who_gets_another_text_is_harm(victim):
    victim.bystander.solo, solo = "something else", victim.bystander.solo
    try:
        with pytest.raises(AssertionError, match="became"), victim.bystander.beside():
            time.sleep(0.1)
    finally:
        victim.bystander.solo = solo
        victim.bystander.faults.clear()


def test_a_server_that_stands_still_is_found_by_the_bystander(victim):
    """Late but whole: what it says stays right, and the gap is on record."""
    engine = victim.running.engine
    victim.bystander.longest_gap_s = 0.0
    with victim.bystander.beside():
        os.kill(engine.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(engine.pid, signal.SIGCONT)
    assert victim.bystander.longest_gap_s > 0.3


def test_the_same_batch_again_and_again_does_not_grow_the_server(victim):
    """What a heap keeps it uses again: from the third time on memory stays."""
    cases = [
        Case(id="ids", origin="55", fields={"ids": [5] * 200_000}, routes=(dialects.COMPLETE,)),
        Case(id="bias", origin="55", fields={"logit_bias": {str(i): 1 for i in range(2000)}}),
        Case(id="text", origin="55", fields={"text": "a" * 100_000}, routes=dialects.GENERATING),
        Case(id="plain", origin="55", expect="answered"),
    ]
    sizes = []
    for _ in range(6):
        victim.check(cases)
        sizes.append(sum(victim.settled(victim.rest, growth=1 << 40).rss.values()))
    assert max(sizes[3:]) - max(sizes[:3]) < 24 << 20, [one >> 20 for one in sizes]
