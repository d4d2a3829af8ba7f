"""Table of the text that each token adds, for decoders where it does not depend on neighbours.

Two families of decoders have this property once a text has begun, and they cover almost every
generating model: byte-level BPE (a token is a run of bytes) and SentencePiece-like ones (a token
is text with ▁ for a space, or one byte written <0xE4>). For them a table from id to piece replaces
decoding again and again. For all other decoders build_piece_table() returns None, and
quire.text.tokenizing.detokenizer uses two moving offsets.

A piece is text, or bytes where characters may be spread over several tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from quire.text.tokenizing.backends import TokenizerBackend, TokenizersBackend
from quire.text.tokenizing.byte_alphabet import byte_alphabet

TokenPiece = str | bytes

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieceTable(dict[int, TokenPiece]):
    """id -> piece, filled on demand. Threads may share it: filling twice gives the same.

    is_bytes: every piece is bytes. at_start: what the decoder
    makes of the first piece of a text, where that differs.
    """

    def __init__(
        self,
        backend: TokenizerBackend,
        make: Callable[[str], TokenPiece],
        *,
        is_bytes: bool = False,
        at_start: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__()
        self.is_bytes = is_bytes
        self._backend = backend
        self._decode_token = make
        self.at_start = at_start
        self._empty: TokenPiece = b"" if is_bytes else ""
        self._without_special: TokenPieceTable | None = None
        self.whole_texts: dict[int, str] = {}
        """Pieces of bytes that are whole characters by themselves, as far as they were met."""

    @property
    def without_special(self) -> TokenPieceTable:
        """The same with empty strings for special tokens: skipping needs no test per token."""
        if self._without_special is None:
            table = TokenPieceTable(
                self._backend, self._decode_token, is_bytes=self.is_bytes, at_start=self.at_start
            )
            table.update(dict.fromkeys(self._backend.special_ids, self._empty))
            self._without_special = table
        return self._without_special

    def __missing__(self, token_id: int) -> TokenPiece:
        token = self._backend.id_to_token(token_id)
        piece = self._empty if token is None else self._decode_token(token)
        self[token_id] = piece
        return piece


def build_piece_table(backend: TokenizerBackend) -> TokenPieceTable | None:
    """The table of this tokenizer, or None if its decoder depends on neighbours."""
    if not isinstance(backend, TokenizersBackend) or backend.tokenizer.decoder is None:
        return None
    decoder = json.loads(backend.tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenPieceTable(backend, byte_level_decoder(), is_bytes=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        bare = steps[0].get("prepend_scheme", "always") != "never"
        at_start = _without_spaces if bare else None
        return TokenPieceTable(backend, lambda token: token.replace(mark, " "), at_start=at_start)
    return _sentencepiece_table(backend, steps, kinds)


def _sentencepiece_table(
    backend: TokenizerBackend, steps: list[dict[str, Any]], kinds: list[str]
) -> TokenPieceTable | None:
    """[Replace], [ByteFallback], [Fuse], [Strip one space at the start], in this order."""
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    if kinds != [kind for kind in order if kind in kinds]:
        return None
    by_kind = dict(zip(kinds, steps))
    replaced = by_kind.get("Replace", {"pattern": {"String": ""}, "content": ""})
    old, new = replaced["pattern"].get("String"), replaced["content"]
    strip = by_kind.get("Strip")
    if old is None or (strip is not None and _strip_args(strip) != (" ", 1, 0)):
        return None
    has_bytes = "ByteFallback" in kinds

    def make(token: str) -> TokenPiece:
        byte = _BYTE.fullmatch(token) if has_bytes else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace(old, new) if old else token

    if strip is None:
        return TokenPieceTable(backend, make)
    # without Fuse before it, Strip would act on every token
    return (
        TokenPieceTable(backend, make, at_start=_without_first_space) if "Fuse" in kinds else None
    )


def _without_first_space(text: str) -> str:
    return text[1:] if text.startswith(" ") else text


def _without_spaces(text: str) -> str:
    return text.replace(" ", "")


def _strip_args(strip: dict[str, Any]) -> tuple[str, int, int]:
    return strip["content"], strip["start"], strip["stop"]


def byte_level_decoder() -> Callable[[str], TokenPiece]:
    """Byte-level tokens write each byte as one printable character; undo that."""
    byte_of = {char: byte for byte, char in byte_alphabet().items()}

    def make(token: str) -> TokenPiece:
        try:
            return bytes([byte_of[char] for char in token])
        except KeyError:  # an added token outside the alphabet is its own text
            return token.encode("utf-8")

    return make


def longest_token_chars(backend: TokenizerBackend) -> int:
    """Most characters of one token; 0: no bound.

    Only byte-level and byte-fallback BPE keep every character as its own ids.
    """
    if (
        not isinstance(backend, TokenizersBackend)
        or type(backend.tokenizer.model).__name__ != "BPE"
    ):
        return 0
    table = build_piece_table(backend)
    if table is None or any(
        token.lstrip or token.rstrip
        for token in backend.tokenizer.get_added_tokens_decoder().values()
    ):
        return 0
    longest = max(map(len, backend.vocab()), default=1)
    # a normalizer may compose characters (NFC): up to three become one
    return longest * (1 if backend.tokenizer.normalizer is None else 4)
