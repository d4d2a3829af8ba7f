"""Measures the seconds from the start of `quire serve` to the first answer, by phases.

Uses the embedded model and a client that polls every few milliseconds. Lines: the port accepts
connections, /ready is 200, the first complete answer, the second one.

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

REQUEST = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
GIVE_UP_S = 120


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def send_request(port, method, path, body=None):
    """Return (status, body), or None while the port is closed."""
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


def wait_until(check, process):
    deadline = time.perf_counter() + GIVE_UP_S
    while not (found := check()):
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

    def record(name):
        times[name] = time.perf_counter() - began

    try:
        wait_until(lambda: send_request(port, "GET", "/live"), process)
        record("listens")
        wait_until(lambda: (send_request(port, "GET", "/ready") or (0,))[0] == 200, process)
        record("ready")
        status, raw = send_request(port, "POST", "/v1/chat/completions", REQUEST)
        record("first answer")
        assert status == 200, raw
        assert "Paris" in json.loads(raw)["choices"][0]["message"]["content"], raw
        again = time.perf_counter()
        send_request(port, "POST", "/v1/chat/completions", REQUEST)
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
