"""Settings of late interaction (ColBERT) in a model's files, in the three forms that there are.

sentence-transformers 6    query_expansion and lengths in sentence_bert_config.json, words that
                           do not count in the config of MultiVectorMask; markers are prompts
PyLate                     fields of config_sentence_transformers.json
ColBERT                    artifact.metadata, in a folder of the class HF_ColBERT
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.engine_config import DenseSection, LateInteractionSection
from quire.config.json_file import MAX_CONFIG_BYTES, read_json_object
from quire.config.sentence_transformers import FolderModules
from quire.errors import ConfigError

Json = Mapping[str, Any]
COLBERT_CLASS = "HF_ColBERT"
METADATA_FILE = "artifact.metadata"
QUERY_LENGTH = 32
"""Tokens of a query, if the files do not state them."""
_PYLATE_FIELDS = (
    *("query_prefix", "document_prefix", "query_length", "document_length", "skiplist_words"),
    *("do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens"),
)


def read_colbert_folder(folder: Path, hf: Json) -> FolderModules | None:
    """Read a folder of ColBERT itself, as if it were of PyLate. None: it is not one."""
    if COLBERT_CLASS not in (hf.get("architectures") or ()):
        return None
    file = folder / METADATA_FILE
    stated = read_json_object(file, MAX_CONFIG_BYTES) if file.is_file() else {}
    settings = {
        "query_prefix": stated.get("query_token_id") or "[unused0]",
        "document_prefix": stated.get("doc_token_id") or "[unused1]",
        "query_length": stated.get("query_maxlen") or QUERY_LENGTH,
        "document_length": stated.get("doc_maxlen"),
        "attend_to_expansion_tokens": bool(stated.get("attend_to_mask_tokens")),
        "skiplist_words": [*string.punctuation] if stated.get("mask_punctuation", True) else [],
    }
    dense = DenseSection(
        folder="",
        inputs=int(hf["hidden_size"]),
        outputs=_length(stated, "dim") or _length(hf, "dim") or 128,
        bias=False,
        activation="identity",
    )
    return FolderModules(kind="multi_vector", dense=(dense,), normalize=True, settings=settings)


def resolve_late_interaction(
    files: FolderModules, *, bidirectional: bool = True
) -> LateInteractionSection | None:
    """Return the section; None: the model is of another kind. Raises ConfigError."""
    if files.kind != "multi_vector":
        return None
    settings = files.settings
    is_pylate = any(key in settings for key in _PYLATE_FIELDS)
    expansion = files.transformer.get("query_expansion")
    if expansion is None and is_pylate and settings.get("do_query_expansion") is not False:
        attends = settings.get(
            "attend_to_expansion_tokens", settings.get("attend_to_mask_tokens", False)
        )
        expansion = {
            "strategy": "fixed",
            "attend": bool(attends),
            "length": settings.get("query_length") or QUERY_LENGTH,
        }
    lengths = {**settings, **files.transformer}
    query_length, expanded = _length(lengths, "query_length"), None
    if expansion is not None:
        expanded, query_length = _expansion_lengths(expansion, query_length)
        if not (bidirectional or expansion.get("attend")):
            raise ConfigError(
                "query_expansion: attend is false, which needs a model that attends in both "
                "directions; this one does not"
            )
    return LateInteractionSection(
        query_prefix=_text(settings, "query_prefix"),
        document_prefix=_text(settings, "document_prefix"),
        query_length=expanded,
        max_query_length=query_length,
        document_length=_length(lengths, "document_length"),
        expansion_token=None if expansion is None else _text(expansion, "token") or None,
        attends_to_expansion=expansion is not None and bool(expansion.get("attend")),
        skiplist=_skiplist(files, is_pylate),
    )


def _expansion_lengths(expansion: Any, limit: int | None) -> tuple[int, int | None]:
    """Return the tokens to which queries are expanded, and those to which they are cut."""
    strategy = expansion.get("strategy") if isinstance(expansion, Mapping) else None
    length = _length(expansion, "length") if strategy in ("fixed", "min") else None
    if length is None:
        raise ConfigError(
            "query_expansion must be an object with the strategy fixed or min and a length, got "
            f"{expansion!r:.120}"
        )
    if strategy == "fixed":
        return length, length
    return length, None if limit is None else max(limit, length)


def _skiplist(files: FolderModules, is_pylate: bool) -> tuple[str, ...]:
    """Return the tokens of documents that do not count. PyLate: punctuation, unless stated."""
    mask = files.mask
    if mask.get("keep_only_token_ids"):
        raise ConfigError("MultiVectorMask: keep_only_token_ids is for images; remove it")
    if mask.get("skiplist_tasks") not in (None, ["document"]):
        raise ConfigError(
            f"MultiVectorMask: skiplist_tasks is {mask['skiplist_tasks']!r:.80}; supported is "
            "['document']"
        )
    usual = [*string.punctuation] if is_pylate else []
    words = files.settings.get("skiplist_words", usual) if not mask else mask.get("skiplist_words")
    words = usual if words is None and not mask else words or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"skiplist_words must be a list of tokens, got {words!r:.80}")
    return tuple(words)


def _text(fields: Json, key: str) -> str:
    value = fields.get(key) or ""
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a string, got {value!r:.80}")
    return value


def _length(fields: Json, key: str) -> int | None:
    value = fields.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{key} must be an integer >= 1, got {value!r:.80}")
    return value
