"""Seconds from typing `quire serve` to the first useful answer, by what happens between.

The embedded model, a client that asks again every few milliseconds as a waiting person's script
does. Lines: the port takes connections, /ready is 200, the first whole answer, the second one.

usage: python bench/first_answer.py [--rounds 5] [flags of quire serve ...]
"""

import argparse
import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import time

ASK = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
GIVE_UP_S = 120


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def ask(port, method, path, body=None):
    """(status, body), or None while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request(method, path, body and json.dumps(body), headers)
        got = connection.getresponse()
        return got.status, got.read()
    except OSError:
        return None
    finally:
        connection.close()


def until(good, process):
    deadline = time.perf_counter() + GIVE_UP_S
    while not (found := good()):
        if process.poll() is not None or time.perf_counter() > deadline:
            raise SystemExit(f"the server did not answer: {process.communicate()[1].decode()}")
        time.sleep(0.005)
    return found


def one_round(flags):
    port = free_port()
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port), *flags]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    times = {}

    def mark(name):
        times[name] = time.perf_counter() - began

    try:
        until(lambda: ask(port, "GET", "/live"), process)
        mark("listens")
        until(lambda: (ask(port, "GET", "/ready") or (0,))[0] == 200, process)
        mark("ready")
        status, raw = ask(port, "POST", "/v1/chat/completions", ASK)
        mark("first answer")
        assert status == 200, raw
        assert "Paris" in json.loads(raw)["choices"][0]["message"]["content"], raw
        again = time.perf_counter()
        ask(port, "POST", "/v1/chat/completions", ASK)
        times["second answer alone"] = time.perf_counter() - again
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    return times


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=5)
    a, flags = ap.parse_known_args()
    runs = [one_round(flags) for _ in range(a.rounds)]
    for name in runs[0]:
        values = [run[name] for run in runs]
        line = dict(
            case=name,
            median_s=round(statistics.median(values), 3),
            worst_s=round(max(values), 3),
            runs=[round(v, 3) for v in values],
            flags=flags,
        )
        print(json.dumps(line))


if __name__ == "__main__":
    main()
