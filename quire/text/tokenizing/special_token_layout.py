"""Special tokens that a tokenizer puts around one text, or around two: [CLS] a [SEP] b [SEP].

Tokens of texts are cut and joined as lists, so that a query is tokenized once for many documents
and a cut text keeps its special tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecialTokenLayout:
    """Token ids before, between and after texts. types: of these and of the two texts, in order."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    types: tuple[bytes, bytes, bytes, bytes, bytes] = (b"",) * 5
    # of `before`, one of the first text, `between`, one of the second text, `after`; or all empty

    @classmethod
    def find(
        cls, ids: Sequence[int], types: Sequence[int], texts: Sequence[int | None]
    ) -> SpecialTokenLayout:
        """Read the layout of an example. texts: 0 or 1 for a token of a text, None for others.

        Raises ValueError if a text is missing, or is there more than once.
        """
        pair = 1 in texts
        starts = [texts.index(i) for i in range(1 + pair)]
        ends = [len(texts) - list(reversed(texts)).index(i) for i in range(1 + pair)]
        parts = [[i] * (end - start) for i, (start, end) in enumerate(zip(starts, ends))]
        if any(list(texts[s:e]) != part for s, e, part in zip(starts, ends, parts)):
            raise ValueError(f"texts alternate: {texts}")
        cuts = (0, starts[0], ends[0], starts[-1] if pair else ends[0], ends[-1], len(ids))
        kinds = [bytes(types[a:b]) for a, b in itertools.pairwise(cuts)]
        kinds[1] = kinds[1][:1]
        kinds[3] = bytes(types[starts[-1] : starts[-1] + 1])
        between = cuts[2], cuts[3]
        return cls(
            tuple(ids[: cuts[1]]),
            tuple(ids[slice(*between)]),
            tuple(ids[cuts[4] :]),
            (kinds[0], kinds[1], kinds[2], kinds[3], kinds[4]),
        )

    def without_types(self) -> SpecialTokenLayout:
        """Return the same with all types 0."""
        return SpecialTokenLayout(self.before, self.between, self.after, (b"",) * 5)

    @property
    def count(self) -> int:
        """Number of special tokens."""
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: Sequence[int], second: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the ids of one text or two with the special tokens."""
        return (*self.before, *first, *self.between, *second, *self.after)

    def join_types(self, first: int, second: int = 0) -> bytes:
        """Return the type of each token, given the lengths of the texts. b"": all are 0."""
        before, one, between, two, after = self.types
        made = before + one * first + between + two * second + after
        return made if any(made) else b""
