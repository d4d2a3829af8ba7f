"""Fork server: Python processes of tests that are forks of one that has imported torch and quire.

`Popen` is `subprocess.Popen`, for commands `python -m MODULE`, `-c CODE` and `SCRIPT.py`. Importing
takes a server's processes 4 s of the processor, a fork 0.03 s. A process is a real child of its
caller: the fork server forks twice, and the caller adopts the second (PR_SET_CHILD_SUBREAPER).

A forked process differs from a started one: all that PRELOADED imports is imported, and the seed of
hash() is that of its siblings. Tests of starts use `subprocess`.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from quire.engine.supervise.process_pipe import _BOOTSTRAP
from tests import torchvision_wheel

PRELOADED = (
    *("quire.cli.serve", "quire.server.process.supervisor", "quire.server.process.api_process"),
    *("quire.server.app", "quire.engine.core.process_main", "quire.engine.core.process"),
    *("quire.models.llama", "quire.llm", "tests.faults.serve"),
    *("quire.engine.startup.grammar_setup", "quire.engine.startup.vocabulary"),
)
MEDIA_WORKER = ("quire.media.media_worker", "quire.media.processor")
"""What a fork server of media workers imports, in place of PRELOADED: no torch."""
SANDBOXED = {"quire.text.templates.render_worker"}
"""Modules whose processes are started always: a sandbox has a limit of memory, and no torch."""
ENGINE = "quire.engine.core.process_main"
"""It has a fork server of its own, as the first process has: for ranks, and workers of grammars."""
NAME = "fork-server"
"""Of a process that is the fork server of a fork."""
MARGIN = 16_000
"""Bytes that the command line of the fork server keeps for those of its forks."""
ROOT = Path(__file__).resolve().parents[1]
HIGH = 500  # above all file descriptors of a test process
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None).prctl


def can_fork(args):
    """Whether a fork can run this command."""
    if isinstance(args, str | bytes) or args[0] != sys.executable or SANDBOXED & {*args}:
        return False
    return args[1] in ("-m", "-c") or str(args[1]).endswith(".py")


class ForkServer:
    """The caller's end. `end`: a socket to a process that runs serve()."""

    def __init__(self, end):
        self._end = end
        self._lock = threading.Lock()

    def spawn(self, order, fds):
        """Returns the process id of a new child of this process."""
        with self._lock:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._end, [json.dumps(order).encode()], fds)
                if not (pid := self._end.recv(64)):
                    raise RuntimeError("the fork server has ended")
                return int(pid)
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Popen(subprocess.Popen):
    """A process that is a fork. Without a fork server in this process, or for another command: one
    that is started."""

    server = None
    """Of this process."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        if self.server is None or not can_fork(args):
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more
            )
        # After startupinfo, creationflags and shell: the ends of pipes, ours and the child's.
        child_in, parent_in, parent_out, child_out, parent_err, child_err = more[3:9]
        streams = [0 if child_in == -1 else child_in]
        streams += [1 if child_out == -1 else child_out, 2 if child_err == -1 else child_err]
        order = {
            "args": [os.fspath(one) for one in args[1:]],
            "env": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd or os.getcwd()),
            "session": bool(self._new_session),
            "fds": [0, 1, 2, *pass_fds],
        }
        self.pid = self.server.spawn(order, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(child_in, parent_in, parent_out, child_out, parent_err, child_err)
        return None

    def __init__(self, args, *more, start_new_session=False, **named):
        self._new_session = start_new_session
        super().__init__(args, *more, start_new_session=start_new_session, **named)


class MediaPopen(Popen):
    """Forks of a process that has imported what media workers need."""

    server = None


def start(popen=Popen):
    """The Popen of this process makes forks from now on: for fixtures. Idempotent."""
    if popen.server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        names = " ".join(MEDIA_WORKER if popen is MediaPopen else PRELOADED)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), names, " " * MARGIN]
        with theirs:
            fds = [theirs.fileno()]
            Popen.__base__(command, pass_fds=fds, cwd=ROOT, start_new_session=True)
        popen.server = ForkServer(ours)


def spawn_media_worker(module, end, *, env):
    """spawn_process() of quire.engine.supervise.process_pipe, as a fork."""
    start(MediaPopen)
    path, fd = json.dumps(sys.path), end.fileno()
    return MediaPopen(
        [sys.executable, "-c", _BOOTSTRAP, path, module, str(fd)],
        pass_fds=[fd], env=env, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def serve(end):
    """Fork on order, until the other end is closed."""
    while True:
        data, fds, _, _ = socket.recv_fds(end, 1 << 18, 64)
        if not data:
            os._exit(0)
        reader, writer = os.pipe()
        middle = os.fork()
        if not middle:
            middle = os.getpid()
            if pid := os.fork():
                os.write(writer, str(pid).encode())
                os._exit(0)
            while os.getppid() == middle:  # whose end would end a worker that dies with its parent
                time.sleep(0.001)
            become(json.loads(data), fds)
        os.close(writer)
        os.waitpid(middle, 0)  # its child has another parent now
        end.send(os.read(reader, 64))
        for fd in (reader, *fds):
            os.close(fd)


def become(order, fds):
    """Be the process that the order describes, to its end."""
    status = 1
    try:
        place_fds(fds, order["fds"])
        if order["session"]:
            os.setsid()
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["env"])
        tempfile.tempdir = None
        write_command_line([sys.executable, *order["args"]])
        first = Popen.server is None and _BOOTSTRAP not in order["args"]
        if first or ENGINE in order["args"]:
            fork_from_here()
        run(*order["args"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else end.code is not None
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:  # noqa: BLE001 as Python prints it at the end
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(int(status))


def run(kind, *words):
    sys.argv = [kind, *words[1:]]
    if kind == "-m":
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [kind, *words]
        sys.path.insert(0, os.path.dirname(kind))
        runpy.run_path(kind, run_name="__main__")


def place_fds(fds, numbers):
    """Have these file descriptors, at these numbers, and no others."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in fds]
    os.closerange(3, HIGH)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
    os.closerange(HIGH, HIGH + 100)


def write_command_line(words):
    """For `ps` and for psutil's cmdline(): over that of the fork server."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    line = b"\0".join(word.encode() for word in words)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def fork_from_here():
    """Have a fork server of this process's own, for what it starts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        Path("/proc/self/comm").write_text(NAME)
        Popen.server = ForkServer(None)  # its children have none
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        with contextlib.suppress(OSError):
            os.setsid()
        serve(theirs)
    theirs.close()
    Popen.server = ForkServer(ours)
    subprocess.Popen = Popen


def main(fd, names):
    torchvision_wheel.install()
    for name in names.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=fd))


if __name__ == "__main__":
    from tests import fork_server  # the module that tests import, not __main__

    fork_server.main(int(sys.argv[1]), sys.argv[2])
