"""Write a checkpoint of a model's shape for benchmarks.

    python bench/gpu/checkpoints.py awq|w8a8 MODEL_FOLDER OUT_FOLDER

awq: 4 bits, groups of 128, zeros, random codes: files as large as published ones. w8a8: the config of
INT8 weights and dynamic INT8 rows, without weights. MODEL_FOLDER: of bench/make_models.py, of the
Llama kind.
"""

import json
import math
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

GROUP = 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def words(*shape):
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=DEVICE)


def quantized(name, outputs, inputs):
    """Codes and zeros are uniform, so weights have mean 0 and the deviation 1 / sqrt(inputs)."""
    groups = inputs // GROUP
    scale = (torch.rand(groups, outputs, device=DEVICE) + 0.5) * 0.15 / math.sqrt(inputs)
    return {
        f"{name}.qweight": words(inputs, outputs // 8),
        f"{name}.qzeros": words(groups, outputs // 8),
        f"{name}.scales": scale.half(),
    }


def plain(*shape):
    return torch.randn(shape, device=DEVICE).half() / math.sqrt(shape[-1])


def write_awq(config, out):
    hidden, mlp, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads, size = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shapes = {
        "self_attn.q_proj": (heads * size, hidden), "self_attn.k_proj": (kv_heads * size, hidden),
        "self_attn.v_proj": (kv_heads * size, hidden), "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }  # fmt: skip
    files = {}

    def save(tensors):
        name = f"model-{len(set(files.values())) + 1:05}.safetensors"
        save_file({key: one.cpu() for key, one in tensors.items()}, out / name)
        files.update(dict.fromkeys(tensors, name))

    ones = lambda: torch.ones(hidden, dtype=torch.float16)  # noqa: E731
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        tensors = {
            f"{stem}.{norm}.weight": ones()
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        for name, shape in shapes.items():
            tensors |= quantized(f"{stem}.{name}", *shape)
        save(tensors)
    save({"model.embed_tokens.weight": plain(vocab, hidden), "model.norm.weight": ones(),
          "lm_head.weight": plain(vocab, hidden)})  # fmt: skip
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    config["torch_dtype"] = config["dtype"] = "float16"
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip


def set_w8a8(config):
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": eight | {"strategy": "channel", "dynamic": False},
            "input_activations": eight | {"strategy": "token", "dynamic": True},
        }},
    }  # fmt: skip


def main(kind, source, out):
    source, out = Path(source), Path(out)
    config = json.loads((source / "config.json").read_text())
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if kind == "awq":
        write_awq(config, out)
    else:
        set_w8a8(config)
    (out / "config.json").write_text(json.dumps(config))
    for file in source.glob("*.json"):
        if file.name != "config.json":
            shutil.copy(file, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
