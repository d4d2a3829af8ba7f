"""A checkpoint and a model agree on every tensor, or nothing is loaded."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ConfigError, WeightError
from quire.layers import ParamModule
from quire.models import gpt2
from quire.models.build import build_model, load_weights, read_model_config
from tests.cpu.plain_param import plain_param

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 64,
}
CPU = torch.device("cpu")


def tensors_of(**changes):
    """What a transformers checkpoint of QWEN3 holds."""
    e, f, h, k, d, v = 32, 48, 4, 2, 8, 50
    shapes = {"embed_tokens": (v, e), "norm": (e,)}
    for i in range(2):
        at = f"layers.{i}."
        shapes |= {at + "input_layernorm": (e,), at + "post_attention_layernorm": (e,)}
        shapes |= {at + "self_attn.q_proj": (h * d, e), at + "self_attn.o_proj": (e, h * d)}
        shapes |= {at + f"self_attn.{name}_proj": (k * d, e) for name in "kv"}
        shapes |= {at + f"self_attn.{name}_norm": (d,) for name in "qk"}
        shapes |= {at + f"mlp.{name}_proj": (f, e) for name in ("gate", "up")}
        shapes |= {at + "mlp.down_proj": (e, f)}
    generator = torch.Generator().manual_seed(0)
    named = {f"model.{name}.weight": shape for name, shape in shapes.items()}
    named["lm_head.weight"] = (v, e)
    found = {name: torch.randn(shape, generator=generator) for name, shape in named.items()}
    return {k: v for k, v in {**found, **changes}.items() if v is not None}


def load(folder, tensors, hf=QWEN3, dtype=torch.float32, **settings):
    if isinstance(tensors, dict):
        save_file(tensors, folder / "model.safetensors")
    model_type, config = read_model_config(hf)
    settings = {"folder": folder, "progress": False, **settings}
    return build_model(model_type, config, dtype=dtype, **settings)


def test_fused_weights_hold_their_parts_in_order(tmp_path):
    tensors = tensors_of()
    model = load(tmp_path, tensors)
    at = "model.layers.1.self_attn."
    want = torch.cat([tensors[at + f"{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(plain_param(model, "layers.1.self_attn.qkv_proj.weight"), want)
    at = "model.layers.0.mlp."
    want = torch.cat([tensors[at + f"{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(plain_param(model, "layers.0.mlp.gate_up_proj.weight"), want)


def test_every_parameter_is_filled_and_none_requires_gradients(tmp_path):
    model = load(tmp_path, tensors_of())
    for name, value in model.named_parameters():
        assert not value.is_meta, name
        assert not value.requires_grad, name
    assert not model.training


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.norm.weight": None}, "1 missing in the checkpoint: norm.weight"),
        (
            {"model.layers.1.self_attn.k_proj.weight": None},
            "1 missing in the checkpoint: layers.1.self_attn.k_proj.weight",
        ),
        ({"lm_head.weight": None}, "1 missing in the checkpoint: lm_head.weight"),
        (
            {"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)},
            "1 unexpected in the checkpoint: model.layers.2.mlp.up_proj.weight",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)},
            "1 unexpected in the checkpoint: model.layers.0.self_attn.q_proj.bias",
        ),
        (
            {"model.layers.0.mlp.down_proj.weight": torch.zeros(48, 32)},
            "1 of the wrong shape: model.layers.0.mlp.down_proj.weight is [48, 32], "
            "the model has [32, 48]",
        ),
        (
            {"model.layers.0.self_attn.k_proj.weight": torch.zeros(32, 32)},
            "model.layers.0.self_attn.k_proj.weight is [32, 32], the model has [16, 32]",
        ),
        ({"norm.weight": torch.zeros(32)}, "1 given more than once: norm.weight"),
        (
            {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(64, 32)},
            "given more than once",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path, changes, says):
    with pytest.raises(WeightError) as error:
        load(tmp_path, tensors_of(**changes))
    assert says in str(error.value)


def test_all_troubles_are_listed_at_once(tmp_path):
    changes = {"model.norm.weight": None, "extra": torch.zeros(1), "lm_head.weight": torch.zeros(1)}
    with pytest.raises(WeightError) as error:
        load(tmp_path, tensors_of(**changes))
    for words in ("1 missing", "1 unexpected", "1 of the wrong shape"):
        assert words in str(error.value)


def test_a_long_list_is_cut(tmp_path):
    with pytest.raises(WeightError, match=r"24 missing .* and 12 more"):
        load(tmp_path, {"lm_head.weight": torch.zeros(50, 32)})


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path):
    load(tmp_path, tensors_of(**{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))


@pytest.mark.parametrize("head", [None, torch.zeros(50, 32)])
def test_a_tied_head_is_the_embedding_itself(tmp_path, head):
    tensors = tensors_of(**{"lm_head.weight": head})
    model = load(tmp_path, tensors, {**QWEN3, "tie_word_embeddings": True})
    assert model.lm_head.weight is model.embed_tokens.weight
    want = tensors["model.embed_tokens.weight"]
    assert torch.equal(plain_param(model, "lm_head.weight"), want)


def test_a_sharded_checkpoint_loads_like_one_file(tmp_path):
    tensors = tensors_of()
    names = sorted(tensors)
    for i, half in enumerate((names[::2], names[1::2])):  # parts of one parameter in both files
        save_file({name: tensors[name] for name in half}, tmp_path / f"model-{i}.safetensors")
    index = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    model = load(tmp_path, None)
    want = torch.cat([tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(plain_param(model, "layers.0.self_attn.qkv_proj.weight"), want)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    tensors = tensors_of()
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "more.safetensors")
    with pytest.raises(WeightError, match=r"model\.norm\.weight"):
        load(tmp_path, tensors)


def test_a_pytorch_file_loads_too_and_as_strictly(tmp_path):
    tensors = tensors_of()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    model = load(tmp_path, None)
    assert torch.equal(plain_param(model, "lm_head.weight"), tensors["lm_head.weight"])
    torch.save(tensors_of(**{"model.norm.weight": None}), tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"missing in the checkpoint: norm\.weight"):
        load(tmp_path, None)


def test_weights_are_converted_to_the_requested_dtype(tmp_path):
    tensors = tensors_of()
    model = load(tmp_path, tensors, dtype=torch.bfloat16)
    want = tensors["model.layers.0.mlp.down_proj.weight"].bfloat16()
    assert torch.equal(plain_param(model, "layers.0.mlp.down_proj.weight"), want)
    assert model.norm.weight.dtype == torch.bfloat16


def test_parameters_do_not_live_in_the_file(tmp_path):
    tensors = tensors_of()
    model = load(tmp_path, tensors)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\xff" * size)
    assert torch.equal(plain_param(model, "norm.weight"), tensors["model.norm.weight"])


def test_transposed_and_unprefixed_gpt2_weights_load(tmp_path):
    _, config = read_model_config(GPT2)
    blank = build_model("gpt2", config, load_format="dummy", dtype=torch.float32)
    names, tensors = gpt2.Model.weights, {}
    for path, layer in blank.named_modules():
        for param in layer.param_names() if isinstance(layer, ParamModule) else ():
            (theirs,) = names.checkpoint_paths(path)
            value = plain_param(blank, f"{path}.{param}")
            turned = param == "weight" and path.rpartition(".")[2] in names.transpose
            tensors[f"{theirs}.{param}"] = value.t().contiguous() if turned else value.clone()
    assert tensors["h.0.mlp.c_proj.weight"].shape == tensors["h.0.mlp.c_fc.weight"].shape[::-1]
    assert tensors["h.0.attn.c_proj.bias"].shape == tensors["ln_f.bias"].shape
    del tensors["lm_head.weight"]
    tensors["wte.weight"] = plain_param(blank, "embed_tokens.weight")
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # causal masks in the published file
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    model = load(tmp_path, tensors, GPT2)
    for name in ("attn.qkv_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.bias"):
        name = f"layers.0.{name}"
        assert torch.equal(plain_param(model, name), plain_param(blank, name))


@pytest.mark.parametrize("prefix", ["decoder.", "model.decoder."])
def test_opt_loads_under_both_of_its_prefixes_and_skips_unused_positions(tmp_path, prefix):
    hf = {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 48}
    hf |= {"num_attention_heads": 4, "vocab_size": 50, "max_position_embeddings": 64}
    from transformers import OPTConfig, OPTForCausalLM

    theirs = OPTForCausalLM(OPTConfig(**{k: v for k, v in hf.items() if k != "model_type"}))
    tensors = {
        name.replace("model.decoder.", prefix): value.clone()
        for name, value in theirs.state_dict().items()
        if name != "lm_head.weight"
    }
    model = load(tmp_path, tensors, hf)
    positions = tensors[f"{prefix}embed_positions.weight"]
    assert torch.equal(plain_param(model, "embed_positions.weight"), positions[2:])


def test_a_built_model_can_be_loaded_again(tmp_path):
    model = load(tmp_path, tensors_of(), dtype=torch.bfloat16)
    tensors = {name: value + 1 for name, value in tensors_of().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    _, config = read_model_config(QWEN3)
    load_weights(model, config, tmp_path, "auto", torch.bfloat16, CPU, progress=False, seed=0)
    for ours, theirs in [
        ("layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        ("norm.weight", "model.norm.weight"),
    ]:
        assert torch.equal(plain_param(model, ours), tensors[theirs].bfloat16())


def test_loading_without_a_folder_is_refused():
    _, config = read_model_config(QWEN3)
    with pytest.raises(ConfigError, match="needs a folder"):
        build_model("qwen3", config, dtype=torch.float32)


def test_state_of_an_unknown_parameter_is_a_key_error(tmp_path):
    model = load(tmp_path, tensors_of())
    with pytest.raises(KeyError, match=r"layers\.0\.mlp\.gate_proj\.weight"):
        plain_param(model, "layers.0.mlp.gate_proj.weight")
