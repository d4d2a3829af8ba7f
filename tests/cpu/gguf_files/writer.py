"""Writes GGUF files from folders of transformers with the package gguf, as llama.cpp's converters do.

Names of tensors come from the package's own table; what converters change is done here again.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

from quire.kernels.quantizers.ggml import LAYOUTS, quantize_ggml
from quire.quantize.gguf_blocks import to_blocks

ARCHS = {
    "llama": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "phi3": MODEL_ARCH.PHI3,
    "gpt2": MODEL_ARCH.GPT2,
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": MODEL_ARCH.DEEPSEEK2,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
}
NUMBERS = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.sliding_window": ("sliding_window",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_shared_count": ("n_shared_experts",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "nextn_predict_layers": ("num_nextn_predict_layers",),
}
REALS = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_weights_scale": ("routed_scaling_factor",),
}


def read_folder(folder):
    """(config.json, tensors) of a folder."""
    hf = json.loads((Path(folder) / "config.json").read_text())
    files = sorted(Path(folder).glob("*.safetensors"))
    return hf, {name: t for file in files for name, t in load_file(file).items()}


def quantized(kind, value):
    """(bytes uint8 [..., n], the values of them in float32) of a tensor."""
    number = GGMLQuantizationType[kind]
    value = value.float().contiguous()
    if kind == "NVFP4":
        data = nvfp4_blocks(value)
    elif kind in LAYOUTS:
        data = to_blocks(kind, quantize_ggml(kind, value.flatten(0, -2))).unflatten(
            0, value.shape[:-1]
        )
    else:
        data = torch.from_numpy(gguf.quants.quantize(value.numpy(), number).view(np.uint8))
    wide = torch.from_numpy(gguf.quants.dequantize(data.numpy(), number)).view(value.shape)
    return data, wide


def nvfp4_blocks(value):
    """uint8 [..., I / 64 * 36]: four scales of e4m3, then codes: element j of 16 beside j + 8."""
    groups = value.unflatten(-1, (-1, 4, 16))
    scale = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([half, -half])
    wide = groups / scale.float().clamp(min=2.0**-9)[..., None]
    q = (wide[..., None] - table).abs().argmin(-1).to(torch.uint8)
    packed = (q[..., :8] | q[..., 8:] << 4).flatten(-2)
    return torch.cat([scale.view(torch.uint8), packed], -1).flatten(-2)


def add_scales(writer, name, value):
    """Add the factor of an NVFP4 tensor, one per expert of a bank; returns it to divide by."""
    banks = value if "_exps." in name else value[None]
    whole = banks.flatten(1).abs().amax(1) / (6 * 448)
    writer.add_tensor(name.replace(".weight", ".scale"), whole.numpy())
    writer.add_tensor(name.replace(".weight", ".input_scale"), np.full(len(whole), 0.5, np.float32))
    return whole.view(-1, *[1] * (value.dim() - 1))


def fits(kind, value):
    """Whether the rows of a tensor have whole blocks."""
    return (
        value.dim() > 1
        and value.shape[-1] % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 0
    )


def write_gguf(
    path, folder, kind_of=lambda name: "F32", *, edit=None, split_kv=False, in_parts=False,
    scales=True,
):  # fmt: skip
    """Write a file, and return the tensors of the folder with the values that are in it.

    kind_of(name): the type of a tensor, by its name in the file; F32 where rows have no whole
    blocks. edit(writer): adds metadata. split_kv: kv_b_proj as two tensors. in_parts: in several
    files. scales: NVFP4 has a factor beside it.
    """
    hf, tensors = read_folder(folder)
    kind = hf["model_type"]
    arch = ARCHS[kind]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=10 if in_parts else 0)
    _metadata(writer, hf)
    if spare := hf.get("num_nextn_predict_layers"):
        writer.add_uint32(f"{writer.arch}.block_count", hf["num_hidden_layers"] + spare)
        name = f"blk.{hf['num_hidden_layers']}.nextn.eh_proj.weight"
        writer.add_tensor(name, np.zeros((4, 4), np.float32))
    if edit is not None:
        edit(writer)
    layers = hf.get("num_hidden_layers") or hf["n_layer"]
    names = gguf.get_tensor_name_map(arch, layers)
    made = _merged(hf, tensors, split_kv)
    dense = dict(tensors)
    for name, (value, sources) in made.items():
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = name, "weight"
        if "correction_bias" in name:
            stem, suffix = name.replace("e_score_correction_bias", "e_score_correction"), "bias"
        ours = names.get_name(stem) or names.get_name(name)
        assert ours is not None, name
        ours = f"{ours}.{suffix}"
        value = _changed(hf, ours, value)
        plain = suffix == "bias" or "gate_inp" in ours
        want = "F32" if plain else kind_of(ours)
        if want == "F32" or not fits(want, value):
            writer.add_tensor(ours, value.float().contiguous().numpy())
            continue
        whole = add_scales(writer, ours, value) if want == "NVFP4" and scales else 1.0
        data, wide = quantized(want, value / whole)
        wide = wide * whole
        writer.add_tensor(ours, data.numpy(), raw_dtype=GGMLQuantizationType[want])
        for source, back in sources(_changed_back(hf, ours, wide)):
            dense[source] = back
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


def _metadata(writer, hf):
    arch = writer.arch
    own = {name: value for name, value in hf.items() if value is not None}
    for key, names in NUMBERS.items():
        if found := [own[name] for name in names if name in own]:
            writer.add_uint32(f"{arch}.{key}", found[0])
    for key, names in REALS.items():
        if found := [own[name] for name in names if name in own]:
            writer.add_float32(f"{arch}.{key}", found[0])
    heads = own.get("num_attention_heads") or own["n_head"]
    hidden = own.get("hidden_size") or own["n_embd"]
    head = own.get("head_dim") or hidden // heads
    if arch == "gpt2":
        writer.add_feed_forward_length(own.get("n_inner") or 4 * hidden)
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(own["intermediate_size"])
    rope = own.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope) | (own.get("rope_scaling") or {})
    if arch == "deepseek2":
        _latent(writer, own)
    else:
        writer.add_key_length(head)
        writer.add_value_length(head)
        share = rope.get("partial_rotary_factor") or own.get("partial_rotary_factor") or 1.0
        writer.add_rope_dimension_count(int(head * share))
    writer.add_rope_freq_base(own.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    if arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(own["original_max_position_embeddings"])
    _rope(writer, rope, head, own)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(own["vocab_size"])])
    writer.add_tokenizer_model("none")
    if own.get("eos_token_id") is not None:
        writer.add_eos_token_id(own["eos_token_id"])


def _latent(writer, own):
    rope, plain = own["qk_rope_head_dim"], own["qk_nope_head_dim"]
    writer.add_rope_dimension_count(rope)
    writer.add_key_length(plain + rope)
    writer.add_value_length(own["v_head_dim"])
    writer.add_expert_weights_norm(own.get("norm_topk_prob", False))
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SIGMOID
        if own["model_type"] == "deepseek_v3"
        else gguf.ExpertGatingFuncType.SOFTMAX
    )


def _rope(writer, rope, head, own):
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head, own).numpy())
    if kind == "longrope":
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if own["model_type"].startswith("deepseek"):
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                writer.add_float32(f"{writer.arch}.rope.scaling.yarn_{name}", rope[name])


def llama3_divisors(rope, head, own):
    """What each frequency is divided by."""
    theta = rope.get("rope_theta") or own["rope_theta"]
    waves = 2 * torch.pi * theta ** (torch.arange(0, head, 2).float() / head)
    trained, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (trained / waves - low) / (high - low)
    middle = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(
        waves < trained / high, 1.0, torch.where(waves > trained / low, factor, middle)
    )


def _one(name):
    return lambda value: [(name, value)]


def _merged(hf, tensors, split_kv):
    """Name -> (value, what its value means for the folder's tensors): banks are stacked."""
    made = {}
    for name, value in tensors.items():
        if ".experts." in name and name.split(".experts.")[1][0].isdigit():
            stem, rest = name.split(".experts.")
            number, leaf = rest.split(".", 1)
            if number == "0":
                count = (
                    hf.get("num_experts") or hf.get("num_local_experts") or hf["n_routed_experts"]
                )
                ones = [f"{stem}.experts.{i}.{leaf}" for i in range(count)]
                stack = torch.stack([tensors[one] for one in ones])
                made[f"{stem}.experts.{leaf}"] = (
                    stack,
                    lambda value, ones=ones: list(zip(ones, value)),
                )
        elif ".experts." in name:  # GPT-OSS
            _gpt_oss_bank(name, value, made)
        elif "kv_b_proj" in name and split_kv:
            plain, heads = hf["qk_nope_head_dim"], hf["num_attention_heads"]
            keys, values = value.view(heads, -1, hf["kv_lora_rank"]).split(
                [plain, hf["v_head_dim"]], 1
            )
            made[name.replace("kv_b", "k_b")] = (keys.transpose(1, 2), lambda _: [])
            made[name.replace("kv_b", "v_b")] = (values, lambda _: [])
        elif not name.startswith("lm_head") or not hf.get("tie_word_embeddings"):
            made[name] = (value, _one(name))
    return made


def _gpt_oss_bank(name, value, made):
    stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
    end = "bias" if bias else "weight"
    value = value if bias else value.transpose(1, 2)
    if "gate_up" not in name:
        back = (lambda v: [(name, v)]) if bias else (lambda v: [(name, v.transpose(1, 2))])
        made[f"{stem}.{end}"] = (value, back)
        return
    halves = {}

    def back(half):
        def take(v):
            halves[half] = v
            if len(halves) < 2:
                return []
            both = torch.stack((halves[0], halves[1]), 2).flatten(1, 2)
            return [(name, both if bias else both.transpose(1, 2))]

        return take

    for half, leaf in enumerate(("gate", "up")):
        made[f"{stem.replace('gate_up', leaf)}.{end}"] = (value[:, half::2], back(half))


def _changed(hf, name, value):
    """The value as converters store it."""
    kind = hf["model_type"]
    if kind in ("llama", "mixtral") and ("attn_q." in name or "attn_k." in name):
        heads = hf["num_attention_heads" if "attn_q." in name else "num_key_value_heads"]
        value = value.reshape(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        value = value.float() + 1
    if kind == "gpt2" and _is_turned(name):
        value = value.t()
    return value[0] if "gate_inp_shexp" in name else value


def _changed_back(hf, name, value):
    kind = hf["model_type"]
    if kind in ("llama", "mixtral") and ("attn_q." in name or "attn_k." in name):
        heads = hf["num_attention_heads" if "attn_q." in name else "num_key_value_heads"]
        return value.reshape(heads, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
    return value.t() if kind == "gpt2" and _is_turned(name) else value


def _is_turned(name):
    return name.endswith(
        ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    )
