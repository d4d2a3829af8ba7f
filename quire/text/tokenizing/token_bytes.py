"""The bytes that each id of a tokenizer adds to a text, and which ids are special.

Grammars (quire.engine.startup.vocabulary) need the bytes of a token before it is sampled. Where a
decoder depends on neighbours, the bytes are those after another token.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

from quire.errors import ConfigError
from quire.text.tokenizing.backends import TransformersBackend
from quire.text.tokenizing.token_pieces import TokenPiece, byte_level_decoder
from quire.text.tokenizing.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_LOOKING = re.compile(r"(?!<0x..>)<[^<>\s]+>|\[[^\[\]\s]+\]")
_REPLACEMENT_CHAR = "\ufffd"


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """id -> name of tokens that are not text: special tokens, and added tokens that
    look like marks (`<tool_call>`), flagged as special or not."""
    backend = tokenizer.backend
    looks = {
        i: name for i, name in backend.added_tokens.items() if _SPECIAL_LOOKING.fullmatch(name)
    }
    flagged = {*backend.special_ids, *tokenizer.all_special_ids}
    return looks | {i: backend.id_to_token(i) or "" for i in flagged}


def build_token_bytes(tokenizer: Tokenizer, special: Mapping[int, str]) -> list[bytes]:
    """Bytes by id, from 0 to the highest. A special token's are its name's."""
    made = [b""] * (tokenizer.max_token_id + 1)
    make = _piece_decoder(tokenizer)
    for token, i in tokenizer.get_vocab().items():
        piece = special[i] if i in special else make(token, i)
        made[i] = piece if isinstance(piece, bytes) else piece.encode("utf-8", "ignore")
    return made


class TokenStarts:
    """Index of a vocabulary by the first byte of each token that is not whitespace."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """tokens: bytes by id."""
        self._by_first: defaultdict[bytes, list[tuple[bytes, int]]] = defaultdict(list)
        for i, token in enumerate(tokens):
            text = token.lstrip()
            if token:
                self._by_first[text[:1]].append((text, i))
        self.whitespace_ids = tuple(i for _, i in self._by_first.pop(b"", ()))

    def ids_before(self, literals: Collection[str]) -> tuple[int, ...]:
        """Tokens with which a text of whitespace and one of these literals can continue."""
        found = set()
        for literal in (one.encode() for one in literals):
            for text, i in self._by_first.get(literal[:1], ()):
                if text.startswith(literal) or literal.startswith(text):
                    found.add(i)
        return tuple(sorted(found))


@lru_cache(maxsize=4)
def token_starts(tokenizer: Tokenizer) -> TokenStarts:
    """The index of a tokenizer's tokens."""
    return TokenStarts(build_token_bytes(tokenizer, special_tokens(tokenizer)))


def _piece_decoder(tokenizer: Tokenizer) -> Callable[[str, int], TokenPiece]:
    if tokenizer.pieces is not None:
        pieces = tokenizer.pieces
        return lambda token, i: pieces[i]
    vocab = tokenizer.get_vocab()
    if isinstance(tokenizer.backend, TransformersBackend):
        raw = tokenizer.backend.tokenizer.convert_ids_to_tokens(0)
        if isinstance(raw, bytes):  # tokenizers over tiktoken keep byte strings
            of = tokenizer.backend.tokenizer.convert_ids_to_tokens
            return lambda token, i: bytes(of(i)) if isinstance(of(i), bytes) else str(of(i))
        if "<0x0A>" in vocab:
            return _sentencepiece
        if "Ġ" in vocab:
            of_bytes = byte_level_decoder()
            return lambda token, i: of_bytes(token)
    return _decode_after_another(tokenizer)


def _sentencepiece(token: str, token_id: int) -> TokenPiece:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ")


def _decode_after_another(tokenizer: Tokenizer) -> Callable[[str, int], TokenPiece]:
    """What decoding yields more with the token behind another; nothing where that is no text."""
    plain = [
        (not token.isalpha(), i)
        for token, i in tokenizer.get_vocab().items()
        if token.isascii() and token.isalnum()
    ]
    if not plain:
        raise ConfigError(
            "no token of this tokenizer is plain letters, so the texts of its tokens, which "
            "structured output needs, cannot be determined"
        )
    first = min(plain)[1]
    start = tokenizer.backend.decode([first], False, True)

    def make(token: str, token_id: int) -> TokenPiece:
        text = tokenizer.backend.decode([first, token_id], False, True)
        return "" if _REPLACEMENT_CHAR in text or not text.startswith(start) else text[len(start) :]

    return make
