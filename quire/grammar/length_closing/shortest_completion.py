"""Searches for a short completion of a text by trying tokens on the matcher.

Best first. The order of trying: what closes something; within a string or free text, what ends it;
then names and constants of the form; then the tokens of the mask. The search works on bytes and
writes the result in as few tokens as possible.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from quire.grammar.backends.base import MaskWords
from quire.grammar.length_closing.completion_bounds import CompletionBounds
from quire.grammar.length_closing.token_classes import TokenClasses

CLOSERS = b"}]"
CONTINUATIONS = b'",:'
FIRST = b"/0123456789ntf[{-."
OPENING = frozenset((b"{", b"["))
STRUCTURE = frozenset((b"}", b"]", b'"', b",", b":", b"{", b"["))
DEFERRED_COST = 20
"""How much worse each later choice at a place is thought to be than the one before it."""
OPENED, WITHIN, FORCED = 8, 4, 1
"""Cost of a step that opens something; of one that continues one thing (0.000...); of one without
alternatives. What closes something, or is a literal of the form, costs nothing."""
MAX_PATH_TOKENS = 1200
MAX_MOVES = 40
FILLER_CHARS = b"~^`|@;$&%#*?qZJ_="
"""Where two of these that the form does not name are allowed, any text is."""

TokenMove = tuple[int, ...]
MoveCandidates = Iterator[tuple[TokenMove, bool]]


class SteppableMatcher(Protocol):
    """What is needed of a matcher (quire.grammar.backends.base.Matcher)."""

    def accept(self, token: int) -> bool: ...
    def rollback(self, tokens: int) -> None: ...
    def fill_bitmask(self, words: MaskWords) -> None: ...
    def validate(self, tokens: Sequence[int]) -> int: ...
    @property
    def is_complete(self) -> bool: ...


class AllowedTokens:
    """Tokens that a matcher allows at one place."""

    def __init__(self, matcher: SteppableMatcher, spelling: TokenClasses) -> None:
        self.words = np.zeros_like(spelling.short)
        matcher.fill_bitmask(self.words)
        self._bytes = self.words.tobytes()
        self._spelling = spelling

    def allows(self, token: int) -> bool:
        """The token may come next."""
        return bool(self._bytes[token >> 3] >> (token & 7) & 1)

    def forced_token(self) -> int | None:
        """The one short token that may come next, if it is one."""
        words = self.words & self._spelling.short
        place = words.nonzero()[0]
        if len(place) != 1:
            return None
        word = int(words[place[0]]) & 0xFFFFFFFF
        return int(place[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None

    def short_tokens(self) -> list[int]:
        """What may come next, as short tokens. Where bytes are forced a backend may show but one
        token that has them all."""
        spelling = self._spelling
        open_words = self.words & ~spelling.eos_mask
        return spelling.tokens_of(open_words & spelling.short) or spelling.tokens_of(open_words)


class _SearchCursor:
    """Takes a matcher from one place of a search to another."""

    def __init__(self, matcher: SteppableMatcher) -> None:
        self.matcher = matcher
        self._path: TokenMove = ()

    def move_to(self, path: TokenMove) -> None:
        old = self._path
        same = 0
        for one, two in zip(old, path):
            if one != two:
                break
            same += 1
        if same < len(old):
            self.matcher.rollback(len(old) - same)
        for token in path[same:]:
            self.matcher.accept(token)
        self._path = path


class CompletionSearch:
    """Looks for ends of texts of one form. Stateless between calls: safe for many sequences."""

    def __init__(self, bounds: CompletionBounds, spelling: TokenClasses) -> None:
        self.token_classes = spelling
        self.garbage = self._unused_char_tokens(bounds)
        self._line = spelling.ids.get(b"\n")
        self._marks = self._moves(bounds.marks)
        self._literals = self._moves(bounds.literals[:MAX_MOVES])
        self._texts = [one.encode() for one in (*bounds.marks, *bounds.literals[:MAX_MOVES])]
        self._fillers: list[TokenMove] = [(one,) for one in spelling.fillers]
        self._closers = self._bytes(CLOSERS)
        self._going_on = self._bytes(CONTINUATIONS)
        self._members = self._moves([*("," + one for one in bounds.members), *bounds.members])
        self._values = self._moves(bounds.values)
        self._quote = self._bytes(b'"')

    def _unused_char_tokens(self, bounds: CompletionBounds) -> list[int]:
        """Tokens of single characters that no name, value or mark of the form holds."""
        named = "".join((*bounds.marks, *bounds.literals, *bounds.names)).encode()
        unnamed = [bytes([byte]) for byte in FILLER_CHARS if byte not in named]
        return [self.token_classes.ids[one] for one in unnamed if one in self.token_classes.ids][:2]

    def _bytes(self, text: bytes) -> list[TokenMove]:
        known = [self.token_classes.ids.get(bytes([byte])) for byte in text]
        return [(one,) for one in known if one is not None]

    def _moves(self, texts: Sequence[str]) -> list[TokenMove]:
        """The texts as tokens: as special ones where there are such."""
        found: list[TokenMove] = []
        for text in texts:
            data = text.encode()
            found += [
                (one,)
                for one in self.token_classes.special
                if self.token_classes.pieces[one] == data
            ]
            tokens = self.token_classes.fewest(data)
            if tokens:
                found.append(tokens)
        return found

    def allowed_tokens(self, matcher: SteppableMatcher) -> AllowedTokens:
        """Tokens that the matcher allows now."""
        return AllowedTokens(matcher, self.token_classes)

    def is_free_text(self, mask: AllowedTokens) -> bool:
        """Any text is allowed here."""
        return bool(self.garbage) and all(map(mask.allows, self.garbage))

    def is_outside_string(self, mask: AllowedTokens) -> bool:
        """Any text is allowed, and a line break too, so it is no string of JSON."""
        return self._line is not None and mask.allows(self._line)

    def tokenize(self, text: str) -> TokenMove | None:
        """A text as tokens, names of special tokens in it as those."""
        found: TokenMove = ()
        for part in self.token_classes.names.split(text):
            tokens = (part,) if isinstance(part, int) else self.token_classes.fewest(part.encode())
            if tokens is None:
                return None
            found += tokens
        return found

    def find(
        self, matcher: SteppableMatcher, effort: int, first: bytes = b"", tail: bytes = b""
    ) -> list[int] | None:
        """Tokens that end the text, whole, or None. The matcher is as it was.

        effort: so many places at most. first: bytes tried before all others. tail: the end of the
        text so far, where a mark or name may have begun.
        """
        walk = _SearchCursor(matcher)
        ahead = self._bytes(first)
        found = next(self._search(walk, effort, ahead, self._started_markers(tail)), None)
        walk.move_to(())
        return None if found is None else self._retokenize(matcher, found)

    def find_shortest(
        self, matcher: SteppableMatcher, effort: int, first: bytes = b""
    ) -> list[int] | None:
        """The same, but search on for a shorter one."""
        walk = _SearchCursor(matcher)
        best: list[int] | None = None
        for path in self._search(walk, effort, self._bytes(first)):
            walk.move_to(())
            found = self._retokenize(matcher, path)
            if best is None or len(found) < len(best):
                best = found
        walk.move_to(())
        return best

    def _started_markers(self, tail: bytes) -> list[TokenMove]:
        """Rests of the marks and names that the tail ends with the beginning of."""
        rests: set[bytes] = set()
        for text in self._texts:
            for count in range(min(len(tail), len(text) - 1), 0, -1):
                if tail.endswith(text[:count]):
                    rests.add(text[count:])
        moves = [
            self.token_classes.fewest(rest) for rest in sorted(rests, key=lambda r: (len(r), r))
        ]
        return [one for one in moves if one]

    def _search(
        self,
        walk: _SearchCursor,
        effort: int,
        ahead: list[TokenMove],
        begun: Sequence[TokenMove] = (),
    ) -> Iterator[TokenMove]:
        """Paths to an end. Each costs effort: when a few were found, it is soon used up."""
        matcher = walk.matcher
        heap: list[tuple[int, int, TokenMove, MoveCandidates | None]] = [(0, 0, (), None)]
        made = used = 0
        while heap and effort > 0:
            cost, _, path, tries = heapq.heappop(heap)
            walk.move_to(path)
            if tries is None:
                if matcher.is_complete:
                    yield path
                    effort = min(effort // 2, 2 * used + 20)
                    continue
                if len(path) > MAX_PATH_TOKENS:
                    continue
                effort -= 1
                used += 1
                tries = self._candidates(matcher, ahead, begun if not path else ())
            step = next(tries, None)
            if step is not None:
                made += 2
                move, forced = step
                after = cost + (FORCED if forced else self._cost(path, move))
                if not forced:
                    heapq.heappush(heap, (cost + DEFERRED_COST, -made, path, tries))
                heapq.heappush(heap, (after, -made - 1, path + move, None))

    def _cost(self, path: TokenMove, move: TokenMove) -> int:
        """Estimate how far a step leads away from the end."""
        if len(move) > 1 or move[0] in self.token_classes.special:
            return 0
        byte = self.token_classes.pieces[move[0]][-1:]
        before = self.token_classes.pieces[path[-1]][-1:] if path else b""
        if byte in OPENING or byte == before == b'"':
            return OPENED
        return WITHIN if path and not {byte, before} & STRUCTURE else 0

    def _candidates(
        self, matcher: SteppableMatcher, ahead: list[TokenMove], begun: Sequence[TokenMove]
    ) -> MoveCandidates:
        """What may come next, the likeliest way to the end first, and whether nothing else may. The
        matcher has to be at the same place whenever the next one is requested."""
        mask = self.allowed_tokens(matcher)
        only = mask.forced_token()
        if only is not None:
            yield (only,), True
            return
        for move in (*begun, *self._likely_moves(mask, ahead)):
            if mask.allows(move[0]) and (len(move) == 1 or matcher.validate(move) == len(move)):
                yield move, False
        pieces = self.token_classes.pieces
        for token in sorted(mask.short_tokens(), key=lambda one: _move_priority(pieces[one])):
            yield (token,), False

    def _likely_moves(self, mask: AllowedTokens, ahead: list[TokenMove]) -> Iterator[TokenMove]:
        if not self.is_free_text(mask):
            yield from ahead
            yield from self._closers
            yield from self._members
            yield from self._values
            yield from self._going_on
            yield from self._literals
        elif self.is_outside_string(mask):
            yield from self._marks
        else:
            yield from self._quote
            yield from self._marks
            yield from self._literals
            yield from self._fillers

    def _retokenize(self, matcher: SteppableMatcher, path: TokenMove) -> list[int]:
        """The same text in fewer tokens, where the matcher agrees."""
        short: list[int] = []
        run = b""
        for token in path:
            if token not in self.token_classes.special:
                run += self.token_classes.pieces[token]
                continue
            short += [*(self.token_classes.fewest(run) or ()), token]
            run = b""
        short += self.token_classes.fewest(run) or ()
        if len(short) < len(path) and matcher.validate(short) == len(short):
            return short
        return list(path)


def _move_priority(piece: bytes) -> tuple[int, int]:
    """Values that end soon, then letters, then all others; white space leads nowhere."""
    if not piece:
        return 4, 0
    byte = piece[0]
    if byte in FIRST:
        return 0, FIRST.index(byte)
    return (3 if byte in b" \t\r\n" else 1 if chr(byte).isalnum() and byte < 128 else 2), byte
