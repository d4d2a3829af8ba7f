"""Real grammars of real backends, compiled in this process at the request: no waiting.

How grammars are compiled elsewhere is quire.grammar.compilation.grammar_cache's business, and tested there.
"""

from functools import cache
from pathlib import Path

from quire.core.snapshot import GrammarStats
from quire.engine.startup.vocabulary import build_vocabulary
from quire.grammar.compilation.compile_service import CompileService
from quire.text.tokenizing.tokenizer import load_tokenizer


@cache
def workshop(folder, size, ends):
    return CompileService(build_vocabulary(load_tokenizer(Path(folder)), size, ends))


@cache
def built(folder, size, ends, constraint):
    one = workshop(folder, size, ends)
    return one.load(one.compile(constraint.form, constraint.backend))


class Grammars:
    """Ready at the request."""

    def __init__(self, config, folder):
        self._of = (str(folder()), config.model.vocab, config.sampling.eos_ids)
        self._news = []

    def check_constraint(self, constraint):
        built(*self._of, constraint)

    def acquire(self, constraint):
        self._news.append(constraint)

    def release(self, constraint):
        pass

    @property
    def has_outcomes(self):
        return bool(self._news)

    def outcomes(self):
        news, self._news = self._news, []
        yield from ((one, built(*self._of, one).min_tokens) for one in news)

    def set_outcome_callback(self, ring):
        pass

    def stats(self):
        return GrammarStats()

    def prepare(self):
        pass

    def close(self):
        pass

    def get(self, constraint):
        return built(*self._of, constraint)
