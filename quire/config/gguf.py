"""Reads the metadata of a GGUF file as the config.json and generation_config.json of a model.

Each architecture of the format is one row of ARCHITECTURES: the model type, the fields that only it
has, and constants that files leave out. Others are refused by name.

Source: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError

Json = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

_COMMON = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_SOFTMAX, _SIGMOID = 1, 2
_UNUSUAL_GEMMA_LAYERS = (46, 62)
"""Layers of the Gemma models whose scores are scaled by hidden_size / heads, not by head_dim."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a file has: metadata, the shapes of its tensors, and values of some vectors."""

    arch: str
    metadata: Json
    shapes: Shapes
    vectors: Mapping[str, tuple[float, ...]]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field of the architecture; null fields are absent."""
        found = self.metadata.get(f"{self.arch}.{key}")
        return default if found is None else found

    def size(self, key: str) -> int:
        """Return a positive integer of the architecture. Raises ConfigError."""
        found = self.get(key)
        if isinstance(found, list) and len(set(found)) == 1:
            found = found[0]  # one entry per layer
        if type(found) is not int or found < 1:
            raise ConfigError(
                f"the metadata has {self.arch}.{key} = {found!r:.60}; it must be a positive integer"
            )
        return found

    def has(self, tensor: str) -> bool:
        return tensor in self.shapes


Fields = Callable[[_Facts], dict[str, Any]]


def _no_fields(_: _Facts) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """How one architecture becomes a config.json."""

    model_type: str
    own: Fields = _no_fields
    constants: Json = field(default_factory=dict)


def _llama(f: _Facts) -> dict[str, Any]:
    bias = {"attention_bias": f.has("blk.0.attn_q.bias"), "mlp_bias": f.has("blk.0.ffn_up.bias")}
    if not f.get("expert_count"):
        return {"head_dim": f.get("rope.dimension_count"), **bias}
    return {
        "model_type": "mixtral",
        "head_dim": f.get("rope.dimension_count"),
        "num_local_experts": f.size("expert_count"),
        "num_experts_per_tok": f.size("expert_used_count"),
    }


def _qwen2_moe(f: _Facts) -> dict[str, Any]:
    made = {name: f.size(key) for name, key in _EXPERTS.items()}
    made["shared_expert_intermediate_size"] = f.size("expert_shared_feed_forward_length")
    return made


def _qwen3_moe(f: _Facts) -> dict[str, Any]:
    return {name: f.size(key) for name, key in _EXPERTS.items()}


def _gemma(f: _Facts) -> dict[str, Any]:
    head = f.size("attention.key_length")
    unusual = f.size("block_count") in _UNUSUAL_GEMMA_LAYERS
    whole = f.size("embedding_length") // f.size("attention.head_count")
    return {
        "sliding_window": f.get("attention.sliding_window"),
        "query_pre_attn_scalar": whole if unusual else head,
    }


def _gemma2(f: _Facts) -> dict[str, Any]:
    return _gemma(f) | {
        "attn_logit_softcapping": f.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": f.get("final_logit_softcapping", 30.0),
    }


def _gemma3(f: _Facts) -> dict[str, Any]:
    return _gemma(f) | {
        "rope_theta": f.get("rope.freq_base", 1e6),
        "rope_local_base_freq": f.get("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": f.get("final_logit_softcapping"),
    }


def _phi3(f: _Facts) -> dict[str, Any]:
    head = f.size("embedding_length") // f.size("attention.head_count")
    window = f.get("attention.sliding_window")
    return {
        "sliding_window": window or None,
        "partial_rotary_factor": f.get("rope.dimension_count", head) / head,
    }


def _gpt2(f: _Facts) -> dict[str, Any]:
    return {
        "n_inner": f.size("feed_forward_length"),
        "layer_norm_epsilon": f.get("attention.layer_norm_epsilon", 1e-5),
    }


def _deepseek2(f: _Facts) -> dict[str, Any]:
    """Files of either kind: with the sizes of heads, or with those of the shared latent vector."""
    rope = f.size("rope.dimension_count")
    query = f.get("attention.key_length_mla") or f.size("attention.key_length")
    experts = f.get("expert_count") or 0
    gating = f.get("expert_gating_func", _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise ConfigError(
            f"the metadata has {f.arch}.expert_gating_func = {gating!r}; supported: 1, 2"
        )
    groups, top_groups = f.get("expert_group_count", 1), f.get("expert_group_used_count", 1)
    sigmoid, spare = gating == _SIGMOID, f.get("nextn_predict_layers", 0)
    made = {
        "num_hidden_layers": f.size("block_count") - spare,
        "num_nextn_predict_layers": spare,
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_key_value_heads": f.size("attention.head_count"),
        "kv_lora_rank": f.size("attention.kv_lora_rank"),
        "q_lora_rank": f.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": query - rope,
        "v_head_dim": f.get("attention.value_length_mla") or f.size("attention.value_length"),
        "head_dim": None,
        "first_k_dense_replace": f.get("leading_dense_block_count", 0),
        "n_routed_experts": experts,
        "num_experts_per_tok": f.size("expert_used_count"),
        "n_shared_experts": f.get("expert_shared_count") or 0,
        "moe_intermediate_size": f.size("expert_feed_forward_length"),
        "routed_scaling_factor": f.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(f.get("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": top_groups,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }
    if sigmoid:
        made |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return made


def _gpt_oss(f: _Facts) -> dict[str, Any]:
    return {
        "num_local_experts": f.size("expert_count"),
        "num_experts_per_tok": f.size("expert_used_count"),
        "intermediate_size": f.size("expert_feed_forward_length"),
        "sliding_window": f.get("attention.sliding_window", 128),
        "attention_bias": f.has("blk.0.attn_q.bias"),
    }


ARCHITECTURES: dict[str, _Architecture] = {
    "llama": _Architecture(model_type="llama", own=_llama),
    "qwen2": _Architecture(model_type="qwen2"),
    "qwen2moe": _Architecture(
        model_type="qwen2_moe", own=_qwen2_moe, constants={"norm_topk_prob": False}
    ),
    "qwen3": _Architecture(model_type="qwen3"),
    "qwen3moe": _Architecture(
        model_type="qwen3_moe", own=_qwen3_moe, constants={"norm_topk_prob": True}
    ),
    "gemma2": _Architecture(
        model_type="gemma2", own=_gemma2, constants={"hidden_activation": "gelu_pytorch_tanh"}
    ),
    "gemma3": _Architecture(
        model_type="gemma3_text", own=_gemma3, constants={"hidden_activation": "gelu_pytorch_tanh"}
    ),
    "phi3": _Architecture(model_type="phi3", own=_phi3),
    "gpt2": _Architecture(
        model_type="gpt2", own=_gpt2, constants={"activation_function": "gelu_new"}
    ),
    "deepseek2": _Architecture(model_type="deepseek_v2", own=_deepseek2),
    "gpt-oss": _Architecture(model_type="gpt_oss", own=_gpt_oss),
}


def architecture_of(metadata: Json) -> str:
    """Return the name of the file's architecture. Raises ConfigError for others than those read."""
    found = metadata.get("general.architecture")
    if found not in ARCHITECTURES:
        raise ConfigError(
            f"general.architecture is {found!r:.80}; supported in GGUF files: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return str(found)


def read_config(
    metadata: Json, shapes: Shapes, vectors: Mapping[str, tuple[float, ...]], dtype: str
) -> dict[str, Any]:
    """Return the config.json of a file.

    shapes: of all tensors, rows first. vectors: the values of rope_freqs.weight and
    rope_factors_*.weight, if it has them. dtype: of its activations. Raises ConfigError.
    """
    arch = architecture_of(metadata)
    facts, row = _Facts(arch, metadata, shapes, vectors), ARCHITECTURES[arch]
    made: dict[str, Any] = {"model_type": row.model_type}
    made |= {name: facts.size(key) for name, key in _COMMON.items()}
    made |= {
        "num_key_value_heads": _kv_heads(facts),
        "head_dim": facts.get("attention.key_length"),
        "intermediate_size": facts.get("feed_forward_length"),
        "rms_norm_eps": facts.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.get("rope.freq_base", 10_000.0),
        "vocab_size": _vocabulary(facts),
        "tie_word_embeddings": not facts.has("output.weight"),
        "torch_dtype": dtype,
        **row.constants,
    }
    made |= row.own(facts) | _rope(facts)
    made |= {name: value for name, value in _token_ids(metadata).items() if value is not None}
    return {name: value for name, value in made.items() if value is not None}


def read_generation(metadata: Json) -> dict[str, Any]:
    """Return the generation_config.json of a file: end tokens, and defaults of sampling."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    found = {
        ours: metadata[key]
        for theirs, ours in names.items()
        if isinstance(metadata.get(key := f"general.sampling.{theirs}"), int | float)
    }
    ids = _token_ids(metadata)
    return {name: value for name, value in (ids | found).items() if value is not None}


def _token_ids(metadata: Json) -> dict[str, Any]:
    """End tokens: of the text, of a turn and of a message. A file may name each."""
    prefix = "tokenizer.ggml."
    ends = [metadata.get(f"{prefix}{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(one for one in ends if type(one) is int))
    return {
        "bos_token_id": metadata.get(f"{prefix}bos_token_id"),
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
        "pad_token_id": metadata.get(f"{prefix}padding_token_id"),
    }


def _kv_heads(f: _Facts) -> int:
    found = f.get("attention.head_count_kv", f.get("attention.head_count"))
    if isinstance(found, list):
        if len(set(found)) != 1:
            raise ConfigError(
                f"{f.arch}.attention.head_count_kv differs by layer: {found!r:.80}; quire reads "
                "models with one number"
            )
        found = found[0]
    if type(found) is not int or found < 1:
        raise ConfigError(f"{f.arch}.attention.head_count_kv is {found!r:.60}")
    return found


def _vocabulary(f: _Facts) -> int:
    """Rows of the embedding: a file may have fewer tokens, or drop rows without one."""
    shape = f.shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        raise ConfigError("the file has no token_embd.weight of two axes, so it is not a model")
    return shape[0]


def _rope(f: _Facts) -> dict[str, Any]:
    length = f.size("context_length")
    trained = f.get("rope.scaling.original_context_length")
    factors = f.vectors.get("rope_freqs.weight")
    short = f.vectors.get("rope_factors_short.weight", factors)
    if long := f.vectors.get("rope_factors_long.weight", factors):
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "short_factor": list(short or long),
            "long_factor": list(long),
        }
        if factors:  # of Llama-3: they are divisors at any length
            scaling["attention_factor"] = 1.0
        elif (stated := f.get("rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = stated
        return {
            "rope_scaling": scaling,
            "original_max_position_embeddings": trained or length,
        }
    kind = f.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"the metadata has {f.arch}.rope.scaling.type = {kind!r:.40}; supported: none, linear, "
            "yarn, and longrope with its factors"
        )
    scaling = {"rope_type": kind, "factor": f.get("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = trained or length
        names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        for ours, theirs in names.items():
            if (value := f.get(f"rope.scaling.{theirs}")) is not None:
                scaling[ours] = value
        if f.arch == "gpt-oss":
            scaling["truncate"] = False
        if (log := f.get("rope.scaling.yarn_log_multiplier")) is not None:
            scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * log, 6)
    return {"rope_scaling": scaling}
