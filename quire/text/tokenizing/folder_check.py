"""Folder check: which tokenizer a folder has, before anything is loaded. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from quire.config.json_file import missing_content, read_json_object
from quire.errors import ConfigError

MODES = ("auto", "hf", "fast", "slow", "mistral")
TEKKEN = "tekken.json"
VOCABULARY_FILES = (
    *("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "*.spm", "merges.txt", TEKKEN),
    *("*.vocab", "*.bpe", "spiece*", "source.spm"),
)
"""Patterns of the files that transformers makes a tokenizer of."""
NO_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Classes of transformers whose tokens are bytes or characters."""

BERT_VOCABULARY = "vocab.txt"
WORDPIECE_CLASSES = tuple(
    f"{kind}Tokenizer{fast}" for kind in ("Bert", "DistilBert", "Electra") for fast in ("", "Fast")
)
"""Classes of transformers that this tokenizer is."""
WORDPIECE_TYPES = ("bert", "distilbert", "electra", "ernie")
"""Types of models that have it, if no file names a class."""

TokenizerSource = Literal["tokenizers", "tekken", "wordpiece", "code", "transformers"]


def tokenizer_source(
    folder: Path, mode: str = "auto", *, trust_remote_code: bool = False
) -> TokenizerSource:
    """Return what makes the tokenizer of a folder. mode: see load_tokenizer.

    Raises: ConfigError (no folder; no tokenizer; a file without content; code without trust).
    """
    if mode not in MODES:
        raise ConfigError(f"tokenizer_mode must be one of {', '.join(MODES)}, got {mode!r}")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; a tokenizer is loaded from a local folder")
    if mode == "mistral" and not (folder / TEKKEN).is_file():
        raise ConfigError(
            f"there is no {TEKKEN} in {folder}, which tokenizer_mode=mistral reads; leave "
            "tokenizer_mode out to read tokenizer.json"
        )
    if (folder / "tokenizer.json").is_file() and mode not in ("slow", "mistral"):
        return _with_content("tokenizers", folder / "tokenizer.json")
    settings = _read(folder / "tokenizer_config.json")
    if _has_code(settings) or _has_code(_read(folder / "config.json")):
        if not trust_remote_code:
            raise ConfigError(
                f"the tokenizer in {folder} is Python code of the model's repository; read it and "
                "set trust_remote_code=True to run it"
            )
        return "code"
    if mode == "mistral" or (mode == "auto" and (folder / TEKKEN).is_file()):
        return _with_content("tekken", folder / TEKKEN)
    model_type = _read(folder / "config.json").get("model_type")
    if mode != "slow" and _is_wordpiece(folder, settings, model_type):
        return _with_content("wordpiece", folder / BERT_VOCABULARY)
    files = [path for path in folder.iterdir() if any(map(path.match, VOCABULARY_FILES))]
    if not files and settings.get("tokenizer_class") not in NO_VOCABULARY:
        raise ConfigError(
            f"there is no tokenizer in {folder}: copy the model's tokenizer.json there, name a "
            "folder or model that has one (--tokenizer), or work with token ids "
            "(--skip-tokenizer-init)"
        )
    return _with_content("transformers", *files)


def _is_wordpiece(folder: Path, settings: Mapping[str, Any], model_type: object) -> bool:
    """Whether a folder's tokenizer is BERT's. settings: of tokenizer_config.json."""
    if not (folder / BERT_VOCABULARY).is_file():
        return False
    stated = settings.get("tokenizer_class")
    return model_type in WORDPIECE_TYPES if stated is None else stated in WORDPIECE_CLASSES


def _with_content(source: TokenizerSource, *paths: Path) -> TokenizerSource:
    for path in paths:
        if path.is_file() and (why := missing_content(path)):
            raise ConfigError(f"{path} {why}")
    return source


def _read(path: Path) -> Mapping[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _has_code(settings: Mapping[str, Any]) -> bool:
    """Whether a file names the tokenizer's class. Older ones have a list in place of names."""
    stated = settings.get("auto_map")
    return isinstance(stated, list) or (isinstance(stated, Mapping) and "AutoTokenizer" in stated)
