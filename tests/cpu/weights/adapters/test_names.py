"""Every linear layer and embedding of transformers' models has a place in quire's, of its shape."""

from dataclasses import replace

import pytest
import torch

from quire.config.model_identity import resolve_identity
from quire.layers.mla import MLAUpProjection
from quire.models import fallback
from quire.models._adapter_modules import OTHER, adapter_modules
from quire.models.build import MODELS, read_model_config
from quire.weights.adapters.deltas import whole_shape
from quire.weights.adapters.names import parse_tensor_name
from tests import tiers
from tests.cpu.models.peers import VARIANTS, tiny

EVERYDAY = ("codegen", "deepseek_v2_lite", "gemma4_text", "mpt", "opt_post_norm_projected", "phi")
REFUSED = ("kv_b_proj", "position", "wpe", "gate", "router", "shared_expert_gate")
"""Parts of names of modules that adapters cannot change."""


def modules_of(hf, impl="quire"):
    model_type, config = read_model_config(resolve_identity(hf), impl)
    models = fallback if impl == "transformers" else MODELS.load(model_type)
    with torch.device("meta"):
        model = models.Model(config)
    return adapter_modules(model, config.tied)


@pytest.mark.slow("the first test imports transformers")
@pytest.mark.parametrize(
    ("variant", "impl"),
    [
        *((one, "quire") for one in EVERYDAY),
        ("qwen3_moe", "transformers"),
        *tiers.long(*((one, "quire") for one in VARIANTS if one not in EVERYDAY)),
        *tiers.long(*((one, "transformers") for one in ("llama", "qwen2", "phi3", "gpt_oss"))),
    ],
)
def test_every_module_has_a_place(variant, impl):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    hf = tiny(variant)[0]
    settings = {key: value for key, value in hf.items() if key != "model_type"}
    config = AutoConfig.for_model(hf["model_type"], **settings)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    modules = modules_of(hf, impl)
    found = 0
    for name, module in theirs.named_modules():
        if not isinstance(module, (torch.nn.Linear, torch.nn.Embedding, Conv1D)):
            continue
        place = modules.find(name)
        assert place is not None, name
        if place.shape.refusal:
            assert any(part in name for part in REFUSED), (name, place.shape.refusal)
            assert place.shape.refusal in (MLAUpProjection.adapter_refusal, OTHER)
            continue
        shape = tuple(module.weight.shape)
        shape = shape[::-1] if isinstance(module, Conv1D) else shape
        if place.part is not None and place.shape.kind != "embedding":
            assert shape == (place.shape.outputs[place.part], place.shape.inputs_of(place.part))
        else:
            assert shape == whole_shape(place), name
        found += 1
    assert found > 4


@pytest.mark.parametrize(
    ("name", "module", "slot", "adapter", "level"),
    [
        ("base_model.model.a.b.lora_A.weight", "a.b", "A", "", 0),
        ("base_model.model.a.b.lora_B.x.weight", "a.b", "B", "x", 0),
        ("a.b.lora_B.bias", "a.b", "bias", "", 0),
        ("a.b.lora_B.x.bias", "a.b", "bias", "x", 0),
        ("a.b.base_layer.base_layer.lora_A.weight", "a.b", "A", "", 2),
        ("a.base_layer.b.lora_A.weight", "a.b", "A", "", 0),
        ("a.lora_embedding_A", "a", "embedding_A", "", 0),
        ("a.lora_embedding_B.x", "a", "embedding_B", "x", 0),
        ("a.lora_magnitude_vector", "a", "magnitude", "", 0),
        ("a.lora_magnitude_vector.weight", "a", "magnitude", "", 0),
        ("a.lora_magnitude_vector.x.weight", "a", "magnitude", "x", 0),
        ("a.token_adapter.trainable_tokens_delta", "a", "tokens", "", 0),
        ("a.trainable_tokens_delta.x", "a", "tokens", "x", 0),
        ("a.modules_to_save.x.weight", "a", "whole", "x", 0),
        ("a.modules_to_save.bias", "a", "whole_bias", "", 0),
        ("a.weight", "a", "whole", "", 0),
        ("a.out_proj.bias", "a.out_proj", "whole_bias", "", 0),
    ],
)
def test_names_of_tensors(name, module, slot, adapter, level):
    found = parse_tensor_name(name)
    assert found == (module, slot, adapter, level, False)


def test_copies_of_base_weights_are_marked():
    for name in ("a.base_layer.weight", "a.token_adapter.base_layer.weight"):
        found = parse_tensor_name(name)
        assert (found.module, found.copied) == ("a", True)


def test_other_names_are_none():
    for name in ("", ".", "token_adapter", "weight", "lora_A.weight", "a", "a.lora_A.x.y.weight"):
        assert parse_tensor_name(name) is None


@pytest.mark.parametrize("labels_are_rows", [False, True])
def test_a_head_is_left_out_unless_its_rows_became_labels(labels_are_rows):
    modules = modules_of(tiny("phi")[0])
    head = replace(modules.weights, absent=("lm_head.",))
    modules = replace(modules, layers={}, weights=head, labels_are_rows=labels_are_rows)
    assert modules.find("lm_head") is None
    assert modules.is_left_out("lm_head") is not labels_are_rows
    if labels_are_rows:
        assert "classifier_from_token" in modules.near("lm_head")
