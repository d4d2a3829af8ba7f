"""What a model's folder says about its tokenizer, read and brought into one form.

Not here: the tokenizer itself (quire.text.tokenizer). The one idea: the many generations of files
(tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja, …) are
read once into `TokenizerFiles`; nobody else knows their names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from quire.errors import ConfigError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The settings beside a tokenizer. Earlier sources win in the order of `read`."""

    folder: Path
    config: dict[str, Any]
    named: dict[str, AddedToken]  # "bos_token" -> token
    additional: tuple[AddedToken, ...]
    added: tuple[AddedToken, ...]  # by id
    templates: dict[str, str] = field(default_factory=dict)  # "default", "tool_use", … -> Jinja

    @property
    def needs_code(self) -> bool:
        """The tokenizer is Python code of the model's repository."""
        return "AutoTokenizer" in (self.config.get("auto_map") or {})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise ConfigError(f"{path} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def read(folder: Path) -> TokenizerFiles:
    """Read what stands beside the tokenizer in this folder."""
    config = read_json(folder / "tokenizer_config.json")
    special_map = read_json(folder / "special_tokens_map.json")
    merged = special_map | {k: v for k, v in config.items() if v is not None}
    return TokenizerFiles(
        folder=folder,
        config=config,
        named={name: _token(merged[name]) for name in NAMED if merged.get(name)},
        additional=tuple(_token(one) for name in _LISTS for one in _listed(merged.get(name))),
        added=_added(folder, config),
        templates=_templates(folder, config),
    )


def _token(value: object, special: bool = True) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=False)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {name: bool(value[name]) for name in _FLAGS if name in value}
        return AddedToken(value["content"], **({"special": special} | flags))
    raise ConfigError(f"a special token must be text or an object with 'content', got {value!r}")


def _listed(value: object) -> list[object]:
    if isinstance(value, dict):  # extra_special_tokens may map a name to its token
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def _added(folder: Path, config: dict[str, Any]) -> tuple[AddedToken, ...]:
    decoder = config.get("added_tokens_decoder")
    if decoder:
        by_id = sorted(decoder.items(), key=lambda item: int(item[0]))
        return tuple(_token(value, special=False) for _, value in by_id)
    plain = read_json(folder / "added_tokens.json")
    by_id = sorted(plain.items(), key=lambda item: int(item[1]))
    return tuple(_token(content, special=False) for content, _ in by_id)


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template by name. A file of its own beats chat_template.json beats tokenizer_config.json."""
    found = _named_templates(config.get("chat_template"))
    found |= _named_templates(read_json(folder / "chat_template.json").get("chat_template"))
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    main = folder / "chat_template.jinja"
    if main.is_file():
        found["default"] = main.read_text(encoding="utf-8")
    return found


def _named_templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): str(text) for name, text in value.items()}
    if isinstance(value, list):
        return {str(one["name"]): str(one["template"]) for one in value}
    return {}
