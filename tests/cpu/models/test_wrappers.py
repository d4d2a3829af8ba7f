"""Multimodal checkpoints served as text: the text half equals transformers' whole model."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config.facts import read_hf_config
from quire.errors import WeightError
from quire.models.build import build_model, read_model_config
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import continued, logprobs, prompt_of, scale_weights
from tests.cpu.models.wrappers import WRAPPERS, wrapper_config


def saved(name, folder):
    """A tiny wrapper with random weights, saved as its files are on the hub."""
    from transformers import AutoModelForMultimodalLM

    torch.manual_seed(1)
    config = wrapper_config(name)
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()
    scale_weights(model, 0.3 if "gemma" in name else 2.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    if name == "qwen3_vl_moe":  # transformers turns what it has loaded back, but not a new model's
        renamed(folder, lambda tensors: {name: _turned(name, x) for name, x in tensors.items()})
    return model


def _turned(name, tensor):
    return tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor


def loaded(folder):
    model_type, config = read_model_config(read_hf_config(folder), language_model_only=True)
    return build_model(
        model_type, config, folder=folder, dtype=torch.float32, progress=False
    ), config


def assert_alike(theirs, folder):
    model, config = loaded(folder)
    ids = prompt_of(60, config.vocab - 1)
    got = Stepper(model, config).logits(ids).log_softmax(-1)
    assert (got - logprobs(theirs, ids)).abs().max().item() < 1e-4


def renamed(folder, change):
    """Write the tensors again, each under change(name, tensor)'s names."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_half_of_a_wrapper_equals_transformers(name, tmp_path):
    theirs = saved(name, tmp_path)
    assert_alike(theirs, tmp_path)


@pytest.mark.slow("a whole engine")
def test_an_engine_serves_the_text_half_and_logs_that(tmp_path, caplog):
    theirs = saved("mllama", tmp_path)
    ids = prompt_of(40, 198)
    caplog.set_level(logging.INFO)
    said = {"max_model_len": 128, "num_gpu_blocks_override": 16, "skip_tokenizer_init": True}
    llm = LLM(str(tmp_path), dtype="float32", language_model_only=True, **said)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == continued(theirs, ids, 8)
    assert (
        "is a multimodal model (mllama); its text half (mllama_text_model) is served" in caplog.text
    )


def test_names_of_newer_files_are_read_too(tmp_path):
    theirs = saved("llava", tmp_path)

    def newer(tensors):
        found = {}
        for name, tensor in tensors.items():
            name = name.replace("language_model.lm_head", "lm_head")
            name = name.replace("language_model.model.", "model.language_model.")
            found[name if name.startswith(("lm_head", "model.")) else f"model.{name}"] = tensor
        return found

    renamed(tmp_path, newer)
    assert_alike(theirs, tmp_path)


def test_an_older_file_has_the_text_half_at_the_top(tmp_path):
    theirs = saved("qwen2_vl", tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    text = hf.pop("text_config") | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps({**text, **hf}))
    assert_alike(theirs, tmp_path)


@pytest.mark.parametrize(
    "name", ["language_model.model.layers.0.extra.weight", "extra.weight", "model.layers.9.weight"]
)
def test_tensors_outside_the_towers_are_refused_if_unknown(tmp_path, name):
    saved("llava", tmp_path)
    renamed(tmp_path, lambda tensors: tensors | {name: torch.zeros(3)})
    with pytest.raises(WeightError, match="1 unexpected in the checkpoint: " + name):
        loaded(tmp_path)


def test_towers_are_refused_beside_a_model_that_has_none(tmp_path):
    saved("qwen2_vl", tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf["text_config"]))
    with pytest.raises(WeightError, match=r"unexpected in the checkpoint: visual\."):
        loaded(tmp_path)
