"""Checkpoints with code of their own: the same towers under the names of the hub."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.media.image_ops import from_tensor
from quire.media.processor import DecodedAudio
from tests.cpu.multimodal.families import Pair, image, made

LAYER = {
    "attention.projection_layer": "attn.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_1": "ls1",
    "lambda_2": "ls2",
}
PATHS = {
    "vision_tower.encoder.layer": "vision_model.encoder.layers",
    "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
    "vision_tower.embeddings.patch_embeddings.projection": "vision_model.embeddings.patch_embedding",
    "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}


def hub_names(tensors):
    """InternVL's tensors as the hub has them: queries, keys and values are one."""
    found, qkv = {}, {}
    for name, tensor in tensors.items():
        for theirs, hub in {**PATHS, **LAYER}.items():
            name = name.replace(theirs, hub)
        if ".attention." in name and "_norm." not in name:
            at, part, param = name.rsplit(".", 2)
            qkv.setdefault(f"{at.replace('.attention', '.attn')}.qkv.{param}", {})[part] = tensor
        else:
            found[name.replace(".attention.", ".attn.")] = tensor
    joined = {
        name: torch.cat([parts[f"{one}_proj"] for one in "qkv"]) for name, parts in qkv.items()
    }
    return found | joined


def write_hub(folder, pair, tensors, **more):
    """A folder with the files of the hub, for the model of a pair with other tensors."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "internvl_chat",
        "llm_config": pair.hf["text_config"],
        "vision_config": pair.hf["vision_config"] | {"image_size": 56, "patch_size": 14},
        "force_image_size": 56,
        "max_dynamic_patch": 6,
        "ps_version": "v2",
    }
    vision = pair.hf["vision_config"]
    config["vision_config"] |= {
        "qkv_bias": vision["attention_bias"],
        "qk_normalization": vision["use_qk_norm"],
    }
    (folder / "config.json").write_text(json.dumps(config | more))
    return Pair(pair.theirs, pair.processor, folder)


@pytest.mark.parametrize("model_type", ["internvl_chat", "skywork_chat", "h2ovl_chat"])
def test_internvl_of_the_hub_equals_that_of_transformers(model_type, tmp_path):
    pair = made("internvl", tmp_path)
    wanted = pair.rows(pair.process([image(300, 200)]))
    tensors = hub_names(load_file(tmp_path / "model.safetensors"))
    other = write_hub(tmp_path / "hub", pair, tensors, model_type=model_type)
    items = other.process([image(300, 200)])
    assert other.own_processor.expand(items[0], 1).rows == len(wanted[0])
    assert len(wanted[0]) <= other.ours[0].media_encoder.max_rows("image")
    theirs = pair.process([image(300, 200)])
    assert torch.equal(other.rows(theirs)[0], wanted[0])
    assert items[0].tensors[0] == theirs[0].tensors[0]


def further_heads(name, tensor, heads=4, stored=8):
    """A tensor of attention with heads after its own, as NVLM-D's checkpoint has them."""
    size = 32 // heads
    wide = tensor.new_full((stored * size, *tensor.shape[1:]), 9.0)
    if name.endswith("qkv.weight"):
        parts = tensor.chunk(3)
        wide = tensor.new_full((3, stored * size, 32), 9.0)
        for part, one in zip(wide, parts, strict=True):
            part[:32] = one
        return wide.flatten(0, 1)
    if name.endswith("proj.weight"):
        return torch.cat((tensor, tensor.new_full((32, stored * size - 32), 9.0)), 1)
    wide[:32] = tensor
    return wide if name.endswith("_norm.weight") else tensor


def test_nvlm_reads_its_own_heads_and_has_no_biases_in_its_projector(tmp_path):
    pair = made("internvl_of_6b", tmp_path)
    tensors = hub_names(load_file(tmp_path / "model.safetensors"))
    pair.theirs.model.vision_tower.layernorm = torch.nn.Identity()  # of the hub it has none
    gone = ("qkv.bias", "vision_tower.layernorm.weight", "vision_tower.layernorm.bias")
    tensors = {name: one for name, one in tensors.items() if not name.endswith(gone)}
    tensors["mlp1.1.weight"] = torch.randn(96, 128) * 0.1
    tensors["mlp1.3.weight"] = torch.randn(64, 96) * 0.1
    del tensors["mlp1.1.bias"], tensors["mlp1.3.bias"]
    layers = pair.theirs.model.vision_tower.encoder.layer
    for layer in layers:  # its queries, keys and values have no biases
        for one in "qkv":
            getattr(layer.attention, f"{one}_proj").bias.data.zero_()
    for name in [one for one in tensors if ".attn." in one]:
        tensors[name] = further_heads(name, tensors[name])
    vision = pair.hf["vision_config"] | {"image_size": 56, "patch_size": 14}
    vision |= {"qkv_bias": False, "qk_normalization": True}
    other = write_hub(tmp_path / "hub", pair, tensors, model_type="NVLM_D", vision_config=vision)
    theirs = pair.theirs.model
    projector = theirs.multi_modal_projector
    projector.linear_1 = torch.nn.Linear(128, 96, bias=False)
    projector.linear_1.weight.data = tensors["mlp1.1.weight"]
    projector.linear_2 = torch.nn.Linear(96, 64, bias=False)
    projector.linear_2.weight.data = tensors["mlp1.3.weight"]
    items = pair.process([image(300, 200)])
    pixels, scale_shift = (torch.from_numpy(from_tensor(one).copy()) for one in items[0].tensors)
    pixels = (pixels * scale_shift[0] + scale_shift[1]).permute(0, 3, 1, 2)
    states = theirs.vision_tower(pixels).last_hidden_state[:, 1:]
    states = states.view(len(pixels), 4, 4, -1)
    states = theirs.pixel_shuffle(states, scale_factor=0.5)
    wanted = projector(states.flatten(1, 2)).flatten(0, 1)
    (got,) = other.rows(items)
    assert (got - wanted).abs().max().item() < 1e-4
    assert len(got) <= other.ours[0].media_encoder.max_rows("image")


def phi4mm_name(name):
    """A name of transformers' Phi-4-multimodal as the hub has it."""
    at = r"^(model\.embed_tokens_extend\."
    for pattern, hub in {
        at + r"audio_embed\.)(up|down)_proj_for_vision_speech": r"\1audio_projection.vision.\2",
        at + r"audio_embed\.)(up|down)_proj_for_speech": r"\1audio_projection.speech.\2",
        at + r"image_embed\.)img_projection_(up|down)": r"\1img_projection.\2",
        at + r"image_embed\.)global_img_feature_extensor": r"\1glb_GN",
        at + r"image_embed\.)sub_img_feature_extensor": r"\1sub_GN",
        at + r"audio.*feed_forward_\w+)\.gate_up_proj": r"\1.net.0.linear",
        at + r"audio.*feed_forward_\w+)\.down_proj": r"\1.net.2",
        at + r"audio.*self_attn)\.(q|k|v)_proj": r"\1.linear_\2",
        at + r"audio.*self_attn)\.o_proj": r"\1.linear_out",
        r"^(model\.layers.*_proj)\.weight": r"\1.base_layer.weight",
    }.items():
        name = re.sub(pattern, hub, name)
    return re.sub(
        r"(projection(?:\.\w+)?)\.(up|down)\.", lambda m: f"{m[1]}.{'02'[m[2] == 'down']}.", name
    )


def test_phi4mm_of_the_hub_equals_phi4_multimodal_of_transformers(tmp_path):
    pair = made("phi4_multimodal", tmp_path)
    tensors = {phi4mm_name(k): v for k, v in load_file(tmp_path / "model.safetensors").items()}
    for name in [one for one in tensors if ".base_layer." in one]:
        for kind in ("vision", "speech"):
            for part in "AB":
                lora = name.replace("base_layer", f"lora_{part}.{kind}")
                tensors[lora] = torch.zeros(4, 4)
    folder = tmp_path / "hub"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    audio, vision = pair.hf["audio_config"], pair.hf["vision_config"]
    own = {
        "attention_dim": audio["hidden_size"],
        "attention_heads": audio["num_attention_heads"],
        "linear_units": audio["intermediate_size"],
        "nemo_conv_settings": {"conv_channels": audio["nemo_conv_channels"]},
        "relative_attention_bias_args": {"type": "t5", "t5_bias_max_distance": 20},
        **{key: audio[key] for key in ("num_blocks", "kernel_size", "audio_token_id")},
        **{key: audio[key] for key in ("ext_pw_out_channel", "depthwise_separable_out_channel")},
    }
    config = {k: v for k, v in pair.hf.items() if k not in ("audio_config", "vision_config")}
    config |= {
        "model_type": "phi4mm",
        "architectures": ["Phi4MMForCausalLM"],
        "img_processor": vision,
        "audio_processor": {"name": "cascades", "config": own},
        "embd_layer": {"image_embd_layer": {"crop_size": 56, "hd_transform_order": "sub_glb"}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    other = Pair(pair.theirs, pair.processor, folder)
    items = pair.process([image(150, 168)])
    samples = np.random.default_rng(1).standard_normal(9000).astype(np.float32) * 0.1
    for kwargs in ({}, {"beside_images": True}):
        items.append(pair.own_processor.process(DecodedAudio(samples, 16_000), kwargs))
        mine = other.own_processor.process(DecodedAudio(samples, 16_000), kwargs)
        assert mine.tensors == items[-1].tensors
        assert other.own_processor.expand(mine, 2).rows == mine.sizes["rows"]
    assert other.process([image(150, 168)])[0].tensors == items[0].tensors
    assert other.own_processor.placeholder("audio", 2) == "<|audio_2|>"
    for got, want in zip(other.rows(items), pair.rows(items), strict=True):
        assert torch.equal(got, want)
    prompt = [3, 5, 8, 13]
    assert torch.equal(other.logits(prompt, [], []), pair.logits(prompt, [], []))
