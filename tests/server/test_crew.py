"""Several API processes: what one of them knows that others must, and one that hangs."""

import collections
import json
import random
import signal
import threading
import time
from contextlib import ExitStack

import httpx
import psutil
import pytest

from tests.faults.arming import Fault
from tests.faults.serve import serving
from tests.server.running import SMALL, wait_until
from tests.server.test_metrics import read
from tests.server.test_survive import LONG, engine_of, kill, lines_of

POISON, SLOW = 66_007, 66_008
WORDS = ("--api-server-count", 2, "--api-watchdog-seconds", 3, "--max-engine-restarts", 1000)


class Crew:
    """The server, and clients of which it is known who serves them."""

    def __init__(self, server, faults):
        self.server, self.faults = server, faults
        self.log = collections.deque(maxlen=2000)
        self._stack = ExitStack()
        self._clients = collections.defaultdict(list)  # by pid

    def pids(self):
        """The API processes, those included that have died just now."""
        children = psutil.Process(self.server.process.pid).children()
        return {one.pid for one in children if one.name() == "quire-api"}

    def clients(self, pid, count=1):
        """Some that have a connection each, to this process."""
        while len(self._clients[pid]) < count:
            client = self._stack.enter_context(httpx.Client(base_url=self.server.url, timeout=60))
            before = {pid: connections(pid) for pid in self.pids()}
            answer = client.get("/live")
            assert answer.status_code == 200
            if answer.headers.get("connection") == "close":
                continue  # one that starts: it keeps no connection
            for served in [one for one in before if connections(one) > before[one]]:
                self._clients[served].append(client)
        return self._clients[pid][:count]

    def forget(self, pid):
        """Use new connections to this process from now on."""
        self._clients.pop(pid)

    def close(self):
        self._stack.close()


def connections(pid):
    return sum(c.status == "ESTABLISHED" for c in psutil.Process(pid).net_connections("tcp"))


@pytest.fixture(scope="module")
def crew():
    with serving("embedded", *SMALL, *WORDS) as (server, faults):
        made = Crew(server, faults)
        reader = threading.Thread(target=lambda: made.log.extend(server.process.stdout))
        reader.start()
        yield made
        made.close()
        server.process.kill()
        reader.join(60)


@pytest.fixture(scope="module")
def condemned(crew):
    """A body that broke steps, and the process that was asked it."""
    crew.faults.arm(Fault("forward", seed=POISON, times=0))
    body = {"prompt": f"poison {random.random()}", "max_tokens": 4, "seed": POISON}
    asked = min(crew.pids())
    (client,) = crew.clients(asked)
    assert client.post("/v1/completions", json=body).status_code == 500
    crew.faults.clear()
    return body, asked


@pytest.mark.timeout(120)
def test_every_process_shows_the_counters_of_all(crew):
    url, body = crew.server.url, {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
    ended = "quire:request_success_total", ("finished_reason", "length")
    before = read(url)
    for client in [one for pid in crew.pids() for one in crew.clients(pid, 2)]:
        for _ in range(3):
            assert client.post("/v1/completions", json=body).status_code == 200
    for _ in range(8):  # a new connection each
        after = read(url)
        assert after[ended] - before.get(ended, 0) == 12
        tokens = ("quire:generation_tokens_total",)
        assert after[tokens] - before.get(tokens, 0) == 36


@pytest.mark.timeout(120)
def test_each_process_reports_the_load_of_the_engine_to_a_gateway(crew):
    asked = {"endpoint-load-metrics-format": "JSON"}
    first, second = sorted(crew.pids())
    (busy,), (other,) = crew.clients(first), crew.clients(second)
    crew.faults.arm(Fault("compute", "sleep", seconds=0.1, seed=SLOW, times=0))
    body = {**LONG, "stream": True, "seed": SLOW}  # its steps take so long that it does not end
    with busy.stream("POST", "/v1/completions", json=body, headers=asked) as stream:
        assert stream.headers["endpoint-load-metrics"].startswith("JSON ")
        lines = lines_of(stream)  # kept: without its reader the connection is closed
        next(lines)
        body = {"prompt": "a", "max_tokens": 1}
        got = other.post("/v1/completions", json=body, headers=asked)
    crew.faults.clear()
    crew.forget(first)  # its next connection may be the other's
    load = json.loads(got.headers["endpoint-load-metrics"].removeprefix("JSON "))
    assert load["named_metrics"]["kv_cache_usage_perc"] > 0
    assert load["named_metrics"]["num_requests_waiting"] == 0


@pytest.mark.timeout(120)
def test_what_one_process_has_condemned_another_refuses(crew, condemned):
    body, asked = condemned
    (other,) = crew.pids() - {asked}
    (client,) = crew.clients(other)
    while client.post("/v1/completions", json=body).status_code != 422:
        time.sleep(0.05)  # the engine's message is on its way
    assert client.post("/v1/completions", json={**body, "prompt": "a"}).status_code == 200


@pytest.mark.timeout(120)
def test_one_that_is_stopped_is_replaced_while_the_other_serves(crew, condemned):
    """What is lost are its connections. Its successor knows what is condemned."""
    server, (stopped, other) = crew.server, sorted(crew.pids())
    (lost,), (client, free) = crew.clients(stopped), crew.clients(other, 2)
    body = {**LONG, "stream": True}
    with (
        lost.stream("POST", "/v1/completions", json=body) as breaking,
        client.stream("POST", "/v1/completions", json=body) as going_on,
    ):
        broken, said = lines_of(breaking), lines_of(going_on)
        next(broken), next(said)
        psutil.Process(stopped).suspend()
        while stopped in crew.pids():
            assert [free.get(path).status_code for path in ("/live", "/ready")] == [200, 200]
            time.sleep(0.05)
        with pytest.raises(httpx.HTTPError):
            collections.deque(broken, 0)
        kill(engine_of(server))
        assert list(said)[-1]["choices"][0]["finish_reason"] == "length"
    assert "an API process makes no progress: its process is stopped" in "".join(crew.log)
    assert wait_until(lambda: len(crew.pids()) == 2, 60)
    (successor,) = crew.pids() - {other}
    (client,) = crew.clients(successor)
    assert client.post("/v1/completions", json=condemned[0]).status_code == 422
    for one in (client, free):
        assert one.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
