"""The grammars of an engine: workers that find the vocabulary in the tokenizer's folder.

The engine's process needs no tokenizer for it: the first worker reads one and says what its tokens
are. Nothing is started, and little imported, before the first request that needs a grammar.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.config.config import EngineConfig
from quire.engine.link import start
from quire.grammar.clerks import Clerks, Ready
from quire.grammar.pool import Bounds, Grammars
from quire.grammar.vocabulary import Vocabulary
from quire.grammar.worker import Compiles, Done, serve

if TYPE_CHECKING:
    from quire.grammar.ready import Workshop


LARGE = 32_000
"""Tokens of a vocabulary of which grammars' parts take long to make, a quarter of a second of it
with the interpreter's lock where there are 150,000."""
GIVE_WAY_S = 0.0005
"""After so long the interpreter's lock is given to who waits for it."""


class Where(msgspec.Struct, frozen=True):
    """Where a worker finds the vocabulary, and what it may be."""

    folder: str
    tokenizer_mode: str
    trust_remote_code: bool
    size: int
    """Logits of the model."""
    ends: tuple[int, ...]


def grammars_of(config: EngineConfig, folder: Callable[[], Path]) -> Grammars:
    """The grammars of an engine. folder: of its tokenizer; asked for when it is first needed."""
    said = config.structured
    clerks = Clerks(
        lambda: _hire(config, folder()),
        _Loader(),
        seconds=said.compile_seconds,
        memory=said.compile_memory,
    )
    return Grammars(
        clerks,
        Bounds(
            cache_size=said.cache_size,
            cache_memory=said.cache_memory,
            use_size=2 * config.scheduler.max_num_seqs,
        ),
        early=config.model.vocab >= LARGE,
    )


def _hire(config: EngineConfig, folder: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    model = config.model
    where = Where(
        str(folder),
        model.tokenizer_mode,
        model.trust_remote_code,
        model.vocab,
        config.sampling.eos_ids,
    )
    ours, theirs = socket.socketpair()
    with theirs:
        return start(__name__, theirs, [msgspec.json.encode(where).decode()]), ours


class _Loader:
    """Builds in this process what workers have compiled, one at a time.

    Mostly without the interpreter's lock; but what is made once for a vocabulary is made with it,
    so the engine's thread gets that sooner meanwhile than it would.
    """

    def __init__(self) -> None:
        self._workshop: Workshop | None = None
        self._lock = threading.Lock()

    def prepare(self, vocabulary: Vocabulary) -> None:
        if self._workshop is None:
            with self._alone():
                from quire.grammar.ready import Workshop

                workshop = self._workshop or Workshop(vocabulary)
                workshop.prepare()
                self._workshop = workshop

    def __call__(self, done: Done) -> Ready:
        assert self._workshop is not None, "nothing is prepared"
        with self._alone():
            return self._workshop.load(done)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            usual = sys.getswitchinterval()
            sys.setswitchinterval(min(usual, GIVE_WAY_S))
            try:
                yield
            finally:
                sys.setswitchinterval(usual)


def main(fd: int, said: str) -> int:
    """Work as a worker; the exit status."""
    where = msgspec.json.decode(said, type=Where)

    def find() -> Vocabulary:
        from quire.engine.vocabulary import vocabulary
        from quire.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(
            Path(where.folder), where.tokenizer_mode, trust_remote_code=where.trust_remote_code
        )
        return vocabulary(tokenizer, where.size, where.ends)

    def begin(vocabulary: Vocabulary) -> Compiles:
        from quire.grammar.ready import Workshop

        return Workshop(vocabulary)

    return serve(socket.socket(fileno=fd), find, begin)
