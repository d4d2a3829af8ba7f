"""An engine that hangs is found, by probes within five seconds, and its streams go on elsewhere."""

import asyncio
import collections
import signal
import threading
import time

import httpx
import pytest

from tests import tiers
from tests.faults.arming import Fault
from tests.faults.serve import serving
from tests.server.running import SMALL, wait_until
from tests.server.test_survive import Scene, asked, engine_of

STREAMS = 8
QUICK = (
    *("--watchdog-seconds", 3, "--canary-interval", 1, "--max-engine-restarts", 1000),
    "--enable-prompt-embeds",  # of tests.server.test_survive.asked
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The server, its faults, and its log as far as it has come."""
    kept = ("--flight-recorder-dir", tmp_path_factory.mktemp("recordings"))
    with serving("embedded", *SMALL, *QUICK, *kept, "--engine-standby") as (server, faults):
        log = collections.deque(maxlen=2000)
        reader = threading.Thread(target=lambda: log.extend(server.process.stdout))
        reader.start()
        yield server, faults, log
        server.process.kill()
        reader.join(60)


@pytest.fixture(scope="module")
def want(served):
    found, _ = asyncio.run(Scene(served[0].url).all([asked(i) for i in range(STREAMS)]))
    return found


def not_ready(url):
    """The reason of /ready once it is not 200."""
    began = time.monotonic()
    while time.monotonic() - began < 60:
        found = httpx.get(f"{url}/ready")
        if found.status_code != 200:
            return found.json()["reason"]
        time.sleep(0.02)
    raise AssertionError("it is ready all the time")


def stop(server, faults):
    engine_of(server).send_signal(signal.SIGSTOP)


def arm(point):
    def disturb(server, faults):
        faults.arm(Fault(point, "hang"))

    disturb.__name__ = point
    return disturb


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "disturb", [stop, arm("compute"), *tiers.long(arm("plan"))], ids=lambda f: f.__name__
)
def test_streams_go_on_when_their_engine_hangs(served, want, disturb):
    """Stopped by a signal; the device's thread hangs; the scheduler does."""
    server, faults, log = served
    log.clear()
    before = engine_of(server).pid

    async def hang(scene):
        while scene.chunks < 40:
            await asyncio.sleep(0.001)
        disturb(server, faults)
        return await asyncio.to_thread(not_ready, server.url)

    found, reason = asyncio.run(Scene(server.url).all([asked(i) for i in range(STREAMS)], hang))
    assert found == want
    assert reason in ("stopped", "stalled", "gone", "restarting")
    assert engine_of(server).pid != before
    said = "".join(log)
    assert "the engine makes no progress" in said
    if disturb is not stop:
        assert 'File "arming.py"' in said
        assert "in run_step" in said
    assert wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 60)
    assert httpx.get(f"{server.url}/startup").status_code == 200


def test_a_canary_that_hangs_is_found(served):
    server, faults, _ = served
    before = engine_of(server).pid
    faults.arm(Fault("compute", "hang"))  # nobody asks for anything
    assert not_ready(server.url) in ("stalled", "gone", "restarting")
    assert wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 60)
    assert engine_of(server).pid != before


def test_a_canary_that_fails_is_a_death(served):
    server, faults, _ = served
    before = engine_of(server).pid
    faults.arm(Fault("compute", "raise"))
    assert not_ready(server.url) in ("restarting", "gone")
    assert wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 60)
    assert engine_of(server).pid != before


def test_steps_that_become_slow_are_no_hang(served):
    """Each takes longer than the last, up to the limit of the watchdog and beyond."""
    server, faults, _ = served
    before = engine_of(server).pid
    body = {"model": "embedded", "prompt": "a", "max_tokens": 6, "temperature": 0}
    want = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    slow = [Fault("compute", "sleep", at=i + 1, seconds=s) for i, s in enumerate((0.3, 0.9, 2.4))]
    faults.arm(*slow)
    got = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert faults.fired == 3
    assert got == want
    assert engine_of(server).pid == before
