"""Makes the tokenizer.json and tokenizer_config.json of a GGUF file's metadata.

    tokenizer.ggml.model   "gpt2": BPE over bytes, with merges and `pre`, the way to split a text
                           "llama": SentencePiece; merges follow from the scores of tokens

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError

Json = dict[str, Any]

UNKNOWN, CONTROL, USER, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Kinds of tokens, as numbered in tokenizer.ggml.token_type."""

_SPACE = "\u2581"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_case(ending: str, digits: str) -> str:
    head = r"[^\r\n\p{L}\p{N}]?"
    return f"{head}{_UPPER}*{_LOWER}+{ending}|{head}{_UPPER}+{_LOWER}*{ending}|{digits}{_SLASHES}"


_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How one value of `pre` splits texts, and what follows from it."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is not merged from parts
    begins: bool = False  # texts begin with the first token, if the file states nothing
    normalizer: str | None = None


_SPLITS: dict[str, _Split] = {
    **dict.fromkeys(
        ("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "gpt-neox", "dbrx-gpt2", "poro-chat"),
        _Split((_GPT2,)),
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"),
        _Split((_LLAMA3,), whole_words=True, begins=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split((_LLAMA3,))),
    **dict.fromkeys(
        ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"),
        _Split((_QWEN2,), normalizer="NFC"),
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell"), _Split((r"\p{N}", _GPT2))
    ),
    **dict.fromkeys(("gpt-4o", "llama4"), _Split((_by_case(_ENDINGS + "?", r"\p{N}{1,3}"),))),
    "tekken": _Split((_by_case("", r"\p{N}"),), whole_words=True, begins=True),
    "deepseek-v3": _Split(_DEEPSEEK3),
    "deepseek-coder": _Split(_DEEPSEEK_CODER),
}


def tokenizer_of(metadata: Mapping[str, Any]) -> tuple[Json, Json]:
    """Return (tokenizer.json, tokenizer_config.json). Raises ConfigError for what is not read."""
    facts = _read(metadata)
    if facts.model == "gpt2":
        tokenizer, begins = _byte_level(facts, metadata)
    elif facts.model == "llama":
        tokenizer, begins = _sentencepiece(facts, metadata)
    else:
        raise ConfigError(
            f"tokenizer.ggml.model is {facts.model!r:.40}; supported: gpt2, llama; give the "
            "model's tokenizer (--tokenizer)"
        )
    tokenizer["added_tokens"] = _added(facts)
    named = _named(facts, metadata)
    starts = bool(metadata.get("tokenizer.ggml.add_bos_token", begins))
    ends = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    tokenizer["post_processor"] = _post_processor(
        named.get("bos_token") if starts else None, named.get("eos_token") if ends else None, facts
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": starts,
        "add_eos_token": ends,
        **named,
    }
    if templates := _templates(metadata):
        settings["chat_template"] = templates
    return {"version": "1.0", "truncation": None, "padding": None, **tokenizer}, settings


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    model: str
    tokens: tuple[str, ...]  # each once
    kinds: tuple[int, ...]
    architecture: str

    def is_padding(self, number: int) -> bool:
        """Whether a number has no token: the embedding has more rows than the vocabulary."""
        return self.kinds[number] == UNUSED and self.tokens[number] == f"[PAD{number}]"

    def of_kind(self, *kinds: int) -> list[int]:
        return [i for i, kind in enumerate(self.kinds) if kind in kinds]


def _read(metadata: Mapping[str, Any]) -> _Vocabulary:
    prefix = "tokenizer.ggml."
    model, tokens = metadata.get(f"{prefix}model"), metadata.get(f"{prefix}tokens")
    if not isinstance(tokens, list) or not all(isinstance(one, str) for one in tokens):
        raise ConfigError(
            "the file has no tokenizer.ggml.tokens; give the model's tokenizer (--tokenizer)"
        )
    kinds = metadata.get(f"{prefix}token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ConfigError(f"{prefix}token_type has not one entry per token ({len(tokens)})")
    if len(set(tokens)) != len(tokens):
        raise ConfigError(f"{prefix}tokens has a token twice")
    return _Vocabulary(
        str(model), tuple(tokens), tuple(kinds), str(metadata.get("general.architecture"))
    )


def _byte_level(facts: _Vocabulary, metadata: Mapping[str, Any]) -> tuple[Json, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    split = _SPLITS.get(pre)
    if split is None:
        raise ConfigError(
            f"tokenizer.ggml.pre is {pre!r:.40}; supported: {', '.join(_SPLITS)}; give the model's "
            "tokenizer (--tokenizer)"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ConfigError("the file has no tokenizer.ggml.merges; give the model's tokenizer")
    pairs = [one.split(" ") if isinstance(one, str) else [] for one in merges]
    vocab = {token: i for i, token in enumerate(facts.tokens) if not facts.is_padding(i)}
    if bad := next((p for p in pairs if len(p) != 2 or "".join(p) not in vocab), None):
        raise ConfigError(f"tokenizer.ggml.merges has {' '.join(bad)!r:.60}, which makes no token")
    if any(len(one) != 2 for one in pairs):
        raise ConfigError("tokenizer.ggml.merges has an entry that is not two texts")
    steps: list[Json] = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one in split.patterns
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append(bytes_ | {"use_regex": False})
    model = _bpe(vocab, pairs) | {"ignore_merges": split.whole_words}
    return {
        "normalizer": {"type": split.normalizer} if split.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": bytes_ | {"use_regex": True},
        "model": model,
    }, split.begins


def _bpe(vocab: dict[str, int], merges: Sequence[Sequence[str]]) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": list(merges),
    }


def _sentencepiece(facts: _Vocabulary, metadata: Mapping[str, Any]) -> tuple[Json, bool]:
    """BPE whose merges are all ways to make a token of two, best scores first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(facts.tokens):
        raise ConfigError(
            f"tokenizer.ggml.scores has not one entry per token ({len(facts.tokens)})"
        )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    vocab = {}
    for i, token in enumerate(facts.tokens):
        if facts.is_padding(i):
            continue
        only_spaces = token and not token.strip(" ") and facts.kinds[i] != USER
        vocab[_SPACE * len(token) if only_spaces else token] = i
    merges = _merges(vocab, scores, frozenset(facts.of_kind(UNKNOWN, CONTROL, BYTE)))
    unknown = facts.of_kind(UNKNOWN)
    model = _bpe(vocab, merges) | {"byte_fallback": bool(facts.of_kind(BYTE)), "fuse_unk": True}
    if unknown:
        model["unk_token"] = facts.tokens[unknown[0]]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    undo: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: Json = replace
    if prefixed:
        prepend = {"type": "Prepend", "prepend": _SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prepend, replace]}
        undo.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": undo},
        "model": model,
    }, True


def _merges(
    vocab: Mapping[str, int], scores: Sequence[float], without: frozenset[int]
) -> list[tuple[str, str]]:
    found = []
    for token, number in vocab.items():
        if number in without:
            continue
        for at in range(1, len(token)):
            left, right = vocab.get(token[:at]), vocab.get(token[at:])
            if left is not None and right is not None:
                found.append((-scores[number], left, right, token[:at], token[at:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _added(facts: _Vocabulary) -> list[Json]:
    """Control tokens are special; those of users are matched whole, and shown."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = (UNKNOWN, CONTROL) if facts.model == "llama" else (CONTROL,)
    return [
        {"id": i, "content": facts.tokens[i], **plain, "special": facts.kinds[i] in special}
        for i in facts.of_kind(USER, *special)
        if facts.tokens[i]
    ]


def _named(facts: _Vocabulary, metadata: Mapping[str, Any]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {}
    for ours, theirs in names.items():
        number = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if type(number) is int and 0 <= number < len(facts.tokens):
            found[ours] = facts.tokens[number]
    return found


def _post_processor(first: str | None, last: str | None, facts: _Vocabulary) -> Json | None:
    if first is None and last is None:
        if facts.model == "llama":
            return None
        return {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }

    def around(sequence: str, kind: int) -> list[Json]:
        token = [{"SpecialToken": {"id": one, "type_id": kind}} for one in (first, last) if one]
        middle = {"Sequence": {"id": sequence, "type_id": kind}}
        return [*token[: first is not None], middle, *token[first is not None :]]

    used = {one: facts.tokens.index(one) for one in (first, last) if one is not None}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            one: {"id": one, "ids": [number], "tokens": [one]} for one, number in used.items()
        },
    }


def _templates(metadata: Mapping[str, Any]) -> str | list[Json] | None:
    """One template, or several by name."""
    prefix = "tokenizer.chat_template"
    found = {
        key.removeprefix(prefix).lstrip(".") or "default": value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(value, str)
    }
    if found.keys() <= {"default"}:
        return found.get("default")
    return [{"name": name, "template": value} for name, value in found.items()]
