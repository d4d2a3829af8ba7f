"""Forks are processes like started ones: their words, environment, streams, ends, and nothing else."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("forked")

TELL = """
import os, sys
assert "torch" in sys.modules, "it is a fork"
print(sys.argv, os.getcwd(), os.environ["ONE"], len(os.environ), sorted(os.listdir("/proc/self/fd"), key=int))
print("error", file=sys.stderr)
"""


def test_it_has_the_words_the_environment_and_the_descriptors_of_its_order(tmp_path):
    ours, theirs = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", TELL, "two words", "ü"],
        env={"ONE": "1"}, cwd=tmp_path, capture_output=True, text=True, pass_fds=[theirs],
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    fds = sorted({0, 1, 2, theirs, 3 if theirs != 3 else 4})  # the last: of listdir()
    fds = [str(fd) for fd in fds]
    assert done.stdout == f"['-c', 'two words', 'ü'] {tmp_path} 1 1 {fds}\n"
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
