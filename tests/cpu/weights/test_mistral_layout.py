"""Folders of Mistral: params.json, consolidated*.safetensors and tekken.json."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config.facts import read_hf_config
from quire.errors import WeightError
from quire.models.build import build_model, read_model_config
from quire.weights.files import read_headers, weight_files
from quire.weights.mistral_layout import hf_name
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import continued, logprobs, peer, prompt_of
from tests.pure.text.tekken import tekken, write_tekken

SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "sliding_window": "sliding_window",
}
MOE = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
GROWS = {"original_max_position_embeddings": 128, "beta": 0.1}
YARN = {"original_max_position_embeddings": 128, "factor": 8, "apply_scale": False}
VARIANTS = {
    "mistral": {},
    "mistral_window": {},
    "mixtral": {"moe": {}},
    "ministral3": {"yarn": YARN, "llama_4_scaling": GROWS},
}
THEIRS = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
    "model.layers": "layers",
}


def in_mistral_layout(tensors, size):
    """Tensors of transformers as Mistral stores them."""
    found = {}
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            halves = tensor.view(-1, 2, size // 2, tensor.shape[-1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        for ours, theirs in THEIRS.items():
            name = name.replace(ours, theirs)
        found[name] = tensor.contiguous()
    return found


def mistral_folder(variant, folder, **more):
    """A folder in Mistral's format, with the weights of a transformers model."""
    saved = folder.parent / f"{folder.name}_saved"
    theirs = peer(variant, saved)
    hf = json.loads((saved / "config.json").read_text())
    params = {name: hf.get(field) for name, field in SIZES.items()} | VARIANTS[variant] | more
    params["rope_theta"] = hf["rope_parameters"]["rope_theta"]
    if "moe" in params:
        params["moe"] = {name: hf[field] for name, field in MOE.items()}
    params["head_dim"] = params["head_dim"] or params["dim"] // params["n_heads"]
    found = {}
    for path in weight_files(saved):
        found |= load_file(path)
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    save_file(in_mistral_layout(found, params["head_dim"]), folder / "consolidated.safetensors")
    return theirs


def loaded(folder, **settings):
    model_type, config = read_model_config(read_hf_config(folder))
    settings = {"dtype": torch.float32, "progress": False, **settings}
    return build_model(model_type, config, folder=folder, **settings), config


def assert_alike(theirs, folder):
    model, config = loaded(folder)
    ids = prompt_of(300, config.vocab)
    got = Stepper(model, config).logits(ids).log_softmax(-1)
    assert (got - logprobs(theirs, ids)).abs().max().item() < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_of_a_mistral_folder_equal_those_of_transformers(variant, tmp_path):
    theirs = mistral_folder(variant, tmp_path / "m")
    assert_alike(theirs, tmp_path / "m")


def test_shards_and_towers_are_read_too(tmp_path):
    theirs = mistral_folder("mistral", tmp_path / "m", vision_encoder={"hidden_size": 4})
    folder = tmp_path / "m"
    tensors = load_file(folder / "consolidated.safetensors")
    tensors |= {"vision_encoder.ln_pre.weight": torch.zeros(3)}
    tensors |= {"vision_language_adapter.w_in.weight": torch.zeros(3)}
    (folder / "consolidated.safetensors").unlink()
    index = {}
    for i, part in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        name = f"consolidated-{i + 1:05}-of-00002.safetensors"
        save_file({one: tensors[one] for one in part}, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_alike(theirs, folder)
    (folder / "consolidated-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightError, match=r"names 1 file.* that are not there: consolidated-00002"):
        loaded(folder)


def test_the_files_of_transformers_win_unless_mistral_is_demanded(tmp_path):
    mistral_folder("mistral", tmp_path / "m")
    save_file({"a": torch.zeros(1)}, tmp_path / "m" / "model.safetensors")
    assert list(read_headers(tmp_path / "m")) == ["a"]
    assert "model.embed_tokens.weight" in read_headers(tmp_path / "m", "mistral")
    with pytest.raises(WeightError, match="unexpected in the checkpoint: a"):
        loaded(tmp_path / "m")
    loaded(tmp_path / "m", load_format="mistral")


def test_what_is_missing_or_unknown_is_named(tmp_path):
    mistral_folder("mistral", tmp_path / "m", n_layers=3)
    with pytest.raises(WeightError, match=r"9 missing in the checkpoint: layers\.2\."):
        loaded(tmp_path / "m")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("layers.3.attention.wq.qscale_weight", "model.layers.3.self_attn.q_proj.weight_scale"),
        ("layers.3.feed_forward.w2.qscale_act", "model.layers.3.mlp.down_proj.input_scale"),
        ("layers.0.feed_forward.experts.7.w3.weight",
         "model.layers.0.block_sparse_moe.experts.7.w3.weight"),
        ("mm_whisper_embeddings.tok_embeddings.weight", "model.embed_tokens.weight"),
        ("mm_streams_embeddings.embedding_module.tok_embeddings.weight", "model.embed_tokens.weight"),
        ("vision_encoder.transformer.layers.0.attention.wq.weight",
         "vision_encoder.transformer.layers.0.attention.wq.weight"),
        ("layers.0.extra.weight", "layers.0.extra.weight"),
    ],
)  # fmt: skip
def test_names_of_tensors(theirs, ours):
    assert hf_name(theirs) == ours


@pytest.mark.slow("a whole engine")
def test_an_engine_serves_a_mistral_folder_as_text(tmp_path, caplog):
    size = tekken()["config"]["default_vocab_size"]
    theirs = mistral_folder("mistral", tmp_path / "m", vocab_size=199)
    write_tekken(tmp_path / "m")
    data = json.loads((tmp_path / "m" / "tekken.json").read_text())
    assert size > 199
    data["config"] |= {"default_vocab_size": 286, "default_num_special_tokens": 30}
    (tmp_path / "m" / "tekken.json").write_text(json.dumps(data))
    caplog.set_level(logging.INFO)
    llm = LLM(str(tmp_path / "m"), dtype="float32", max_model_len=64, num_gpu_blocks_override=16)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate(["the"], sampling, use_tqdm=False)
    assert output.prompt_token_ids[0] == 1
    ids = list(output.prompt_token_ids)
    assert list(output.outputs[0].token_ids) == continued(theirs, ids, 8)
