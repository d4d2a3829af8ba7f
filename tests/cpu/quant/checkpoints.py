"""Small llama checkpoints: plain, and quantized as several makers would write them."""

import torch
from safetensors.torch import save_file

from quire.kernels.formats.fp8_weight import quantize_blocks, quantize_channels
from quire.models.build import build_model, read_model_config

E4M3 = torch.float8_e4m3fn
LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(weights, inputs, **changes):
    """A quantization_config of llm-compressor."""
    group = {
        "targets": ["Linear"],
        "weights": FLOAT | {"dynamic": False} | weights,
        "input_activations": FLOAT | inputs,
    }
    said = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return said | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]} | changes


CHANNELS = compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True})


def plain(dtype=torch.bfloat16):
    """name -> tensor of a whole model."""
    draw = torch.Generator().manual_seed(3)
    e, f, v = 128, 256, 96
    shapes = {"embed_tokens": (v, e), "norm": (e,)}
    for i in range(2):
        at = f"layers.{i}."
        shapes |= {at + f"{name}_layernorm": (e,) for name in ("input", "post_attention")}
        shapes |= {at + f"self_attn.{name}_proj": (e, e) for name in "qkvo"}
        shapes |= {at + f"mlp.{name}_proj": (f, e) for name in ("gate", "up")}
        shapes |= {at + "mlp.down_proj": (e, f)}
    named = {f"model.{name}.weight": shape for name, shape in shapes.items()}
    named["lm_head.weight"] = (v, e)
    made = {name: torch.randn(shape, generator=draw) for name, shape in named.items()}
    return {
        name: (t / 128**0.5 if t.dim() > 1 else 1 + t / 50).to(dtype) for name, t in made.items()
    }


def quantized(style, skip=("embed", "norm", "lm_head")):
    """The same, its linear layers in eight bits with scales in the style's names and shapes."""
    found = {}
    for name, tensor in plain().items():
        if any(word in name for word in skip):
            found[name] = tensor
            continue
        path = name.removesuffix(".weight")
        made = quantize_blocks(tensor) if "block" in style else quantize_channels(tensor)
        data, scale = made.data, made.scale
        if "tensor" in style:
            scale = tensor.float().abs().amax() / 448
            data, scale = (tensor.float() / scale).to(E4M3), scale.view(style["tensor"])
        elif style.get("channel") == 2:
            scale = scale[:, None]
        found |= {f"{path}.weight": data, f"{path}.{style.get('name', 'weight_scale')}": scale}
        if "static" in style:
            found[f"{path}.input_scale"] = torch.tensor(0.02 + 0.01 * ("k_proj" in name))
    return {name: tensor.contiguous() for name, tensor in found.items()}


def load(folder, tensors, quantization=None, dtype=torch.bfloat16, **settings):
    """A model from a checkpoint of these tensors."""
    save_file(tensors, folder / "model.safetensors")
    hf = LLAMA if quantization is None else LLAMA | {"quantization_config": quantization}
    model_type, config = read_model_config(hf)
    return build_model(model_type, config, folder=folder, dtype=dtype, progress=False, **settings)
