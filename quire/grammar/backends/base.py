"""Contract of grammar backends.

    compiler.compile(form) -> CompiledGrammar    slow: runs in a compile worker
    grammar.matcher()      -> Matcher            fast: one for each sequence
    matcher.accept / fill_bitmask / rollback     in each step

A mask is a row of 32-bit words over the model's vocabulary: bit t % 32 of word t // 32 is set if
token t may come next; bits past the vocabulary are 0. One of the vocabulary's end tokens ends the
text; masks allow them where the text may end. After an end token only end tokens are allowed, so a
mask is never empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.grammar.grammar_ast import GrammarNode

MaskWords = npt.NDArray[np.int32]


class Matcher(Protocol):
    """State of one sequence in its grammar. Not thread-safe; different ones may be used at once."""

    def accept(self, token: int) -> bool:
        """Take the next token, an end token included. False, and nothing changed: not allowed."""
        ...

    def rollback(self, tokens: int) -> None:
        """Take back the last so many tokens that were accepted."""
        ...

    def validate(self, tokens: Sequence[int]) -> int:
        """Count how many of these tokens could be accepted, in order. Changes nothing."""
        ...

    def fill_bitmask(self, words: MaskWords) -> None:
        """Write the mask of the next token: words [ceil(V / 32)]."""
        ...

    @property
    def is_complete(self) -> bool:
        """The text so far is whole: it may end here."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Only the end can follow, or it has been accepted."""
        ...

    @property
    def fault(self) -> str | None:
        """The error that ended this matcher, for example a limit of the work of one step.

        Masks then allow the end tokens only, and `complete` is False: the text is not whole, and
        its request ends with an error.
        """
        ...

    def copy(self) -> Matcher:
        """Another one in the same state."""
        ...


class CompiledGrammar(Protocol):
    """A compiled form. Immutable, and shared by all sequences that are bound to it."""

    @property
    def size(self) -> int:
        """Bytes of memory it holds, about: caches of grammars are bounded by it."""
        ...

    @property
    def compiler(self) -> GrammarCompiler:
        """Its compiler, named like the backend, never "auto"."""
        ...

    def matcher(self) -> Matcher:
        """A fresh matcher."""
        ...

    def dump(self) -> bytes:
        """What `GrammarCompiler.load` makes it of again, in another process with an equal
        vocabulary.
        """
        ...


class GrammarCompiler(Protocol):
    """One backend over one vocabulary."""

    name: str

    def compile(self, form: GrammarNode) -> CompiledGrammar:
        """Raises RequestError if the form is wrong or takes too much work."""
        ...

    def load(self, dumped: bytes) -> CompiledGrammar:
        """What was compiled elsewhere by a compiler of this name: quicker than compiling."""
        ...

    def fill_bitmasks(self, matchers: Sequence[tuple[int, Matcher]], words: MaskWords) -> None:
        """words[row] is filled by each (row, matcher), in parallel where that is quicker."""
        ...
