"""Forks are processes like started ones: their words, environment, streams, ends, and nothing else."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("forked")

TELL = """
import json, os, sys
from tests.fork_server import Popen
assert "torch" in sys.modules, "it is a fork"
own = Popen.server._end.fileno()
fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]
print(json.dumps([sys.argv, os.getcwd(), dict(os.environ), sorted({*fds} - {own})]))
print("error", file=sys.stderr)
"""


def test_it_has_the_words_the_environment_and_the_descriptors_of_its_order(tmp_path):
    reader, writer = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", TELL, "two words", "ü"],
        env={"ONE": "1"}, cwd=tmp_path, capture_output=True, text=True, pass_fds=[writer],
    )  # fmt: skip
    os.close(reader)
    os.close(writer)
    found = [["-c", "two words", "ü"], str(tmp_path), {"ONE": "1"}, [0, 1, 2, writer]]
    assert json.loads(done.stdout) == found
    assert (done.returncode, done.stderr) == (0, "error\n")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('why')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import atexit, os; atexit.register(os._exit, 7)", 7),
    ],
)
def test_it_ends_as_a_started_one_does(code, status):
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == status


def test_it_is_our_child_and_has_its_own_command_line_and_session():
    code = "import os, sys; print(os.getsid(0) == os.getpid(), flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, "word"]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as one:
        assert one.stdout.readline() == "True\n"
        found = psutil.Process(one.pid)
        assert found.ppid() == os.getpid()
        assert [word for word in found.cmdline() if word] == command
        one.kill()
    assert one.returncode == -signal.SIGKILL
