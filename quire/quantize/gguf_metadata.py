"""The metadata of a GGUF file: the model's sizes, its rotary settings, its tokenizer.

Keys are pairs of a name and a value; lists keep their order. Imports no torch.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.facts import read_json
from quire.config.json_file import read_json_object
from quire.errors import ConfigError

FILE_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K_S": 14,
    "Q4_K": 14, "Q4_K_M": 15, "Q5_K": 16, "Q5_K_M": 17, "Q6_K": 18,
}  # fmt: skip
"""general.file_type: the mix that most tensors have."""
QUANTIZATION_VERSION = 2

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens."""

PATTERNS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+|"
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*|\p{N}| ?[^\s\p{L}\p{N}]+"
    r"[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}
"""How a tokenizer splits text before merging -> tokenizer.ggml.pre."""

MAX_TOKENIZER_BYTES = 1 << 28
UNUSED_SCORE = -1000.0

Pairs = dict[str, Any]


def model_pairs(architecture: str, name: str, hf: Mapping[str, Any], config: Any) -> Pairs:
    """Return the keys of the model. hf: config.json; config: the model's own reading of it."""
    a = architecture
    pairs: Pairs = {
        "general.name": name,
        f"{a}.block_count": config.layers,
        f"{a}.context_length": int(hf["max_position_embeddings"]),
        f"{a}.embedding_length": config.hidden,
        f"{a}.feed_forward_length": config.mlp,
        f"{a}.attention.head_count": config.heads,
        f"{a}.attention.head_count_kv": config.kv_heads,
        f"{a}.attention.key_length": config.head_dim,
        f"{a}.attention.value_length": config.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        f"{a}.vocab_size": config.vocab,
        f"{a}.rope.dimension_count": config.rope.dims,
        f"{a}.rope.freq_base": float(config.rope.theta),
    }
    if windows := {one for one in config.windows if one is not None}:
        pairs[f"{a}.attention.sliding_window"] = max(windows)
    if a == "gemma2":
        for key, value in (
            ("attn_logit_softcapping", config.attn_softcap),
            ("final_logit_softcapping", config.logit_softcap),
        ):
            if value is not None:
                pairs[f"{a}.{key}"] = float(value)
    if a == "gemma3":
        pairs[f"{a}.rope.freq_base_swa"] = float(config.local_rope.theta)
    if a.startswith("gemma") and not math.isclose(config.scale, config.head_dim**-0.5):
        pairs[f"{a}.attention.scale"] = float(config.scale)
    if a == "qwen3moe":
        pairs |= _expert_pairs(a, config)
    return pairs | _rope_pairs(a, hf, config)


def _expert_pairs(a: str, config: Any) -> Pairs:
    moe = config.moe
    if not moe.renormalise:
        raise ConfigError(
            "norm_topk_prob is false: readers of GGUF files of qwen3moe normalize the weights of "
            "experts; write compressed-tensors"
        )
    if not all(moe.is_sparse(i) for i in range(config.layers)):
        raise ConfigError("some layers have no experts: GGUF files of qwen3moe have them in all")
    return {
        f"{a}.expert_count": moe.experts,
        f"{a}.expert_used_count": moe.top_k,
        f"{a}.expert_feed_forward_length": moe.mlp,
    }


def rope_section(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings of layers with full attention."""
    for key in ("rope_scaling", "rope_parameters"):
        found = hf.get(key)
        if isinstance(found, Mapping) and found:
            inner = found.get("full_attention")
            return inner if isinstance(inner, Mapping) else found
    return {}


def _rope_pairs(a: str, hf: Mapping[str, Any], config: Any) -> Pairs:
    section = rope_section(hf)
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind in ("default", "llama3"):  # llama3: the tensor rope_freqs has the factors
        return {}
    at = f"{a}.rope.scaling"
    trained = section.get("original_max_position_embeddings") or hf.get(
        "original_max_position_embeddings"
    )
    if kind == "linear":
        return {f"{at}.type": "linear", f"{at}.factor": float(section["factor"])}
    if kind == "yarn" and a != "phi3":
        pairs: Pairs = {f"{at}.type": "yarn", f"{at}.factor": float(section["factor"])}
        pairs[f"{at}.original_context_length"] = int(trained or hf["max_position_embeddings"])
        return pairs
    if a == "phi3" and kind in ("longrope", "su", "yarn"):
        trained = int(trained or 4096)
        ratio = max(int(hf["max_position_embeddings"]) / trained, 1.0)
        factor = math.sqrt(1 + math.log(ratio) / math.log(trained)) if ratio > 1 else 1.0
        return {f"{at}.original_context_length": trained, f"{at}.attn_factor": factor}
    raise ConfigError(f"rope_scaling of type {kind!r} is not written to GGUF files of {a}")


def rope_tensors(hf: Mapping[str, Any], config: Any) -> dict[str, list[float]]:
    """Return rotary factors that files hold as tensors: name -> one per pair of channels."""
    section = rope_section(hf)
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind == "llama3":
        return {"rope_freqs.weight": _llama3_factors(section, config.rope.theta, config.rope.dims)}
    if "long_factor" in section:
        return {
            "rope_factors_long.weight": [float(one) for one in section["long_factor"]],
            "rope_factors_short.weight": [float(one) for one in section["short_factor"]],
        }
    return {}


def _llama3_factors(section: Mapping[str, Any], theta: float, dims: int) -> list[float]:
    """How much each frequency is divided by: 1 for short waves, `factor` for long ones."""
    factor = float(section["factor"])
    low, high = float(section["low_freq_factor"]), float(section["high_freq_factor"])
    trained = int(section["original_max_position_embeddings"])
    out = []
    for i in range(0, dims, 2):
        wave = 2 * math.pi * theta ** (i / dims)
        if wave < trained / high:
            out.append(1.0)
        elif wave > trained / low:
            out.append(factor)
        else:
            smooth = (trained / wave - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return out


def tokenizer_pairs(folder: Path, vocab: int) -> Pairs:
    """Return the keys of the tokenizer of a folder with tokenizer.json; as many tokens as `vocab`.

    Raises ConfigError for kinds that GGUF files do not have.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; GGUF files are written from one")
    found = read_json_object(path, MAX_TOKENIZER_BYTES)
    model = found.get("model") or {}
    if model.get("type") != "BPE":
        raise ConfigError(
            f"{path} is a tokenizer of type {model.get('type')!r}; GGUF files are written of BPE"
        )
    settings = read_json(folder / "tokenizer_config.json")
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges", ())]
    bytes_in_pieces = bool(model.get("byte_fallback"))
    tokens, kinds = _tokens(found, model, vocab, bytes_in_pieces, path)
    pairs: Pairs = {
        "tokenizer.ggml.model": "llama" if bytes_in_pieces else "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }
    if bytes_in_pieces:
        pairs["tokenizer.ggml.pre"] = "default"
        pairs["tokenizer.ggml.scores"] = _scores(tokens, model.get("merges", ()))
        pairs["tokenizer.ggml.add_space_prefix"] = _adds_space(found)
    else:
        pairs["tokenizer.ggml.pre"] = _splitting(found, path)
        pairs["tokenizer.ggml.merges"] = merges
    ids = {token: i for i, token in enumerate(tokens)}
    pairs |= _special_pairs(folder, found, settings, ids)
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, str):
        pairs["tokenizer.chat_template"] = template
    return pairs


def _tokens(
    found: Mapping[str, Any], model: Mapping[str, Any], vocab: int, byte_pieces: bool, path: Path
) -> tuple[list[str], list[int]]:
    """Every token by its id, and its kind; ids without a token are padding."""
    by_id = {i: token for token, i in model["vocab"].items()}
    added = {one["id"]: one for one in found.get("added_tokens") or ()}
    by_id |= {i: one["content"] for i, one in added.items()}
    if by_id and max(by_id) >= vocab:
        raise ConfigError(f"{path} has the token id {max(by_id)}; the model has {vocab} embeddings")
    unknown = model.get("unk_token")
    tokens, kinds = [], []
    for i in range(vocab):
        token = by_id.get(i)
        if token is None:
            tokens.append(f"[PAD{i}]")
            kinds.append(UNUSED)
            continue
        tokens.append(token)
        if byte_pieces and token == unknown:
            kinds.append(UNKNOWN)
        elif i in added:
            kinds.append(CONTROL if added[i].get("special") else USER_DEFINED)
        elif byte_pieces and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            kinds.append(BYTE)
        else:
            kinds.append(NORMAL)
    return tokens, kinds


def _scores(tokens: list[str], merges: Any) -> list[float]:
    """Minus the rank of the merge that makes each token: the best merge has the largest score."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    return [-float(ranks[one]) if one in ranks else UNUSED_SCORE * 1000 for one in tokens]


def _adds_space(found: Mapping[str, Any]) -> bool:
    """Whether a space is put before the text."""
    text = json.dumps([found.get("normalizer"), found.get("pre_tokenizer")])
    return '"Prepend"' in text or bool(re.search(r'"prepend_scheme": "(first|always)"', text))


def _parts(section: Any, key: str) -> list[Mapping[str, Any]]:
    if not isinstance(section, Mapping):
        return []
    return list(section.get(key) or [section]) if section.get("type") == "Sequence" else [section]


def _splitting(found: Mapping[str, Any], path: Path) -> str:
    """tokenizer.ggml.pre of a byte-level BPE."""
    parts = _parts(found.get("pre_tokenizer"), "pretokenizers")
    for one in parts:
        if one.get("type") == "Split":
            pattern = (one.get("pattern") or {}).get("Regex", "")
            if pattern in PATTERNS:
                return PATTERNS[pattern]
            raise ConfigError(
                f"{path} splits text by a pattern that has no name in GGUF files: {pattern!r:.120}"
            )
    if any(one.get("type") == "ByteLevel" and one.get("use_regex", True) for one in parts):
        return "gpt-2"
    raise ConfigError(f"{path} has a pre-tokenizer that has no name in GGUF files")


def _special_pairs(
    folder: Path, found: Mapping[str, Any], settings: Mapping[str, Any], ids: Mapping[str, int]
) -> Pairs:
    """Ids of special tokens, and which of them are added to a text."""
    pairs: Pairs = {}
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for key, name in names.items():
        token = settings.get(f"{key}_token")
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str) and content in ids:
            pairs[f"tokenizer.ggml.{name}_token_id"] = ids[content]
    generation = read_json(folder / "generation_config.json").get("eos_token_id")
    ends = generation if isinstance(generation, list) else [generation]
    eos = "tokenizer.ggml.eos_token_id"
    for end in ends:
        if type(end) is int:
            pairs.setdefault(eos, end)
    others = [one for one in ends if type(one) is int and one != pairs[eos]]
    for name, value in zip(("eot", "eom"), others):
        pairs[f"tokenizer.ggml.{name}_token_id"] = value
    for name in ("bos", "eos"):
        own = pairs.get(f"tokenizer.ggml.{name}_token_id")
        adds = settings.get(f"add_{name}_token")
        if not isinstance(adds, bool):
            adds = own is not None and _is_added(found.get("post_processor"), name, own)
        pairs[f"tokenizer.ggml.add_{name}_token"] = adds
    return pairs


def _is_added(processor: Any, name: str, token: int) -> bool:
    """Whether the post-processor puts a token at the beginning (bos) or the end (eos)."""
    for one in _parts(processor, "processors"):
        if one.get("type") != "TemplateProcessing" or not one.get("single"):
            continue
        piece = one["single"][0 if name == "bos" else -1].get("SpecialToken")
        special = (one.get("special_tokens") or {}).get((piece or {}).get("id")) or {}
        if token in (special.get("ids") or ()):
            return True
    return False
