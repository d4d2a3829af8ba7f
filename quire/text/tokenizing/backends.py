"""Two libraries behind one interface: `tokenizers` (fast, from tokenizer.json) and `transformers`
(everything else: SentencePiece, tiktoken, vocab.json, code of the model's repository).

quire.text.tokenizing.tokenizer adds names of special tokens, chat templates and error messages.
A backend is immutable, so threads may share it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from tokenizers import AddedToken, Encoding, normalizers
from tokenizers import Tokenizer as FastTokenizer

from quire.config.json_file import MAX_BYTES, check_bytes
from quire.errors import ConfigError, RequestError
from quire.text.tokenizing.folder_check import BERT_VOCABULARY, TEKKEN, tokenizer_source
from quire.text.tokenizing.special_token_layout import SpecialTokenLayout
from quire.text.tokenizing.tekken import TEKKEN_TOKENS, load_tekken
from quire.text.tokenizing.tokenizer_files import NAMED_TOKENS, TokenizerFiles
from quire.text.tokenizing.wordpiece import BERT_TOKENS, load_wordpiece

Side = Literal["left", "right"]
LONG_TEXT_CHARS = 4096
"""Characters of a text that takes more than a millisecond or two."""
_PROBES = ("a", "the", "1", ".", "\u4e00")
_EXTRA_SPACE = re.compile(r" ([.?!,]|n't|'m|'s|'ve|'re)")


PANIC_MESSAGE = (
    "the tokenizer failed on this text: a regular expression of tokenizer.json backtracks without "
    "end; change the text, or fix the model's tokenizer"
)


def is_panic(error: BaseException) -> bool:
    """It is one of Rust's, for which Python's libraries have no class that can be imported."""
    return type(error).__name__ == "PanicException"


class TokenizerBackend(Protocol):
    """Text to ids and back. Ids without a token decode to nothing."""

    special_ids: frozenset[int]
    added_tokens: dict[int, str]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def encode_truncated(
        self, text: str, add_special_tokens: bool, most: int, side: Side
    ) -> list[int]:
        """As encode; ids of the text are dropped from `side` so that at most `most` remain."""
        ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of several texts. Raises RequestError."""
        ...

    def special_tokens(self, pair: bool) -> SpecialTokenLayout:
        """Return what surrounds one text, or two. Raises ValueError if that cannot be found."""
        ...

    def cut_text(self, text: str, most: int, side: Side) -> str:
        """Drop text from `side` so that at most `most` tokens remain."""
        ...

    def tokens(self, text: str, add_special_tokens: bool) -> list[str]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces: bool) -> str: ...
    def join(self, tokens: list[str]) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    def id_to_token(self, token_id: int) -> str | None: ...
    def vocab(self) -> dict[str, int]: ...
    def size(self, with_added: bool) -> int: ...


class TokenizersBackend:
    """Over tokenizers.Tokenizer."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        tokenizer.no_truncation()  # a file may carry the settings of a training run
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        added_tokens = tokenizer.get_added_tokens_decoder()
        self.added_tokens = {i: token.content for i, token in added_tokens.items()}
        self.special_ids = frozenset(i for i, token in added_tokens.items() if token.special)
        self._affixes = tokenizer.num_special_tokens_to_add(False)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        """`encode` keeps the GIL however long it takes; batches give it up, for some overhead.

        Raises RequestError.
        """
        try:
            if len(text) < LONG_TEXT_CHARS:
                return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            made = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return made[0]
        except BaseException as error:
            if not is_panic(error):
                raise
            raise RequestError(PANIC_MESSAGE, param="prompt") from None

    def encode_truncated(
        self, text: str, add_special_tokens: bool, most: int, side: Side
    ) -> list[int]:
        encoding = self._encoding(text, False)
        affixes = self._affixes if add_special_tokens else 0
        # `truncate` names the side it drops from "left" as well
        encoding.truncate(max(most - affixes, 0), direction=side)
        if add_special_tokens:
            encoding = self.tokenizer.post_process(encoding, None, True)
        ids: list[int] = encoding.ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        if len(texts) == 1:
            return [self.encode(texts[0], add_special_tokens)]
        try:
            made = self.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise RequestError(PANIC_MESSAGE, param="prompt") from None
        return [encoding.ids for encoding in made]

    def special_tokens(self, pair: bool) -> SpecialTokenLayout:
        if not self.tokenizer.num_special_tokens_to_add(pair) and not pair:
            return SpecialTokenLayout()
        for probe in _PROBES:
            found = self.tokenizer.encode(probe, probe if pair else None)
            if 0 in found.sequence_ids and (1 in found.sequence_ids or not pair):
                return SpecialTokenLayout.find(found.ids, found.type_ids, found.sequence_ids)
        raise ValueError("no text for a probe has tokens")

    def cut_text(self, text: str, most: int, side: Side) -> str:
        spans = self.tokenizer.encode(text, add_special_tokens=False).offsets
        if len(spans) <= most:
            return text
        return text[spans[len(spans) - most][0] :] if side == "left" else text[: spans[most][0]]

    def tokens(self, text: str, add_special_tokens: bool) -> list[str]:
        encoding = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.tokens)  # an unknown piece shows as itself

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces: bool) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def join(self, tokens: list[str]) -> str:
        decoder = self.tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def token_to_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self.tokenizer.id_to_token(token_id)

    def vocab(self) -> dict[str, int]:
        return self.tokenizer.get_vocab(with_added_tokens=True)

    def size(self, with_added: bool) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=with_added)


class TransformersBackend:
    """Over a tokenizer of transformers that is written in Python."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.added_tokens = {int(i): str(t) for i, t in tokenizer.added_tokens_decoder.items()}
        marked = {int(i) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special_ids = frozenset(marked | set(tokenizer.all_special_ids))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_truncated(
        self, text: str, add_special_tokens: bool, most: int, side: Side
    ) -> list[int]:
        ids = self.encode(text, False)
        affixes = self.tokenizer.num_special_tokens_to_add() if add_special_tokens else 0
        keep = max(most - affixes, 0)
        ids = ids[len(ids) - min(keep, len(ids)) :] if side == "left" else ids[:keep]
        return list(self.tokenizer.build_inputs_with_special_tokens(ids)) if affixes else ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def special_tokens(self, pair: bool) -> SpecialTokenLayout:
        texts = [[-1], [-2]][: 1 + pair]
        ids = self.tokenizer.build_inputs_with_special_tokens(*texts)
        types = [0] * len(ids)
        if "token_type_ids" in self.tokenizer.model_input_names:
            types = self.tokenizer.create_token_type_ids_from_sequences(*texts)
        return SpecialTokenLayout.find(ids, types, [{-1: 0, -2: 1}.get(i) for i in ids])

    def cut_text(self, text: str, most: int, side: Side) -> str:
        ids = self.encode(text, False)
        if len(ids) <= most:
            return text
        kept = ids[len(ids) - most :] if side == "left" else ids[:most]
        return self.decode(kept, False, True)

    def tokens(self, text: str, add_special_tokens: bool) -> list[str]:
        found = self.tokenizer.tokenize(text, add_special_tokens=add_special_tokens)
        return [str(token) for token in found]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces: bool) -> str:
        known = [i for i in ids if self.id_to_token(i) is not None]
        text: str = self.tokenizer.decode(
            known,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces,
            clean_up_tokenization_spaces=False,
        )
        return text

    def join(self, tokens: list[str]) -> str:
        return str(self.tokenizer.convert_tokens_to_string(tokens))

    def token_to_id(self, token: str) -> int | None:
        found = self.tokenizer.convert_tokens_to_ids(token)
        if found is None or (found == self.tokenizer.unk_token_id and token not in self.vocab()):
            return None
        return int(found)

    def id_to_token(self, token_id: int) -> str | None:
        if token_id >= len(self.tokenizer) and token_id not in self.added_tokens:
            return None
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(token, bytes):  # tokenizers over tiktoken keep byte strings
            return token.decode("utf-8", errors="replace")
        return None if token is None else str(token)

    def vocab(self) -> dict[str, int]:
        return {str(token): int(i) for token, i in self.tokenizer.get_vocab().items()}

    def size(self, with_added: bool) -> int:
        return len(self.tokenizer) if with_added else int(self.tokenizer.vocab_size)


def clean_up_spaces(backend: TokenizerBackend, text: str) -> str:
    """Without the spaces that WordPiece puts before punctuation (clean_up_tokenization_spaces).

    Not for BPE, whose tokens hold real spaces.
    """
    is_bpe = (
        isinstance(backend, TokenizersBackend) and type(backend.tokenizer.model).__name__ == "BPE"
    )
    return text if is_bpe else _EXTRA_SPACE.sub(r"\1", text.replace(" ' ", "'"))


def load_fast(path: Path, files: TokenizerFiles) -> TokenizersBackend:
    """From a tokenizer.json and the settings beside it.

    The file's own post-processor decides whether BOS and EOS are added; add_bos_token of the
    settings is for tokenizers in Python.
    """
    with _bad_file_as_config_error(path, "the tokenizers library"):
        check_bytes(path, MAX_BYTES)
        tokenizer = FastTokenizer.from_file(str(path))
        _add_tokens(tokenizer, files)
    if files.config.get("split_special_tokens"):
        tokenizer.encode_special_tokens = True
    return TokenizersBackend(tokenizer)


def _load_wordpiece(files: TokenizerFiles, named: dict[str, str]) -> TokenizersBackend:
    with _bad_file_as_config_error(files.folder / BERT_VOCABULARY, "BERT"):
        tokenizer = load_wordpiece(files.folder, files.config, named)
        own = [AddedToken(token, special=True, normalized=False) for token in named.values()]
        tokenizer.add_tokens(own)
        _add_tokens(tokenizer, files)
    return TokenizersBackend(tokenizer)


@contextmanager
def _bad_file_as_config_error(path: Path, of: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except BaseException as e:  # the library raises bare Exception for a bad file, or panics
        if not isinstance(e, Exception) and not is_panic(e):
            raise
        why = f"{type(e).__name__}: {e}" if isinstance(e, LookupError) else str(e)
        raise ConfigError(f"{path} is not a tokenizer of {of}: {why:.1000}") from None


def _add_tokens(tokenizer: FastTokenizer, files: TokenizerFiles) -> None:
    """Tokens that only the settings name; a token of both has the settings' flags."""
    present = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    wanted = [token for token in files.added_tokens if repr(token) not in present]
    names = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    names |= {token.content for token in wanted}
    for token in (*files.named_tokens.values(), *files.additional_tokens):
        if token.content not in names:
            wanted.append(token)
            names.add(token.content)
    special = {token.content for token in (*files.named_tokens.values(), *files.additional_tokens)}
    tokenizer.add_tokens([_marked(token, token.content in special) for token in wanted])


def _marked(token: AddedToken, special: bool) -> AddedToken:
    if special:
        token.special = True
    return token


def open_backend(
    files: TokenizerFiles,
    *,
    mode: str,
    trust_remote_code: bool,
    revision: str | None,
    lower_case: bool = False,
) -> tuple[TokenizerBackend, dict[str, str]]:
    """Return (the backend of this folder, special tokens by name that only its files have)

    mode, lower_case: see load_tokenizer.
    """
    backend, named = _open(files, mode, trust_remote_code, revision)
    if lower_case and isinstance(backend, TokenizersBackend):
        _add_lowercase(backend.tokenizer)
    elif lower_case:
        raise ConfigError(
            f"do_lower_case in {files.folder} needs a tokenizer.json: tokenizers in Python do not "
            "support it"
        )
    return backend, named


def _add_lowercase(tokenizer: FastTokenizer) -> None:
    """Make texts lower case before anything else; special tokens stay as they are."""
    own: Any = tokenizer.normalizer
    steps = [own] if own is not None else []
    if type(own) is normalizers.Sequence:
        steps = [*cast("Sequence[Any]", own)]
    if not any(isinstance(one, normalizers.Lowercase) or _lowers(one) for one in steps):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])


def _lowers(step: normalizers.Normalizer) -> bool:
    return isinstance(step, normalizers.BertNormalizer) and step.lowercase


def _open(
    files: TokenizerFiles, mode: str, trust_remote_code: bool, revision: str | None
) -> tuple[TokenizerBackend, dict[str, str]]:
    source = tokenizer_source(files.folder, mode, trust_remote_code=trust_remote_code)
    if source == "tokenizers":
        return load_fast(files.folder / "tokenizer.json", files), {}
    if source == "tekken":
        tekken = files.folder / TEKKEN
        with _bad_file_as_config_error(tekken, "Mistral"):
            return TokenizersBackend(load_tekken(tekken)), dict(TEKKEN_TOKENS)
    if source == "wordpiece":
        named = BERT_TOKENS | {name: one.content for name, one in files.named_tokens.items()}
        return _load_wordpiece(files, named), named
    slow = mode == "slow"
    made = _load_with_transformers(files.folder, trust_remote_code, revision, fast=not slow)
    named = {k: str(v) for k, v in made.special_tokens_map.items() if k in NAMED_TOKENS}
    return (
        TokenizersBackend(made.backend_tokenizer)
        if made.is_fast and not slow
        else TransformersBackend(made)
    ), named


def _load_with_transformers(
    folder: Path, trust_remote_code: bool, revision: str | None, *, fast: bool
) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise ConfigError(f"{folder} has no tokenizer.json; reading it needs: {e}") from None
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, revision=revision, use_fast=fast
        )
    except Exception as e:
        hint = " (the package named may have to be installed)" if _is_import_error(e) else ""
        why = " ".join(str(e).split())
        raise ConfigError(
            f"transformers cannot make a tokenizer of {folder}{hint}: {why:.400}"
        ) from e


def _is_import_error(error: BaseException | None) -> bool:
    return any(isinstance(one, ImportError) for one in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
