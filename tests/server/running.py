"""`quire serve`: a process of its own, and what it printed.

Its processes are forks of one that has imported torch, or with forked=False started as users start
them: tests/fork_server.py.
"""

import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import psutil

from quire.env import child_environment as env_child
from tests import fork_server

SMALL = ("--kv-cache-memory-bytes", "64MiB")


def command_of(process):
    """Arguments of a process; []: it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


class Running:
    """The first process, the command it printed, and the processes it has started."""

    def __init__(self, process, said):
        self.process = process
        self.said = said
        self.line = said[-1].strip()
        self.url = re.search(r"https?://[0-9.:]+", self.line)[0]
        children = psutil.Process(process.pid).children(recursive=True)
        self.engine = next(p for p in children if "quire.engine.core.process_main" in command_of(p))
        self.api = [p for p in children if "quire.server.process.api_process" in command_of(p)]
        self.family = [psutil.Process(process.pid), *children]

    def read_log(self, lines):
        """Append what it prints, until it ends. What nobody reads stops who writes it."""

        def read():
            with suppress(ValueError):  # the pipe is closed when the server has been killed
                lines.extend(self.process.stdout)

        threading.Thread(target=read, daemon=True).start()

    def gone(self, within_s=60.0):
        """Whether all of them have ended."""
        _, alive = psutil.wait_procs(self.family, within_s)
        return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def start(*words, folder=None, starter=("quire", "serve"), forked=True, **variables):
    """The command alone. folder: where it keeps its temporary files. starter: module, words.

    variables: of its environment.
    """
    command = [sys.executable, "-m", *starter, *map(str, words), "--port", "0"]
    variables |= {} if folder is None else {"TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    env = env_child(**variables)
    if forked:
        fork_server.start()
    popen = fork_server.Popen if forked else subprocess.Popen
    return popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env)


@contextmanager
def serving(*words, **more):
    """A server that answers, in the end killed. more: as of start()."""
    process = start(*words, **more)
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("  curl "):
                yield Running(process, said)
                break
        else:
            raise AssertionError("".join(said))
    finally:
        process.kill()
        process.communicate()


def wait_until(true, within_s=60.0):
    deadline = time.monotonic() + within_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()
