"""After ready nothing is imported by the threads that answer: first requests are not slow."""

import logging
import os
import threading

import httpx
import psutil
import pytest

from quire.server.process.api_process import compile_templates
from tests.server.first_requests import FLAGS, requests_of
from tests.server.running import SMALL, serving, wait_until

HOOK = """
import os, sys, threading

folder, files = os.environ["IMPORT_LOG"], {}

def hook(event, args):
    if event == "import" and threading.current_thread() is threading.main_thread():
        pid = os.getpid()
        if pid not in files:
            files[pid] = os.open(f"{folder}/{pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(files[pid], f"{args[0]}\\n".encode())

sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server whose processes write the names of what their main threads import."""
    folder, hook = tmp_path_factory.mktemp("log"), tmp_path_factory.mktemp("hook")
    (hook / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": path, "IMPORT_LOG": str(folder)}
    with serving("embedded", *SMALL, *FLAGS, forked=False, **environment) as running:
        threading.Thread(target=running.process.stdout.read, daemon=True).start()
        running.import_log = folder
        yield running


def workers(running, module):
    children = psutil.Process(running.process.pid).children(recursive=True)
    return [one for one in children if module in " ".join(one.cmdline())]


@pytest.mark.slow("a server of its own, and a request of each kind")
def test_first_requests_import_nothing_on_the_threads_that_answer(running):
    for module in ("grammar_setup", "render_worker"):  # without any request
        assert wait_until(lambda module=module: workers(running, module), 60), module
    logs = [running.import_log / str(one.pid) for one in (running.engine, *running.api)]
    for log in logs:
        log.touch()  # a process that has imported nothing has written none
    read = lambda: [len(log.read_text().splitlines()) for log in logs]  # noqa: E731
    before, found = read(), {}
    with httpx.Client(base_url=running.url, timeout=120) as http:
        for kind, method, path, body in requests_of("France"):
            got = http.request(method, path, json=body)
            status = {"a wrong field": 400, "no such route": 404}.get(kind, 200)
            assert got.status_code == status, (kind, got.text)
            now = read()
            for log, old, new in zip(logs, before, now):
                if new > old:
                    found[kind] = log.read_text().splitlines()[old:]
            before = now
    assert not found


class Templates:
    """Has the interface of a tokenizer that compile_templates() uses."""

    def __init__(self, tokenizer, **named):
        self.templates = type(tokenizer.templates)(named)
        self.template = lambda name: self.templates.get(self.templates.select(name), {})


def test_all_templates_of_a_tokenizer_are_compiled_before_ready(tokenizer, caplog):
    one = Templates(tokenizer, default="{{ 1 }}", tool_use="{{ 2 }}", broken="{% if %}")
    with caplog.at_level(logging.WARNING):
        compile_templates(one, None)
    assert len(one.templates._compiled) == 2
    assert "'broken' will fail" in caplog.text
