"""Reads the tokenizer files of a model folder into `TokenizerFiles`.

The generations of files (tokenizer_config.json, special_tokens_map.json, added_tokens.json,
chat_template.jinja, ...) are read once into `TokenizerFiles`; no other module uses their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from quire.config.json_file import read_json_object, read_text
from quire.errors import ConfigError
from quire.text.templates.chat_template import MAX_TEMPLATE_BYTES

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_LISTS = ("additional_special_tokens", "extra_special_tokens")
ID_END = 1 << 32
"""Above all ids that tokenizers can have."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The settings beside a tokenizer. Earlier sources win in the order of `read`."""

    folder: Path
    config: dict[str, Any]
    named_tokens: dict[str, AddedToken]  # "bos_token" -> token
    additional_tokens: tuple[AddedToken, ...]
    added_tokens: tuple[AddedToken, ...]  # by id
    templates: dict[str, str] = field(default_factory=dict)  # "default", "tool_use", … -> Jinja


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing. Raises ConfigError."""
    return read_json_object(path) if path.is_file() else {}


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the files beside the tokenizer in this folder."""
    config = read_json(folder / "tokenizer_config.json")
    special_map = read_json(folder / "special_tokens_map.json")
    merged = special_map | {k: v for k, v in config.items() if v is not None}
    return TokenizerFiles(
        folder=folder,
        config=config,
        named_tokens={name: _token(merged[name]) for name in NAMED_TOKENS if merged.get(name)},
        additional_tokens=tuple(
            _token(one) for name in _LISTS for one in _listed(merged.get(name))
        ),
        added_tokens=_added(folder, config),
        templates=_templates(folder, config),
    )


def _token(value: object, special: bool = True) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=False)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {name: bool(value[name]) for name in _FLAGS if name in value}
        return AddedToken(value["content"], **({"special": special} | flags))
    raise ConfigError(
        f"a special token must be text or an object with 'content', got {value!r:.200}"
    )


def _listed(value: object) -> list[object]:
    if isinstance(value, dict):  # extra_special_tokens may map a name to its token
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def _added(folder: Path, config: dict[str, Any]) -> tuple[AddedToken, ...]:
    decoder = config.get("added_tokens_decoder")
    if decoder:
        where = folder / "tokenizer_config.json"
        pairs = [(key, value) for key, value in _pairs(decoder, where)]
    else:
        where = folder / "added_tokens.json"
        pairs = [(value, key) for key, value in _pairs(read_json(where), where)]
    by_id = sorted(((_id(key, where), value) for key, value in pairs), key=lambda pair: pair[0])
    return tuple(_token(value, special=False) for _, value in by_id)


def _pairs(value: object, where: Path) -> Iterable[tuple[object, object]]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: added tokens must be an object of ids, not {value!r:.80}")
    return value.items()


def _id(value: object, where: Path) -> int:
    try:
        number = int(value) if isinstance(value, int | str) else -1
    except ValueError:
        number = -1
    if not 0 <= number < ID_END:
        raise ConfigError(f"{where}: {value!r:.80} is not a token id")
    return number


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template by name. A file of its own beats chat_template.json beats tokenizer_config.json."""
    found = _named_templates(config.get("chat_template"), folder / "tokenizer_config.json")
    own = folder / "chat_template.json"
    found |= _named_templates(read_json(own).get("chat_template"), own)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_text(path, MAX_TEMPLATE_BYTES)
    main = folder / "chat_template.jinja"
    if main.is_file():
        found["default"] = read_text(main, MAX_TEMPLATE_BYTES)
    return found


def _named_templates(value: object, where: Path) -> dict[str, str]:
    if isinstance(value, list):
        try:
            value = {one["name"]: one["template"] for one in value}
        except (TypeError, LookupError):
            raise ConfigError(f"{where}: each chat template needs a name and a template") from None
    named = {"default": value} if isinstance(value, str) else value or {}
    if not isinstance(named, dict) or not all(isinstance(one, str) for one in named.values()):
        raise ConfigError(f"{where}: chat_template must be a text, or texts by name")
    if any(len(text) > MAX_TEMPLATE_BYTES for text in named.values()):
        raise ConfigError(f"{where}: a chat template has more than {MAX_TEMPLATE_BYTES} characters")
    return {str(name): text for name, text in named.items()}
