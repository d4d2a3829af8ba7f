"""A rank of a served model fails: seconds until streams continue, what is lost, and what is left.

    python bench/rank_death.py MODEL [--faults kill,stop,capture] [--seconds 110]
                               [--streams 8] [--tokens 400] [--serve '-tp 2 --load-format dummy']

kill, stop: one server. Its streams run once undisturbed, then with SIGKILL of rank 1 in the middle,
then with SIGSTOP for 30 s. capture: SIGKILL while another server captures its graphs; it must end, with
the rank's name. One JSON line each: the longest pause of a stream beside that of the first run; the
streams that have not as many tokens as requested; and those whose text differs, of which some are
expected in bfloat16: what a new engine computes again is rounded otherwise. The last line has what
is left afterwards: processes, and MiB on each GPU more than before. --seconds: nothing is begun later
than this.
"""

import argparse
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

GOAL_S = 8.0
STOPPED_S = 30.0
LEFT_MIB = 64
"""Of a GPU's memory that may be left: its figures are rounded."""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def used_mib():
    """MiB in use on each GPU; [] without any."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(one) for one in found.stdout.split()]


class Server:
    """`quire serve` in a process of its own. Its log goes to stderr, and its last lines are kept."""

    def __init__(self, a):
        self.port, self.lines, self.capturing = free_port(), [], threading.Event()
        command = [sys.executable, "-m", "quire", "serve", a.model, "--port", str(self.port),
                   *shlex.split(a.serve)]  # fmt: skip
        env = {**os.environ, "QUIRE_LOGGING_LEVEL": "DEBUG"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True, env=env)  # fmt: skip
        self.children = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines = [*self.lines[-200:], line.rstrip()]
            if "captures its graphs" in line:
                self.capturing.set()
            if " DEBUG " not in line:
                sys.stderr.write(line)

    def wait_until_ready(self, limit_s=300):
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the server has ended"
            with suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError("the server is not ready")

    def rank_pid(self, number):
        """Return the process of a rank. All processes that it has now are kept: see left()."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.children[child.pid] = child
        for child in self.children.values():
            with suppress(psutil.NoSuchProcess):
                if child.name() == f"quire-rank-{number}":
                    return child.pid
        raise LookupError(f"there is no rank {number}")

    def end(self):
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.children[child.pid] = child
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)

    def left(self):
        """Names of its processes that still run."""
        names = []
        for one in self.children.values():
            with suppress(psutil.NoSuchProcess):
                if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                    names.append(one.name())
        return names


def stream(port, name, number, tokens, note):
    """Read one stream; note(number) is called for each chunk. Returns its text, and its number of tokens."""
    body = {"model": name, "prompt": f"Stream {number}:", "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True},
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"Content-Type": "application/json"})  # fmt: skip
    response, parts, count = connection.getresponse(), [], 0
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                parts.append(choice["text"])
                note(number)
    return "".join(parts), count


def run(port, name, a, at=None, act=None):
    """Run all streams. act: called once, when the first stream has `at` chunks. Returns the texts
    and the longest pause of any stream."""
    last, longest, counts = {}, [0.0], [0]
    texts = [("", 0)] * a.streams

    def note(number):
        now = time.monotonic()
        if number in last:
            longest[0] = max(longest[0], now - last[number])
        last[number] = now
        if number == 0:
            counts[0] += 1
            if act is not None and counts[0] == at:
                act()

    def read(number):
        texts[number] = stream(port, name, number, a.tokens, note)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(a.streams)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return texts, longest[0]


def fail_rank(server, fault):
    pid = server.rank_pid(1)
    if fault != "stop":
        os.kill(pid, signal.SIGKILL)
        return
    rank = psutil.Process(pid)
    rank.suspend()

    def go_on():
        with suppress(psutil.NoSuchProcess):
            rank.resume()

    timer = threading.Timer(STOPPED_S, go_on)
    timer.daemon = True
    timer.start()


def streams_with_faults(a, faults, began):
    """Yield a line for each fault of one server. Returns the server, ended."""
    server = Server(a)
    try:
        server.wait_until_ready()
        run(server.port, a.model, a)
        want, usual = run(server.port, a.model, a)
        for fault in faults:
            if time.monotonic() - began > a.seconds:
                yield {"fault": fault, "status": "not run: no time is left"}
                continue
            act = lambda fault=fault: fail_rank(server, fault)  # noqa: E731
            found, pause = run(server.port, a.model, a, at=a.tokens // 3, act=act)
            differ = sum(one != other for (one, _), (other, _) in zip(found, want))
            lost = sum(count != a.tokens for _, count in found)
            yield {"fault": fault, "streams": a.streams, "usual longest pause s": round(usual, 3),
                   "pause s": round(pause, 2), "streams that lost tokens": lost,
                   "streams that differ": differ, "goal s": GOAL_S,
                   "met": pause <= GOAL_S and not lost}  # fmt: skip
    finally:
        server.end()
    return server


def capture_with_fault(a):
    """Yield a line: a rank is killed while the server captures. Returns the server, ended."""
    server = Server(a)
    try:
        if not server.capturing.wait(120):
            raise TimeoutError("the server has captured no graphs")
        time.sleep(0.3)  # some are captured
        fail_rank(server, "capture")
        killed = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(30)
        took = time.monotonic() - killed
        named = [one for one in server.lines if re.search(r"rank 1 \(.*killed by signal 9", one)]
        status = server.process.poll()
        yield {"fault": "capture", "ended after s": round(took, 2), "status": status,
               "message": named[-1][-200:] if named else None, "goal s": GOAL_S,
               "met": bool(status) and bool(named) and took <= GOAL_S}  # fmt: skip
    finally:
        server.end()
    return server


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--faults", default="kill,stop,capture")
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--serve", default="-tp 2 --load-format dummy --max-model-len 4096")
    a = parser.parse_args()
    began, faults = time.monotonic(), a.faults.split(",")
    base = {"model": Path(a.model).name, "serve": a.serve}

    def say(line):
        print(json.dumps(base | line), flush=True)

    def say_all(lines):
        while True:
            try:
                say(next(lines))
            except StopIteration as end:
                return end.value

    before, servers = used_mib(), []
    if in_streams := [one for one in faults if one != "capture"]:
        servers.append(say_all(streams_with_faults(a, in_streams, began)))
    if "capture" in faults:
        servers.append(say_all(capture_with_fault(a)))
    time.sleep(1)  # the driver frees what ended processes had
    more = [now - then for now, then in zip(used_mib(), before)]
    processes = [name for one in servers for name in one.left()]
    met = not processes and max(more, default=0) <= LEFT_MIB
    say({"left": "afterwards", "processes": processes, "MiB more than before": more, "met": met})


if __name__ == "__main__":
    main()
