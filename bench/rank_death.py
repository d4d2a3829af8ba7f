"""A rank of a served model is killed under streams: seconds until they continue, and what is lost.

    python bench/rank_death.py MODEL [--streams 8] [--tokens 400] [--serve '-tp 2 --load-format dummy']

Runs the streams once undisturbed and once with kill -9 of rank 1 in the middle. One JSON line: the
longest pause of a stream beside that of the first run; the streams that have not as many tokens as
requested; and those whose text differs, of which some are expected in bfloat16: what a new engine
computes again is rounded otherwise.
"""

import argparse
import http.client
import json
import os
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


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_until_ready(port, server, limit_s=300):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server has ended"
        with suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise TimeoutError("the server is not ready")


def stream(port, name, number, tokens, note):
    """Read one stream; note(number, text) is called for each chunk. Returns its text, and its number of tokens."""
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


def rank_pid(number, server):
    """Return the process of a rank, of a server that this process has started."""
    for child in psutil.Process(server).children(recursive=True):
        if child.name() == f"quire-rank-{number}":
            return child.pid
    raise LookupError(f"there is no rank {number}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--serve", default="-tp 2 --load-format dummy --max-model-len 4096")
    a = parser.parse_args()
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        a.model,
        "--port",
        str(port),
        *shlex.split(a.serve),
    ]
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        wait_until_ready(port, server)
        name = a.model
        run(port, name, a)
        want, usual = run(port, name, a)
        kill = lambda: os.kill(rank_pid(1, server.pid), signal.SIGKILL)  # noqa: E731
        found, pause = run(port, name, a, at=a.tokens // 3, act=kill)
        differ = sum(one != other for (one, _), (other, _) in zip(found, want))
        lost = sum(count != a.tokens for _, count in found)
        line = {"model": Path(a.model).name, "serve": a.serve, "streams": a.streams,
                "usual longest pause s": round(usual, 3), "pause s": round(pause, 2),
                "streams that lost tokens": lost, "streams that differ": differ, "goal s": GOAL_S,
                "met": pause <= GOAL_S and not lost}  # fmt: skip
        print(json.dumps(line), flush=True)
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
