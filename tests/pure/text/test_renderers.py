"""Workers for untrusted chat templates: requests get errors when a worker fails."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from quire.engine.supervise.process_pipe import spawn_process
from quire.errors import EngineError, Overloaded, RequestError
from quire.sandbox import worker_pool
from quire.sandbox.tenant_turns import TenantShare
from quire.text.templates import render_pool
from quire.text.templates.render_pool import TemplateRenderPool

CALL = {"messages": [{"role": "user", "content": "hi"}]}
GOOD = "{% for m in messages %}{{ m.content }}!{% endfor %}"


class Agency:
    """Starts a worker of a kind for each word; the last word is repeated."""

    def __init__(self, *words):
        self.words = list(words)
        self.hired = 0

    def __call__(self):
        self.hired += 1
        word = self.words.pop(0) if len(self.words) > 1 else self.words[0]
        if word == "none":
            raise OSError("no process can be had")
        ours, theirs = socket.socketpair()
        with theirs:
            if word == "dead":
                return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]), ours
            if word == "deaf":
                fds = [os.dup(theirs.fileno())]
                try:
                    sleeps = [sys.executable, "-c", "import time; time.sleep(100)"]
                    return subprocess.Popen(sleeps, pass_fds=fds), ours
                finally:
                    os.close(fds[0])
            return spawn_process(__name__, theirs, [word]), ours


def main(fd, word):
    """A worker whose templates do as the word of their text."""
    from quire.text.templates import render_worker

    def render(shelf, job):
        if word == "sleeps":
            time.sleep(float(job.source))
            return render_worker.RenderResult(b"1")
        if word == "fails":
            raise ZeroDivisionError("a fault of ours")
        os.kill(os.getpid(), signal.SIGKILL if word == "is killed" else signal.SIGSEGV)

    if word != "works":
        render_worker._RecentTemplates.render = render
    return render_worker.main(fd)


@pytest.fixture
def having():
    made = []

    def having(*words):
        agency = Agency(*words)
        made.append(TemplateRenderPool(agency))
        return agency, made[-1]

    yield having
    for one in made:
        one.close()


def render(to, source=GOOD):
    return asyncio.run(to.render(source, {}, CALL, 1 << 20))


def start(to, seconds, tenant=b""):
    """In a loop: a job of a worker that sleeps."""
    return asyncio.ensure_future(to.render(str(seconds), {}, CALL, 1 << 20, TenantShare(tenant)))


def test_a_worker_that_dies_once_at_its_start_is_replaced(having):
    agency, to = having("dead", "works")
    assert render(to) == "hi!"
    assert agency.hired == 2


def test_workers_that_die_twice_at_start_are_an_internal_error_with_advice_in_the_log(
    having, caplog
):
    _, to = having("dead")
    with pytest.raises(EngineError, match="exit status 3"):
        render(to)
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert "its output has the reason" in said


def test_a_process_that_cannot_be_had_is_our_fault(having, caplog):
    _, to = having("none")
    with pytest.raises(EngineError, match="no process can be had"):
        render(to)
    assert [one.levelno for one in caplog.records] == [logging.ERROR]


def test_a_worker_that_does_not_start_in_time_is_reported_with_its_work(having, monkeypatch):
    monkeypatch.setattr(worker_pool, "STARTUP_TIMEOUT_S", 0.05)
    _, to = having("deaf")
    with pytest.raises(Overloaded, match="starts in"):
        render(to)


def test_a_template_that_ends_two_workers_is_at_fault(having):
    agency, to = having("crashes")
    with pytest.raises(RequestError, match="crashed, twice") as refused:
        render(to)
    assert refused.value.param == "chat_template"
    assert agency.hired == 2


def test_a_template_whose_workers_are_killed_from_outside_is_not_blocked(having):
    _, to = having("is killed")
    with pytest.raises(EngineError, match="killed, twice"):
        render(to)


def test_a_worker_error_is_internal_and_its_traceback_is_logged(having, caplog):
    agency, to = having("fails")
    for _ in range(2):
        with pytest.raises(EngineError, match="ZeroDivisionError: a fault of ours"):
            render(to)
    assert "in render" in caplog.text
    assert agency.hired == 1, "the worker goes on"


def test_what_python_refuses_of_a_template_is_the_templates_fault(having):
    _, to = having("works")
    loops = "".join(f"{{% for a{i} in [1] %}}" for i in range(30)) + "{% endfor %}" * 30
    with pytest.raises(RequestError, match="nested"):
        render(to, loops)


def test_a_prepared_pool_renders_the_first_template_in_the_worker_it_has(having):
    agency, to = having("works")
    to.prepare()
    while not to.idle_workers:
        time.sleep(0.01)
    assert render(to) == "hi!"
    assert agency.hired == 1


def test_a_worker_that_cannot_be_prepared_is_tried_again_by_the_first_template(having):
    agency, to = having("dead", "dead", "works")
    to.prepare()
    while agency.hired < 2:
        time.sleep(0.01)
    assert render(to) == "hi!"


@pytest.fixture
def one_worker(monkeypatch):
    monkeypatch.setattr(render_pool, "MAX_WORKERS", 1)


@pytest.mark.usefixtures("one_worker")
def test_a_job_of_another_tenant_waits_for_none_of_many(having, monkeypatch):
    agency, to = having("sleeps")
    monkeypatch.setattr(to._workers, "_max_waiting", 4)

    async def both():
        await asyncio.gather(*(start(to, 0.5, one) for one in (b"a", b"b")))  # workers start
        many = [start(to, 0.3, b"a") for _ in range(7)]
        await asyncio.sleep(0.05)
        await start(to, 0, b"b")
        done = [one for one in many if one.done() and not one.exception()]
        found = await asyncio.gather(*many, return_exceptions=True)
        return len(done), [isinstance(one, Overloaded) for one in found]

    done, refused = asyncio.run(both())
    assert done <= 1
    assert refused == [False] * 5 + [True] * 2, "what a tenant refuses itself is no other's"
    assert agency.hired == 2


@pytest.mark.usefixtures("one_worker")
def test_jobs_whose_callers_leave_never_run_or_end_soon(having):
    agency, to = having("sleeps")

    async def cancelled():
        running, waiting = start(to, 7.9), start(to, 7.9)
        await asyncio.sleep(1)
        running.cancel()
        waiting.cancel()
        began = time.monotonic()
        await start(to, 0)
        return time.monotonic() - began

    assert asyncio.run(cancelled()) < 5
    assert agency.hired == 2, "a worker ends with its job, and the next begins"


@pytest.mark.usefixtures("one_worker")
def test_a_pool_that_closes_ends_what_waits(having):
    _, to = having("sleeps")

    async def closed():
        jobs = [start(to, 0.2) for _ in range(3)]
        await asyncio.sleep(0.05)
        to.close()
        return await asyncio.gather(*jobs, return_exceptions=True)

    found = asyncio.run(closed())
    assert [isinstance(one, asyncio.CancelledError) for one in found] == [False, True, True]
    with pytest.raises(EngineError, match="have been ended"):
        render(to)
