"""Checkpoints with code of their own: the same towers under the names of the hub."""

import json

import torch
from safetensors.torch import load_file, save_file

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
        if ".attention." in name:
            at, part, param = name.rsplit(".", 2)
            qkv.setdefault(f"{at.replace('.attention', '.attn')}.qkv.{param}", {})[part] = tensor
        else:
            found[name] = tensor
    joined = {
        name: torch.cat([parts[f"{one}_proj"] for one in "qkv"]) for name, parts in qkv.items()
    }
    return found | joined


def test_internvl_of_the_hub_equals_that_of_transformers(tmp_path):
    pair = made("internvl", tmp_path)
    wanted = pair.rows(pair.process([image(300, 200)]))
    hub = tmp_path / "hub"
    hub.mkdir()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(hub_names(tensors), hub / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "internvl_chat",
        "llm_config": pair.hf["text_config"],
        "vision_config": pair.hf["vision_config"] | {"image_size": 56, "patch_size": 14},
        "force_image_size": 56,
        "max_dynamic_patch": 6,
        "ps_version": "v2",
    }
    config["vision_config"] |= {"qkv_bias": False, "qk_normalization": False}
    (hub / "config.json").write_text(json.dumps(config))
    other = Pair(pair.theirs, pair.processor, hub)
    items = other.process([image(300, 200)])
    assert other.own_processor.expand(items[0], 1).rows == len(wanted[0])
    theirs = pair.process([image(300, 200)])
    assert torch.equal(other.rows(theirs)[0], wanted[0])
    assert items[0].tensors[0] == theirs[0].tensors[0]
