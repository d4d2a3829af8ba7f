"""Incremental detokenizer: token ids to text, in whole characters and in linear time.

Where each token has a piece of its own (quire.text.tokenizing.token_pieces) the pieces are joined;
for other decoders two offsets advance, and only the last few tokens are decoded again. Either is
primed with the end of the prompt, so that the first piece joins as it would inside one text. Bytes
of an incomplete character are held back; `finish` returns them as U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from quire.text.tokenizing.token_pieces import TokenPiece, TokenPieceTable
from quire.text.tokenizing.tokenizer import Tokenizer

PRIMING_TOKENS = 8
"""Prompt tokens that can matter: a character has at most 4 bytes, a byte may be a token."""

_REPLACEMENT_CHAR = "\ufffd"
_decode = codecs.utf_8_decode


class Detokenizer:
    """The text of one sequence. push() in order, then finish() once.

    push(ids) -> the text that these ids add, as far as it is certain; finish() -> what was held
    back. Both are those of the way that the tokenizer allows: nothing stands between.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        specials = tokenizer.backend.special_ids
        skip = specials if skip_special_tokens else frozenset()
        primer = [i for i in prompt_ids[-PRIMING_TOKENS:] if i not in skip]
        way: _DetokenizerImpl
        table = tokenizer.pieces
        if table is not None and skip:
            table = table.without_special
        if table is None:
            # Tokens that must not be set apart by the spaces a decoder would put between them
            close = frozenset() if spaces_between_special_tokens else specials
            way = _OffsetDetokenizer(tokenizer, primer, close, skip)
        elif table.is_bytes:
            way = _ByteDetokenizer(table, primer)
        else:
            starts = all(i in skip for i in reversed(prompt_ids))
            way = _PieceDetokenizer(table, primer, starts)
        self.push: Callable[[Sequence[int]], str] = way.push
        self.finish: Callable[[], str] = way.finish


class _DetokenizerImpl(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class _ByteDetokenizer:
    """Every piece is bytes; what does not end a character yet is kept open."""

    def __init__(self, table: TokenPieceTable, primer: Sequence[int]) -> None:
        self._table = table
        self._texts = table.whole_texts
        self._open = b""
        self.push(primer)

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) == 1:
            text = None if self._open else self._texts.get(ids[0])
            return self._one(ids[0]) if text is None else text
        return self._add(b"".join([self._table[i] for i in ids]))  # type: ignore[misc]  # is_bytes

    def _one(self, token_id: int) -> str:
        was_open = self._open
        text = self._add(self._table[token_id])  # type: ignore[arg-type]  # bytes, see is_bytes
        if not was_open and not self._open:
            self._texts[token_id] = text  # next time it is only looked up
        return text

    def _add(self, data: bytes) -> str:
        if self._open:
            data = self._open + data
        text, used = _decode(data, "replace", False)
        self._open = data[used:]
        return text

    def finish(self) -> str:
        held, self._open = self._open, b""
        return _decode(held, "replace", True)[0]


class _PieceDetokenizer:
    """Pieces are text, and now and then one byte of a character that has no token."""

    def __init__(self, table: TokenPieceTable, primer: Sequence[int], at_start: bool) -> None:
        self._table = table
        self._open = b""
        self._start: Callable[[str], str] | None = None
        self.push(primer)
        self._start = table.at_start if at_start else None

    def push(self, ids: Sequence[int]) -> str:
        table = self._table
        if len(ids) == 1 and self._start is None:
            return self._text(table[ids[0]])
        made = [self._text(table[i]) for i in ids]
        if self._start is not None:
            self._begin(made)
        return made[0] if len(made) == 1 else "".join(made)

    def _begin(self, made: list[str]) -> None:
        """The first text of all is made as the decoder makes the start of a text."""
        for i, text in enumerate(made):
            if text and self._start is not None:
                made[i] = self._start(text)
                self._start = None

    def _text(self, piece: TokenPiece) -> str:
        if isinstance(piece, str):
            if not self._open or not piece:
                return piece
            return self.finish() + piece
        self._open += piece
        try:
            text = self._open.decode("utf-8")
        except UnicodeDecodeError as e:
            if e.reason == "unexpected end of data":
                return ""
            # the new byte does not continue the open character; it may open another
            holes, self._open = self._open[:-1], self._open[-1:]
            if not holes:
                return self.finish()
            return _REPLACEMENT_CHAR * len(holes) + self._text_of_first()
        self._open = b""
        return text

    def _text_of_first(self) -> str:
        first, self._open = self._open, b""
        return self._text(first)

    def finish(self) -> str:
        held, self._open = self._open, b""
        return _REPLACEMENT_CHAR * len(held)


class _OffsetDetokenizer:
    """For decoders whose result depends on neighbouring tokens.

    ids:   [.... seen ....|.... read ....|.... new ....]
                          ^ _prefix      ^ _read
    The text of [prefix, read) was given out; what [prefix, end) has beyond it is new.
    """

    MAX_HELD_TOKENS = (
        16  # tokens; a character has at most 4 bytes, so a longer tail never completes
    )
    CHUNK_TOKENS = (
        64  # tokens decoded at once when many come together: a decode has a price of its own
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        primer: Sequence[int],
        close: frozenset[int],
        skip: frozenset[int],
    ) -> None:
        self._backend = tokenizer.backend
        self._close = close
        self._skip = skip
        self._ids = self._with_text(primer)
        self._read = len(self._ids)
        self._emitted = self._decoded()

    def push(self, ids: Sequence[int]) -> str:
        ids, made = self._with_text(ids), []
        for at in range(0, len(ids), self.CHUNK_TOKENS):
            chunk = ids[at : at + self.CHUNK_TOKENS]
            text = self._push_whole(chunk) if len(chunk) > 1 else None
            made += [self._push(i) for i in chunk] if text is None else [text]
        return "".join(made)

    def _with_text(self, ids: Sequence[int]) -> list[int]:
        """Leave out what decodes to nothing: a token whose only neighbours are such ones would be
        decoded as if it began a text."""
        name = self._backend.id_to_token
        return [i for i in ids if i not in self._skip and name(i) is not None]

    def _push_whole(self, chunk: Sequence[int]) -> str | None:
        """The text of tokens that make whole characters; None, and nothing changed, if not so."""
        if self._close or self._read < len(self._ids):
            return None
        self._ids.extend(chunk)
        text = self._decoded()
        if text.startswith(self._emitted) and _REPLACEMENT_CHAR not in text[len(self._emitted) :]:
            return self._advance(text)
        del self._ids[-len(chunk) :]
        return None

    def _push(self, token_id: int) -> str:
        previous = self._ids[-1] if self._ids else None
        self._ids.append(token_id)
        text = self._decoded()
        held = len(self._ids) - self._read
        if (
            text.endswith(_REPLACEMENT_CHAR)
            and held < self.MAX_HELD_TOKENS
            and not self._is_whole(token_id)
        ):
            return ""
        new = self._advance(text)
        if token_id in self._close and previous in self._close:
            return new.lstrip(" ")
        return new

    def _is_whole(self, token_id: int) -> bool:
        """The token itself is the character U+FFFD, not a part of another."""
        token = self._backend.id_to_token(token_id)
        return token is not None and _REPLACEMENT_CHAR in token

    def _advance(self, text: str) -> str:
        """Give out what is new and move both offsets: [read, end) is the next prefix."""
        new = (
            text[len(self._emitted) :]
            if text.startswith(self._emitted)
            else _after_common_prefix(self._emitted, text)
        )
        del self._ids[: max(self._read - 1, 0)]
        self._read = len(self._ids)
        self._emitted = self._decoded()
        return new

    def _decoded(self) -> str:
        return self._backend.decode(self._ids, False, not self._close)

    def finish(self) -> str:
        return self._advance(self._decoded())


def _after_common_prefix(given: str, text: str) -> str:
    """What `text` has after the beginning it shares with `given` (a decoder changed its mind)."""
    shared = 0
    for a, b in zip(given, text):
        if a != b:
            break
        shared += 1
    return text[shared:] if shared < len(text) else ""
