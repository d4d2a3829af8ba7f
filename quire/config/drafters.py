"""Drafters: recognises the kind of a folder with weights for drafts, and reads its limits.

The files decide: fields of config.json, then names of tensors. The name that the user gave counts
only where neither shows a kind, as with heads of EAGLE whose weights are a pickle.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.conventions import conventions_of
from quire.config.json_file import MAX_BYTES, MAX_CONFIG_BYTES, check_sizes, read_json_object
from quire.config.memory.part_facts import DrafterMemory
from quire.errors import ConfigError

Json = Mapping[str, Any]
MTP_LAYER_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields with the number of layers that predict further tokens, in the checkpoint of a target."""
MEDUSA_FILE = "medusa_lm_head.pt"
_BY_NAME = (("eagle3", "eagle3"), ("eagle-3", "eagle3"), ("eagle", "eagle"), ("medusa", "medusa"))


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """A folder with a drafter's weights, as its files describe it."""

    folder: str  # "": the target's own, which has the weights too
    method: str  # draft_model, eagle, eagle3, mtp, medusa, or another that is refused
    vocab: int | None = None  # None: not stated
    max_len: int | None = None
    drafts: int | None = None  # of a row, as the files state: layers, heads, a proposal
    verifier: str | None = None  # name of the target that the files state
    memory: DrafterMemory | None = None  # None: not read yet


def read_drafter(folder: Path, name: str = "") -> DrafterFacts:
    """Read the facts of a drafter's folder. name: as the user gave it. Raises ConfigError."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"speculative_config: no config.json in {folder}; give a drafter's folder"
        )
    hf = read_json_object(path, MAX_CONFIG_BYTES)
    check_sizes(hf)
    speculators = hf.get("speculators_config")
    speculators = speculators if isinstance(speculators, dict) else {}
    inner = hf.get("transformer_layer_config")
    fields: Json = {**(inner if isinstance(inner, dict) else {}), **hf}
    verifier = speculators.get("verifier")
    return DrafterFacts(
        folder=str(folder),
        method=drafter_of(folder, name),
        vocab=_whole(fields, "vocab_size"),
        max_len=_whole(fields, "max_position_embeddings", "n_positions"),
        drafts=_stated_drafts(fields, speculators),
        verifier=verifier.get("name_or_path") if isinstance(verifier, dict) else None,
    )


def drafter_of(folder: Path, name: str = "") -> str:
    """Return the method whose weights a folder has. Raises ConfigError for broken files."""
    hf = read_json_object(folder / "config.json", MAX_CONFIG_BYTES)
    return (
        _by_config(hf)
        or ("medusa" if (folder / MEDUSA_FILE).is_file() else None)
        or _by_tensors(set(tensor_names(folder)))
        or _by_given_name(name or folder.name, hf)
        or "draft_model"
    )


def mtp_layers(hf: Json) -> int | None:
    """Return the number of a target's own layers that predict further tokens; None: it has none."""
    return _whole(hf, *MTP_LAYER_KEYS) or conventions_of(hf).mtp_layers or None


def _by_config(hf: Json) -> str | None:
    kind = str(hf.get("speculators_model_type") or hf.get("model_type") or "").lower()
    if kind in ("eagle3", "eagle", "medusa", "mlp_speculator"):
        return kind
    if kind.endswith("_mtp") or kind == "mtp":
        return "mtp"
    classes = " ".join(map(str, hf.get("architectures") or ())).lower()
    if "eagle3" in classes:
        return "eagle3"
    if "eagle" in classes:
        return "eagle"
    if "medusa" in classes or "medusa_num_heads" in hf:
        return "medusa"
    if re.search(r"mtp(model|forcausallm)?$", classes):
        return "mtp"
    if "draft_vocab_size" in hf or "eagle_config" in hf:
        return "eagle3"
    return None


def _by_tensors(names: set[str]) -> str | None:
    """A head has no embedding of its own, or no norm, where a whole model has both."""
    if not names:
        return None
    if "d2t" in names or any(one.endswith("hidden_norm.weight") for one in names):
        return "eagle3"
    if "fc.weight" in names and "norm.weight" not in names:
        return "eagle"
    if any(re.match(r"(blocks|heads?|medusa_head)\.\d+\.", one) for one in names):
        return "medusa"
    return None


def _by_given_name(name: str, hf: Json) -> str | None:
    """A head with the class of a whole model has one layer."""
    if hf.get("num_hidden_layers") not in (None, 1):
        return None
    return next((method for part, method in _BY_NAME if part in name.lower()), None)


def tensor_names(folder: Path) -> Iterator[str]:
    """Yield the names of a folder's tensors, of safetensors files. Raises ConfigError."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        yield from read_json_object(index).get("weight_map", {})
        return
    for path in sorted(folder.glob("*.safetensors")):
        yield from (one for one in _header(path) if one != "__metadata__")


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        text = file.read(size) if size <= MAX_BYTES else b""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a safetensors file: its header is not an object")
    return found


def _stated_drafts(hf: Json, speculators: Json) -> int | None:
    for one in speculators.get("proposal_methods") or ():
        if isinstance(one, dict) and (found := _whole(one, "speculative_tokens")):
            return found
    return _whole(hf, "n_predict", "medusa_num_heads", "num_lookahead_tokens", *MTP_LAYER_KEYS)


def _whole(hf: Json, *keys: str) -> int | None:
    """Return the first of these fields that is a whole number."""
    for key in keys:
        value = hf.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
