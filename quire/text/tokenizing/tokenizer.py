"""One interface for all tokenizers, with the method names of transformers.

`Tokenizer` adds named tokens, special tokens and clear errors to a backend
(quire.text.tokenizing.backends); its results do not depend on the backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from quire.errors import ConfigError, RequestError, Unsupported
from quire.text.templates.chat_template import ChatTemplate
from quire.text.templates.template_cache import TemplateCache
from quire.text.tokenizing import tokenizer_files
from quire.text.tokenizing.backends import (
    Side,
    TokenizerBackend,
    TokenizersBackend,
    clean_up_spaces,
    open_backend,
)
from quire.text.tokenizing.named_tokens import NamedToken, NamedTokenId
from quire.text.tokenizing.special_token_layout import SpecialTokenLayout
from quire.text.tokenizing.token_pieces import (
    TokenPieceTable,
    build_piece_table,
    longest_token_chars,
)

UNKNOWN_MAX_LENGTH = 10**30
_SIDES: dict[str, Side] = {"left": "left", "right": "right"}
ID_END = 2**32


class BatchEncoding(dict[str, Any]):
    """The result of calling a tokenizer: keys, or attributes, input_ids and attention_mask."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tokenizer:
    """Text to ids and back. Encoding and decoding change nothing, so threads may share one.

    Written after construction only by the user: named tokens, padding_side, chat_template.
    """

    bos_token, eos_token, unk_token = NamedToken(), NamedToken(), NamedToken()
    sep_token, pad_token, cls_token = NamedToken(), NamedToken(), NamedToken()
    mask_token = NamedToken()
    bos_token_id, eos_token_id = NamedTokenId("bos_token"), NamedTokenId("eos_token")
    unk_token_id, sep_token_id = NamedTokenId("unk_token"), NamedTokenId("sep_token")
    pad_token_id, cls_token_id = NamedTokenId("pad_token"), NamedTokenId("cls_token")
    mask_token_id = NamedTokenId("mask_token")

    def __init__(
        self,
        backend: TokenizerBackend,
        *,
        named: Mapping[str, str] | None = None,
        additional: Sequence[str] = (),
        templates: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        name_or_path: str = "",
    ) -> None:
        self.backend = backend
        self.named = dict(named or {})
        self.additional_special_tokens = list(additional)
        self.templates = TemplateCache(templates)
        self.name_or_path = name_or_path
        config = config or {}
        self.padding_side = str(config.get("padding_side") or "right")
        self.truncation_side = str(config.get("truncation_side") or "right")
        self.model_max_length = _length(config.get("model_max_length"))
        self.clean_up_tokenization_spaces = bool(config.get("clean_up_tokenization_spaces"))
        self.pieces: TokenPieceTable | None = build_piece_table(backend)
        self._decoded: dict[int, str] = {}
        self._longest: int | None = None
        self._layouts: dict[bool, SpecialTokenLayout] = {}
        inputs = config.get("model_input_names")
        self._gives_types = not isinstance(inputs, list) or "token_type_ids" in inputs

    # -- encoding ---------------------------------------------------------------------------

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        truncation_side: str | None = None,
    ) -> list[int]:
        """Ids of a text. With truncation, at most max_length (special tokens included)."""
        if not isinstance(text, str):
            raise RequestError(f"encode() takes text, got a {type(text).__name__}", param="prompt")
        _refuse_surrogates(text)
        if not truncation:
            return self.backend.encode(text, add_special_tokens)
        most = self.model_max_length if max_length is None else max_length
        side = _side("truncation_side", truncation_side or self.truncation_side)
        return self.backend.encode_truncated(text, add_special_tokens, min(most, ID_END), side)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = False
    ) -> list[list[int]]:
        """Ids of several texts, tokenized in parallel.

        Raises RequestError for the batch: encode() of each text finds which one it is.
        """
        for text in texts:
            _refuse_surrogates(text)
        return self.backend.encode_batch(texts, add_special_tokens)

    def special_token_layout(self, *, pair: bool = False) -> SpecialTokenLayout:
        """What surrounds one text, or two that are given together. Raises Unsupported."""
        found = self._layouts.get(pair)
        if found is None:
            try:
                found = self._layouts[pair] = self.backend.special_tokens(pair)
            except ValueError as error:
                message = f"this tokenizer's special tokens cannot be located ({error})"
                raise Unsupported(f"{message}: send token ids", param="prompt") from None
            if not self._gives_types:
                found = self._layouts[pair] = found.without_types()
        return found

    def cut_text(self, text: str, max_tokens: int, side: str | None = None) -> str:
        """Drop text from a side (None: truncation_side) so that max_tokens remain."""
        _refuse_surrogates(text)
        side = _side("truncation_side", side or self.truncation_side)
        return self.backend.cut_text(text, max_tokens, side)

    def max_chars(self, num_tokens: int) -> int | None:
        """Most characters of a text of so many tokens. None: there is no bound."""
        longest = self.longest_token_chars
        return None if longest is None else num_tokens * longest

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool = True,
    ) -> BatchEncoding:
        """Ids of one text, or of each of several: {"input_ids": …, "attention_mask": …}."""
        if return_tensors is not None:
            raise Unsupported(
                f"return_tensors={return_tensors!r}: this tokenizer gives lists; make a tensor of "
                "the input_ids yourself",
                param="return_tensors",
            )
        many = not isinstance(text, str)
        texts = list(text) if many else [str(text)]
        rows = [self.encode(one, add_special_tokens, truncation, max_length) for one in texts]
        masks = [[1] * len(row) for row in rows]
        if padding not in (False, "do_not_pad"):
            longest = max_length if padding == "max_length" else max(map(len, rows), default=0)
            rows, masks = self._padded(rows, longest or 0), self._padded(masks, longest or 0, 0)
        encoded = BatchEncoding(input_ids=rows if many else rows[0])
        if return_attention_mask:
            encoded["attention_mask"] = masks if many else masks[0]
        return encoded

    def _padded(
        self, rows: list[list[int]], length: int, pad: int | None = None
    ) -> list[list[int]]:
        pad = self.pad_token_id if pad is None else pad
        if pad is None:
            raise RequestError(
                "padding needs a pad token: set tokenizer.pad_token", param="padding"
            )
        left = _side("padding_side", self.padding_side) == "left"
        fills = [[pad] * (length - len(row)) for row in rows]
        return [fill + row if left else row + fill for row, fill in zip(rows, fills)]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """The tokens of a text, as the vocabulary writes them."""
        _refuse_surrogates(text)
        return self.backend.tokens(text, add_special_tokens)

    # -- decoding ---------------------------------------------------------------------------

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of ids. An id that no token has adds nothing."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        try:
            text = self.backend.decode(ids, skip_special_tokens, spaces_between_special_tokens)
        except (OverflowError, TypeError):
            bad = next((i for i in ids if not isinstance(i, int) or not 0 <= i < ID_END), None)
            raise RequestError(
                f"token ids must be integers in [0, {ID_END}), got {bad!r}", param="token_ids"
            ) from None
        clean_up = clean_up_tokenization_spaces
        if self.clean_up_tokenization_spaces if clean_up is None else clean_up:
            return clean_up_spaces(self.backend, text)
        return text

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def decode_token(self, token_id: int) -> str:
        """decode([id]), remembered: what logprobs show for a token."""
        found = self._decoded.get(token_id)
        if found is None:
            found = self._decoded[token_id] = self.decode([token_id])
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token adds to a text; they may be part of a character. Where the decoder
        depends on neighbours, the bytes of the token's text by itself."""
        piece = None if self.pieces is None else self.pieces[token_id]
        return piece if isinstance(piece, bytes) else self.decode_token(token_id).encode()

    # -- the vocabulary ---------------------------------------------------------------------

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...
    @overload
    def convert_ids_to_tokens(
        self, ids: Sequence[int], skip_special_tokens: bool = False
    ) -> list[str]: ...
    def convert_ids_to_tokens(
        self, ids: int | Sequence[int], skip_special_tokens: bool = False
    ) -> str | list[str]:
        if isinstance(ids, int):
            return self._token(ids)
        skipped = self.backend.special_ids if skip_special_tokens else frozenset()
        return [self._token(i) for i in ids if i not in skipped]

    def _token(self, token_id: int) -> str:
        token = self.backend.id_to_token(token_id) if 0 <= token_id < ID_END else None
        if token is None:
            raise RequestError(
                f"no token has the id {token_id}; the ids of this tokenizer are in "
                f"[0, {self.max_token_id + 1})",
                param="token_ids",
            )
        return token

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Id of a token (ids of several); the unknown token's id, or None, for what is no token."""
        if isinstance(tokens, str):
            found = self.backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.backend.join(tokens)

    def get_vocab(self) -> dict[str, int]:
        return self.backend.vocab()

    def get_added_vocab(self) -> dict[str, int]:
        return {token: i for i, token in self.backend.added_tokens.items()}

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added ones; len() counts those too."""
        return self.backend.size(with_added=False)

    def __len__(self) -> int:
        return self.backend.size(with_added=True)

    @property
    def max_token_id(self) -> int:
        return max(self.backend.vocab().values(), default=0)

    @property
    def longest_token_chars(self) -> int | None:
        """Maximum of characters of one id's text; None if there is no bound."""
        if self._longest is None:
            self._longest = longest_token_chars(self.backend)
        return self._longest or None

    @property
    def is_fast(self) -> bool:
        return isinstance(self.backend, TokenizersBackend)

    # -- special tokens ---------------------------------------------------------------------

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        extra = self.additional_special_tokens
        return self.named | ({"additional_special_tokens": extra} if extra else {})

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys([*self.named.values(), *self.additional_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        ids = (self.backend.token_to_id(token) for token in self.all_special_tokens)
        return [i for i in ids if i is not None]

    def name_token(self, name: str, token: str | None) -> None:
        """Make `token`, which must be in the vocabulary, the one called `name`."""
        if token is None:
            self.named.pop(name, None)
            return
        if self.backend.token_to_id(token) is None:
            raise RequestError(
                f"{name} must be a token of the vocabulary, {token!r} is not", param=name
            )
        self.named[name] = token

    # -- chat -------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        return self.templates.named.get("default")

    @chat_template.setter
    def chat_template(self, source: str | None) -> None:
        if source is None:
            self.templates.named.pop("default", None)
        else:
            self.templates.named["default"] = source

    def get_chat_template(self, chat_template: str | None = None, tools: object = None) -> str:
        """The text of the template that applies (TemplateCache.select)."""
        return self.templates.select(chat_template, tools)

    def template(self, chat_template: str | None = None, tools: object = None) -> ChatTemplate:
        """The compiled template, which is cached."""
        return self.templates.get(
            self.templates.select(chat_template, tools), self.special_tokens_map
        )

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        return_tensors: str | None = None,
        truncation: bool = False,
        max_length: int | None = None,
        **variables: Any,
    ) -> Any:
        """A conversation (or several) as ids, or as text with tokenize=False.

        variables: values for the template, e.g. enable_thinking=False. The messages go to the
        template as they are.
        """
        if len(conversation) > 0 and isinstance(conversation[0], list | tuple):
            texts = [
                self.apply_chat_template(
                    one, tools, documents, chat_template, add_generation_prompt,
                    continue_final_message, tokenize=False, **variables,
                )
                for one in conversation
            ]  # fmt: skip
            return self._chat_ids(
                texts, tokenize, return_dict, return_tensors, truncation, max_length
            )
        text = self.template(chat_template, tools).render_as_is(
            conversation,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=documents,
            variables=variables,
        )
        return self._chat_ids(text, tokenize, return_dict, return_tensors, truncation, max_length)

    def _chat_ids(
        self, text: str | list[str], tokenize: bool, return_dict: bool,
        return_tensors: str | None, truncation: bool, max_length: int | None,
    ) -> Any:  # fmt: skip
        if not tokenize:
            return text
        encoded = self(
            text,
            add_special_tokens=False,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
        )
        return encoded if return_dict else encoded["input_ids"]

    def __repr__(self) -> str:
        kind = "fast" if self.is_fast else "slow"
        return f"Tokenizer({self.name_or_path!r}, {kind}, {len(self)} tokens)"


def _length(said: Any) -> int:
    """In tokens; 10**30, as number or text, or a missing value means no limit."""
    try:
        return int(said or UNKNOWN_MAX_LENGTH)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"model_max_length must be a number, got {said!r:.80}") from None


def _side(name: str, given: str) -> Side:
    if given in _SIDES:
        return _SIDES[given]
    raise RequestError(f"{name} must be 'left' or 'right', got {given!r}", param=name)


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise RequestError(
            f"the text holds half a surrogate pair (U+{ord(text[e.start]):04X} at character "
            f"{e.start}), which is not a character; send valid Unicode",
            param="prompt",
        ) from None


def load_tokenizer(
    folder: str | Path,
    mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    *,
    lower_case: bool = False,
) -> Tokenizer:
    """The tokenizer of a model's folder. lower_case: of every text, whatever its files state.

    mode: "auto", "hf" and "fast" read tokenizer.json where there is one, "slow" never does. Where
    there is none "auto" reads tekken.json, and "mistral" reads nothing else.
    Raises: ConfigError if there is none, or it is Python code that is not trusted.
    """
    folder = Path(folder)
    files = tokenizer_files.read_tokenizer_files(folder)
    backend, found = open_backend(
        files,
        mode=mode,
        trust_remote_code=trust_remote_code,
        revision=revision,
        lower_case=lower_case,
    )
    return Tokenizer(
        backend,
        named=found | {name: token.content for name, token in files.named_tokens.items()},
        additional=[token.content for token in files.additional_tokens],
        templates=files.templates,
        config=files.config,
        name_or_path=str(folder),
    )
