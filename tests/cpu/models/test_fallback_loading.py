"""Loading of models through transformers: code of the user's, names of checkpoints, 8-bit weights."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from quire import env
from quire.config.options import Options
from quire.engine.startup.model_setup import describe_model
from quire.errors import ConfigError, WeightError
from quire.layers import Embedding
from quire.models.build import build_model, read_model_config
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import logprobs, prompt_of
from tests.cpu.models.test_fallback import MODELS, SMALL, VOCAB, ours, peer

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path(__file__).with_name("imported").touch()

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        result.logits = result.logits * 0.5
        return result
"""


def stepped(model, config, ids):
    return Stepper(model, config).logits(ids).log_softmax(-1)


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """(folder of a model with code of its own, transformers' model of the same weights)."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "model"
    theirs = peer("llama", folder)
    (folder / "own.py").write_text(CODE)
    hf = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    hf |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(hf))
    return folder, hf, theirs


def test_code_of_the_folder_is_not_imported_without_trust(own_model, tmp_path):
    folder, hf, _ = own_model
    with pytest.raises(ConfigError, match="trust_remote_code"):
        read_model_config(hf)
    assert not (folder / "imported").exists()
    assert not (tmp_path / "modules").exists()


def test_code_of_the_folder_runs_with_trust_and_is_named(own_model, caplog):
    folder, hf, theirs = own_model
    with caplog.at_level("WARNING", "quire"):
        model_type, config = read_model_config(hf, "auto", folder)
    assert model_type == "transformers"
    assert "own.OwnForCausalLM" in caplog.text
    settings = {"folder": folder, "dtype": torch.float32, "progress": False}
    ids = prompt_of(40, VOCAB)
    got = stepped(build_model(model_type, config, **settings), config, ids)
    with torch.inference_mode():
        want = (theirs(input_ids=torch.tensor([ids])).logits[0] * 0.5).log_softmax(-1)
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["someone/else--own.OwnForCausalLM", ["own", "Own"]])
def test_code_of_another_repository_is_refused(own_model, name):
    folder, hf, _ = own_model
    hf["auto_map"]["AutoConfig"] = name
    with pytest.raises(ConfigError, match="only code in the model's own folder"):
        read_model_config(hf, "auto", folder)


def test_a_class_that_the_user_registers_is_served(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    class RegisteredConfig(LlamaConfig):
        model_type = "registered_llama"

    class RegisteredForCausalLM(LlamaForCausalLM):
        config_class = RegisteredConfig

    AutoConfig.register("registered_llama", RegisteredConfig, exist_ok=True)
    AutoModelForCausalLM.register(RegisteredConfig, RegisteredForCausalLM, exist_ok=True)
    theirs = peer("llama", tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "registered_llama"}
    model_type, config = read_model_config(hf)
    settings = {"folder": tmp_path, "dtype": torch.float32, "progress": False}
    ids = prompt_of(40, VOCAB)
    got = stepped(build_model(model_type, config, **settings), config, ids)
    assert (got - logprobs(theirs, ids)).abs().max() < 1e-4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_names_of_the_hub_and_of_transformers_are_both_read(name, tmp_path):
    """save_pretrained() writes those of the hub, one tensor per expert."""
    theirs = peer(name, tmp_path)
    ids = prompt_of(20, VOCAB)
    model, config = ours(tmp_path)
    want = stepped(model, config, ids)
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    save_file(
        {key: value.contiguous() for key, value in theirs.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    model, config = ours(tmp_path)
    assert torch.equal(stepped(model, config, ids), want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", ["missing", "unexpected", "misshaped"])
def test_a_checkpoint_that_differs_is_refused_by_name(tmp_path, change):
    theirs = peer("qwen3_moe", tmp_path)
    tensors = {key: value.contiguous() for key, value in theirs.state_dict().items()}
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    name = "model.layers.1.self_attn.k_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        name = "model.layers.1.self_attn.more.weight"
        tensors[name] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][:3].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=name.replace(".", r"\.")):
        ours(tmp_path)


def test_fp8_weights_are_those_of_the_native_model(tmp_path):
    peer("llama", tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    ids, found = prompt_of(40, VOCAB), []
    for impl in ("quire", "transformers"):
        model_type, config = read_model_config(hf, impl)
        settings = {"folder": tmp_path, "dtype": torch.float32, "progress": False, "quant": "fp8"}
        found.append(stepped(build_model(model_type, config, **settings), config, ids))
    assert (found[0] - found[1]).abs().max() < 1e-3
    plain = stepped(*ours(tmp_path), ids)
    assert (found[1] - plain).abs().max() > 1e-2, "nothing was quantized"


def test_an_embedding_may_pad_with_any_token(tmp_path):
    from transformers import AutoConfig

    hf = AutoConfig.for_model("llama", **SMALL, pad_token_id=96).to_dict()
    model_type, config = read_model_config(hf, "transformers")
    model = build_model(model_type, config, load_format="dummy", dtype=torch.float32)
    assert isinstance(model.embed_tokens, Embedding)


def test_native_models_do_not_import_transformers():
    program = (
        "import sys, json\n"
        "from quire.models.build import build_model, read_model_config\n"
        "import torch\n"
        f"kind, config = read_model_config(json.loads({json.dumps(json.dumps({'model_type': 'llama', **SMALL}))}))\n"
        "build_model(kind, config, load_format='dummy', dtype=torch.float32)\n"
        "assert kind == 'llama' and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install 'transformers"):
        read_model_config({"model_type": "llama", **MODELS["llama"]}, "transformers")


def test_a_length_that_the_user_sets_is_not_shortened_by_the_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    given = {"model": str(tmp_path), "load_format": "dummy", "model_impl": "transformers"}
    lengths = [
        describe_model(Options.from_flat({**given, "hf_overrides": over}), env.read()).facts.max_len
        for over in ({}, {"max_position_embeddings": 2048})
    ]
    assert lengths == [128, 2048]
