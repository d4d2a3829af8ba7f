"""`quire serve` on the embedded model, as a process of its own, for clients as people use them.

One server for the whole run, with a key, so that every client must bring one.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import httpx
import pytest

from tests import fork_server

KEY = "a-key-of-the-tests"
MODEL = "embedded"
FLAGS = (
    *("--kv-cache-memory-bytes", "64MiB", "--api-key", "another-key", KEY),
    "--enable-prompt-embeds",
)


@dataclass
class Served:
    """Where the server is, and what it said."""

    process: subprocess.Popen
    url: str
    lines: list

    @property
    def v1(self):
        return f"{self.url}/v1"

    def running(self):
        """How many requests are in the engine."""
        return self._sum("num_requests_(?:running|waiting)")

    def generated(self):
        """How many tokens it has generated."""
        return self._sum("generation_tokens_total")

    def _sum(self, names):
        headers = {"Authorization": f"Bearer {KEY}"}
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=60).text
        found = re.findall(rf"^\w+:{names}\{{.*\}} (\S+)$", text, re.M)
        assert found, text[:2000]
        return sum(map(float, found))

    def wait_idle(self):
        deadline = time.monotonic() + 60
        while (running := self.running()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not running, f"{running} requests still run"


@pytest.fixture(scope="session")
def served():
    command = [sys.executable, "-m", "quire", "serve", MODEL, "--port", "0", *FLAGS]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    fork_server.start()
    process = fork_server.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    lines = []
    try:
        url = next(
            (found[0] for line in _kept(process.stdout, lines) if (found := _url(line))), None
        )
        assert url, "".join(lines)
        threading.Thread(target=list, args=(_kept(process.stdout, lines),), daemon=True).start()
        yield Served(process, url, lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "".join(lines[-30:])
        said = "".join(lines)
        assert "Traceback" not in said, said
    finally:
        process.kill()
        process.wait()


def _kept(stream, lines):
    for line in stream:
        lines.append(line)
        yield line


def _url(line):
    return re.search(r"http://[0-9.:]+", line) if line.startswith("  curl ") else None


@pytest.fixture(autouse=True)
def the_server_is_idle_again(request):
    """Whatever a client did, nothing of it goes on after the test."""
    yield
    if "served" in request.fixturenames:
        request.getfixturevalue("served").wait_idle()
