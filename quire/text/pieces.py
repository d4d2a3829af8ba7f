"""What each token adds to a text, where that does not depend on its neighbours.

Two families of decoders have this property once a text has begun, and they cover almost every
generating model: byte-level BPE (a token is a run of bytes) and SentencePiece-like ones (a token
is text with ▁ for a space, or one byte written <0xE4>). For them a table from id to piece replaces
decoding again and again. For all other decoders `piece_table` is None and quire.text.detokenizer
uses two moving offsets.

A piece is text, or bytes where characters may be spread over several tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from quire.text.backends import Backend, Fast

Piece = str | bytes

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceTable(dict[int, Piece]):
    """id -> piece, filled on demand. Threads may share it: filling twice gives the same.

    is_bytes: every piece is bytes. at_start: what the decoder
    makes of the first piece of a text, where that differs.
    """

    def __init__(
        self,
        backend: Backend,
        make: Callable[[str], Piece],
        *,
        is_bytes: bool = False,
        at_start: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__()
        self.is_bytes = is_bytes
        self._backend = backend
        self._make = make
        self.at_start = at_start
        self._nothing: Piece = b"" if is_bytes else ""
        self._bare: PieceTable | None = None
        self.texts: dict[int, str] = {}
        """Pieces of bytes that are whole characters by themselves, as far as they were met."""

    @property
    def bare(self) -> PieceTable:
        """The same with nothing for special tokens: skipping them costs no look at each token."""
        if self._bare is None:
            table = PieceTable(
                self._backend, self._make, is_bytes=self.is_bytes, at_start=self.at_start
            )
            table.update(dict.fromkeys(self._backend.special_ids, self._nothing))
            self._bare = table
        return self._bare

    def __missing__(self, token_id: int) -> Piece:
        token = self._backend.id_to_token(token_id)
        piece = self._nothing if token is None else self._make(token)
        self[token_id] = piece
        return piece


def piece_table(backend: Backend) -> PieceTable | None:
    """The table of this tokenizer, or None if its decoder looks at neighbours."""
    if not isinstance(backend, Fast) or backend.tokenizer.decoder is None:
        return None
    decoder = json.loads(backend.tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceTable(backend, byte_level(), is_bytes=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        bare = steps[0].get("prepend_scheme", "always") != "never"
        at_start = _without_spaces if bare else None
        return PieceTable(backend, lambda token: token.replace(mark, " "), at_start=at_start)
    return _sentencepiece(backend, steps, kinds)


def _sentencepiece(
    backend: Backend, steps: list[dict[str, Any]], kinds: list[str]
) -> PieceTable | None:
    """[Replace], [ByteFallback], [Fuse], [Strip one space at the start], in this order."""
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    if kinds != [kind for kind in order if kind in kinds]:
        return None
    by_kind = dict(zip(kinds, steps))
    replaced = by_kind.get("Replace", {"pattern": {"String": ""}, "content": ""})
    old, new = replaced["pattern"].get("String"), replaced["content"]
    strip = by_kind.get("Strip")
    if old is None or (strip is not None and _shape(strip) != (" ", 1, 0)):
        return None
    has_bytes = "ByteFallback" in kinds

    def make(token: str) -> Piece:
        byte = _BYTE.fullmatch(token) if has_bytes else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace(old, new) if old else token

    if strip is None:
        return PieceTable(backend, make)
    # without Fuse before it, Strip would act on every token
    return PieceTable(backend, make, at_start=_without_first_space) if "Fuse" in kinds else None


def _without_first_space(text: str) -> str:
    return text[1:] if text.startswith(" ") else text


def _without_spaces(text: str) -> str:
    return text.replace(" ", "")


def _shape(strip: dict[str, Any]) -> tuple[str, int, int]:
    return strip["content"], strip["start"], strip["stop"]


def byte_level() -> Callable[[str], Piece]:
    """Byte-level tokens write each byte as one printable character; undo that."""
    byte_of = {char: byte for byte, char in _byte_alphabet().items()}

    def make(token: str) -> Piece:
        try:
            return bytes([byte_of[char] for char in token])
        except KeyError:  # an added token outside the alphabet stands for itself
            return token.encode("utf-8")

    return make


def _byte_alphabet() -> dict[int, str]:
    """byte -> character: itself where printable, else the next one from U+0100 on.

    Source: the byte-to-unicode table published with GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    return alphabet | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def longest_token_chars(backend: Backend) -> int:
    """Most characters that one token stands for; 0: no bound.

    Only byte-level and byte-fallback BPE keep every character as its own ids.
    """
    if not isinstance(backend, Fast) or type(backend.tokenizer.model).__name__ != "BPE":
        return 0
    table = piece_table(backend)
    if table is None or any(
        token.lstrip or token.rstrip
        for token in backend.tokenizer.get_added_tokens_decoder().values()
    ):
        return 0
    longest = max(map(len, backend.vocab()), default=1)
    # a normalizer may compose characters (NFC): up to three become one
    return longest * (1 if backend.tokenizer.normalizer is None else 4)
