"""`quire serve` as people start it: a process of its own, the printed command, a clean end."""

import json
import logging
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from quire.cli.serve import main
from quire.env import child_environment
from quire.errors import ConfigError
from quire.server.options import ServerOptions
from quire.server.process import api_process, listen_sockets
from tests.server.running import SMALL, serving, wait_until


def run_printed(line):
    got = subprocess.run(
        [*shlex.split(line), "-sS", "--max-time", "60"], capture_output=True, text=True, check=True
    )
    return json.loads(got.stdout)


def check_that_streams_agree(url):
    """On the real model: a tool call, a sum and another alphabet, by the official client."""
    function = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    tools = [{"type": "function", "function": function}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        for text, extra in (
            ("What is the weather in Paris?", {"tools": tools}),
            ("What is 3 + 4?", {"logprobs": True}),
            ("法国的首都是哪里？", {}),
        ):
            body = {
                "model": "embedded",
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                **extra,
            }
            whole = client.chat.completions.create(**body).choices[0].message.content
            chunks = client.chat.completions.create(**body, stream=True)
            assert (
                "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == whole
            )
            assert ("<tool_call>" in whole) == ("tools" in extra)


def check_that_the_start_is_reported(said):
    """One line names each second from the start of the command until connections are accepted."""
    (line,) = [one for one in said if "after the command started" in one]
    whole, stages = re.search(r"ready ([\d.]+) s after the command started: (.*)", line).groups()
    seconds = {name: float(s) for name, s in (one.rsplit(" ", 1) for one in stages.split(", "))}
    names = list(seconds)
    assert names[:2] == ["before", "imports"]
    assert names[-1] == "opening"
    assert {"model files", "weights", "engine"} < set(names)
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(float(whole), abs=0.01 * len(seconds))


def test_the_printed_command_gets_a_sensible_answer_and_sigterm_lets_runs_end():
    with serving(*SMALL, forked=False) as server:
        process = server.process
        check_that_the_start_is_reported(server.said)
        answer = run_printed(server.line)
        assert answer["model"] == "embedded"
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert answer["choices"][0]["finish_reason"] == "stop"
        url = server.url
        check_that_streams_agree(url)
        process.send_signal(signal.SIGHUP)  # nothing to read again
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-4]
        assert process.wait(60) == 0
        log = process.stdout.read()
        assert "SIGHUP is ignored: there is no key file and no TLS file" in log
        assert "SIGTERM: no new connections; running requests may take 30 s more" in log
        assert "shutdown: waiting for 1 requests, at most 30 s" in log


@pytest.mark.long("a server of its own; other tests close the streams of commands")
def test_a_server_starts_with_its_standard_streams_closed(tmp_path):
    path = tmp_path / "s"
    command = [sys.executable, "-m", "quire", "serve", "embedded", *SMALL, "--uds", str(path)]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    process = subprocess.Popen(shell, env=child_environment())
    try:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://x", timeout=60) as client:

            def serves():
                try:
                    return client.get("/ready").status_code == 200
                except httpx.TransportError:
                    return process.poll() is not None

            assert wait_until(serves, 60)
            assert process.poll() is None
            got = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert got.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_commands_end_well_with_closed_streams(closed):
    command = [sys.executable, "-m", "quire"]
    for words, wanted in ((["--version"], 0), (["no-such-command"], 2)):
        shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command, *words]
        got = subprocess.run(shell, env=child_environment(), capture_output=True, text=True)
        assert got.returncode == wanted, got
        assert "Traceback" not in got.stdout + got.stderr


def test_runs_that_outlast_the_shutdown_are_told_so():
    with serving("embedded", *SMALL, "--shutdown-timeout", "0") as server:
        url, process = server.url, server.process
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        plain = {**body, "stream": False}
        with (
            ThreadPoolExecutor(1) as pool,
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            other = pool.submit(httpx.post, f"{url}/v1/completions", json=plain, timeout=60)
            assert wait_until(lambda: httpx.get(f"{url}/load").json()["server_load"] == 2)
            process.send_signal(signal.SIGINT)
            rest = list(lines)
            assert other.result().status_code == 503
        assert rest[-2] == "data: [DONE]"
        assert "the server is shutting down" in rest[-4]
        assert process.wait(60) == 0


def test_a_taken_port_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            main(["embedded", "--port", str(port)])
        assert time.monotonic() - began < 10


def test_a_unix_socket_is_taken_over_from_the_dead_only(tmp_path):
    options = ServerOptions(uds=str(tmp_path / "s"))
    (first,) = listen_sockets.bind_sockets(options)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    first.listen()
    with pytest.raises(ConfigError, match="another server"):
        listen_sockets.bind_sockets(options)
    first.close()
    listen_sockets.bind_sockets(options)[0].close()


@pytest.mark.parametrize(
    ("said", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": ""}, True),
        ({"host": "0.0.0.0", "api_key": ("k",)}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
    ],
)
def test_a_server_that_others_reach_without_a_key_is_warned_of(said, warned, caplog):
    listen_sockets.bind_sockets(ServerOptions(port=0, **said))[0].close()
    assert ("no key is needed" in caplog.text) == warned


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "many"], "port"),
        (["--port", "70000"], "port"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout"),
        (["--uvicorn-log-level", "loud"], "uvicorn_log_level"),
        (["--default-chat-template-kwargs", "[1]"], "default_chat_template_kwargs"),
    ],
)
def test_a_bad_flag_is_refused_by_its_name(words, said):
    with pytest.raises(ConfigError, match=said):
        main(["embedded", *words])


def test_an_unknown_flag_names_the_nearest(capsys):
    with pytest.raises(SystemExit):
        main(["embedded", "--prot", "80"])
    assert "--port" in capsys.readouterr().err


def test_the_access_log_leaves_out_the_paths_it_is_told_to():
    shown = api_process.build_access_log_filter(["/health,/live", "/metrics"])

    def line(path):
        args = ("127.0.0.1:5", "GET", path, "1.1", 200)
        return logging.LogRecord("uvicorn.access", 20, "", 0, '%s - "%s %s HTTP/%s" %d', args, None)

    assert not any(shown(line(path)) for path in ("/health", "/live?x=1", "/metrics"))
    assert all(shown(line(path)) for path in ("/v1/models", "/healthy", "/"))


def test_the_access_log_shows_paths_without_what_stands_behind_them():
    args = ("127.0.0.1:5", "GET", "/v1/models?api_key=secret", "1.1", 401)
    made = logging.LogRecord("uvicorn.access", 20, "", 0, '%s - "%s %s HTTP/%s" %d', args, None)
    assert api_process.build_access_log_filter([])(made)
    assert made.getMessage() == '127.0.0.1:5 - "GET /v1/models HTTP/1.1" 401'
