"""Grammar set-up: starts the workers that compile an engine's grammars.

The engine's process needs no tokenizer for it: the first worker reads one from the tokenizer's
folder and returns the vocabulary. An engine in a process of its own starts that worker while it
starts itself: afterwards the first request with a grammar would wait for a second, and with 150,000
tokens all others for a quarter of one, in which the interpreter's lock is held. Elsewhere nothing
is started, and little imported, before the first request that needs a grammar.
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

from quire.config.engine_config import EngineConfig
from quire.engine.supervise.process_pipe import spawn_process
from quire.grammar.compilation.compile_threads import CacheableGrammar, CompilePool
from quire.grammar.compilation.compile_worker import CompileResult, run_worker
from quire.grammar.compilation.grammar_cache import CacheBounds, GrammarCache
from quire.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from quire.grammar.compilation.compile_service import CompileService


SWITCH_INTERVAL_S = 0.0005
"""Seconds after which a waiting thread gets the interpreter's lock."""


class VocabularySource(msgspec.Struct, frozen=True):
    """Location of the vocabulary, and its limits."""

    folder: str
    tokenizer_mode: str
    trust_remote_code: bool
    num_logits: int
    """Logits of the model."""
    eos_ids: tuple[int, ...]


def build_grammars(config: EngineConfig, folder: Callable[[], Path]) -> GrammarCache:
    """The grammars of an engine. folder: returns the tokenizer's; called when it is first
    needed."""
    structured = config.structured
    pool = CompilePool(
        lambda: _start_worker(config, folder()),
        _InProcessGrammarLoader(),
        seconds=structured.compile_seconds,
        memory=structured.compile_memory,
    )
    return GrammarCache(
        pool,
        CacheBounds(
            cache_size=structured.cache_size,
            cache_memory=structured.cache_memory,
            use_size=2 * config.scheduler.max_num_seqs,
        ),
    )


def _start_worker(
    config: EngineConfig, folder: Path
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    model = config.model
    where = VocabularySource(
        str(folder),
        model.tokenizer_mode,
        model.trust_remote_code,
        model.vocab,
        config.sampling.eos_ids,
    )
    parent_end, child_end = socket.socketpair()
    with child_end:
        return spawn_process(__name__, child_end, [msgspec.json.encode(where).decode()]), parent_end


class _InProcessGrammarLoader:
    """Deserializes in this process what workers have compiled, one at a time.

    Mostly without the interpreter's lock. The tables of a vocabulary are made with it, so the
    switch interval is shorter meanwhile, for the engine's thread.
    """

    def __init__(self) -> None:
        self._compile_service: CompileService | None = None
        self._lock = threading.Lock()

    def prepare(self, vocabulary: Vocabulary) -> None:
        if self._compile_service is None:
            with self._exclusive():
                self._compile_service = self._compile_service or build_compile_service(vocabulary)

    def __call__(self, done: CompileResult) -> CacheableGrammar:
        assert self._compile_service is not None, "nothing is prepared"
        with self._exclusive():
            return self._compile_service.load(done)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            usual = sys.getswitchinterval()
            sys.setswitchinterval(min(usual, SWITCH_INTERVAL_S))
            try:
                yield
            finally:
                sys.setswitchinterval(usual)


def build_compile_service(vocabulary: Vocabulary) -> CompileService:
    """Build the service of a worker or of the engine, with what every grammar needs."""
    from quire.grammar.compilation.compile_service import CompileService

    service = CompileService(vocabulary)
    service.prepare()
    return service


def main(fd: int, source: str) -> int:
    """Run as a compile worker. Returns the exit status."""
    where = msgspec.json.decode(source, type=VocabularySource)

    def find() -> Vocabulary:
        from quire.engine.startup.vocabulary import build_vocabulary
        from quire.text.tokenizing.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(
            Path(where.folder), where.tokenizer_mode, trust_remote_code=where.trust_remote_code
        )
        return build_vocabulary(tokenizer, where.num_logits, where.eos_ids)

    return run_worker(socket.socket(fileno=fd), find, build_compile_service)
