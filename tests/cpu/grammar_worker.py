"""A worker process whose compiler does what its forms say: `ok`, `sleep 3`, `spin`, `eat 500` ..."""

from __future__ import annotations

import os
import signal
import socket
import time

from quire.errors import RequestError
from quire.grammar.compilation.compile_worker import CompileResult, run_worker
from quire.grammar.vocabulary import Vocabulary

VOCABULARY = Vocabulary((b"a", b"b", b""), ((2, "<end>"),), (2,), 3)


class Panic(BaseException):
    """As one of Rust's."""


class Compiler:
    """One word of a form is what it does, the next how much."""

    def compile(self, form, backend):
        what, _, much = form.partition(" ")
        getattr(self, what)(much)
        return CompileResult(backend, form.encode(), {"least": len(form), "pid": os.getpid()}, 0.0)

    def ok(self, much):
        pass

    def sleep(self, much):
        time.sleep(float(much))

    def spin(self, much):
        began = time.process_time()
        while time.process_time() - began < float(much.split()[0]):
            pass

    def eat(self, much):
        bytearray(int(much.split()[0]) << 20)

    def leak(self, much):
        self.__dict__.setdefault("kept", []).append(bytearray(int(much.split()[0]) << 20))

    def die(self, much):
        os.kill(os.getpid(), signal.SIGSEGV)

    def be_killed(self, much):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_once(self, much):
        """much: a file that is there once it has died."""
        if not os.path.exists(much):
            with open(much, "w"):
                pass
            self.die("")

    def refuse(self, much):
        raise RequestError(f"refused: {much}", param="pattern")

    def panic(self, much):
        raise Panic(much)

    def fail(self, much):
        raise ZeroDivisionError(much)


def main(fd, what=""):
    def find():
        if what == "slow":
            time.sleep(1000)
        if what == "broken":
            raise OSError("no tokenizer here")
        return VOCABULARY

    if what == "dead":
        return 3
    return run_worker(socket.socket(fileno=fd), find, lambda vocabulary: Compiler())
