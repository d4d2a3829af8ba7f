"""Decoders with a head that classifies, or with none, against transformers' classes."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.facts import read_hf_config
from quire.errors import ConfigError, WeightError
from quire.models.base import LabelTokens
from quire.models.build import build_model, read_model_config
from tests import tiers
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import peer, prompt_of, scale_weights, tiny

pytestmark = pytest.mark.sampled(3)

LABELS = 3
SEQUENCE = ["llama", "qwen3", "gemma2", "gpt2", "opt_post_norm_projected"]
SEQUENCE_TOO = ["qwen2", "mistral", "mixtral", "gemma3_text", "phi", "phi3", "falcon", "bloom"]
SEQUENCE_TOO += [
    "gpt_neox",
    "gptj",
    "starcoder2",
    "stablelm",
    "gpt_bigcode",
    "mpt",
    "glm",
    "qwen3_moe",
]
TOKENS = ["llama", "gpt2"]
TOKENS_TOO = ["qwen2", "qwen3", "gemma2", "gpt_neox", "bloom", "falcon", "mpt", "mixtral"]


def classifier(variant, folder, kind, labels=LABELS):
    """A class of transformers with a head of labels, saved to the folder."""
    import transformers

    hf, test = tiny(variant)
    config = transformers.AutoConfig.for_model(**hf | {"num_labels": labels, "pad_token_id": 0})
    torch.manual_seed(4)
    auto = getattr(transformers, f"AutoModelFor{kind}Classification")
    model = auto.from_config(config, attn_implementation=test.get("attention", "eager")).eval()
    scale_weights(model, test.get("embeddings", 0.3 if "gemma" in hf["model_type"] else 2.0))
    model.save_pretrained(folder)
    return model


def built(folder, impl="auto", **head):
    model_type, config = read_model_config(read_hf_config(folder), impl, **head)
    config = replace(config, max_len=min(config.max_len, 1024))
    model = build_model(model_type, config, folder=folder, dtype=torch.float32, progress=False)
    return model, config


def states(model, config, ids):
    return Stepper(model, config).hidden(ids).float()


@pytest.mark.slow("the first of them imports transformers")
@pytest.mark.parametrize(
    ("variant", "impl"),
    [
        *((one, "auto") for one in SEQUENCE),
        ("qwen2", "transformers"),
        *tiers.long(*((one, "auto") for one in SEQUENCE_TOO)),
        *tiers.long(("llama", "transformers"), ("gpt2", "transformers")),
    ],
)
def test_a_sequence_has_the_logits_of_transformers(variant, impl, tmp_path):
    theirs = classifier(variant, tmp_path, "Sequence")
    model, config = built(tmp_path, impl, head="classify", labels=LABELS)
    found = []
    for length in (1, 2, 33):
        ids = prompt_of(length, config.vocab)
        with torch.inference_mode():
            want = theirs(torch.tensor([ids]), use_cache=False).logits
            got = model.classify(states(model, config, ids)[-1:])
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        found.append(want)
    assert torch.cat(found).std(0).min() > 0.1, "logits that are alike prove nothing"


@pytest.mark.parametrize("variant", [*TOKENS, *tiers.long(*TOKENS_TOO)])
def test_every_token_has_the_logits_of_transformers(variant, tmp_path):
    theirs = classifier(variant, tmp_path, "Token")
    model, config = built(tmp_path, head="token_classify", labels=LABELS)
    ids = prompt_of(33, config.vocab)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
        got = model.classify(states(model, config, ids))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("impl", "tied"), [("auto", True), ("auto", False), ("transformers", True)]
)
@pytest.mark.parametrize("difference", [True, False])
def test_rows_of_the_output_head_classify(impl, tied, difference, tmp_path):
    theirs = peer("llama_bias_tied_head_dim" if tied else "llama", tmp_path)
    assert theirs.config.tie_word_embeddings == tied
    tokens = LabelTokens((7, 40), difference)
    model, config = built(tmp_path, impl, head="classify", labels=1, label_tokens=tokens)
    ids = prompt_of(20, config.vocab)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0, -1, [7, 40]]
        got = model.classify(states(model, config, ids)[-1:])[0]
    want = want[1:] - want[:1] if difference else want
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_rows_of_a_head_with_bias_scale_and_cap_classify(tmp_path):
    theirs = peer("phi", tmp_path)
    model, config = built(tmp_path, head="classify", label_tokens=LabelTokens((9, 4), True))
    ids = prompt_of(20, config.vocab)
    with torch.inference_mode():
        logits = theirs(torch.tensor([ids])).logits[0, -1]
        got = model.classify(states(model, config, ids)[-1:])[0]
    assert theirs.lm_head.bias is not None
    torch.testing.assert_close(got, logits[[4]] - logits[[9]], atol=1e-4, rtol=1e-4)
    theirs = peer("gemma2", tmp_path)
    model, config = built(tmp_path, head="classify", label_tokens=LabelTokens((9, 4), True))
    with torch.inference_mode():
        logits = theirs(torch.tensor([ids])).logits[0, -1]
        got = model.classify(states(model, config, ids)[-1:])[0]
    assert theirs.config.final_logit_softcapping
    torch.testing.assert_close(got, logits[[4]] - logits[[9]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("labels", [1, 2])
def test_the_head_of_reward_models_of_qwen2(labels, tmp_path):
    """Qwen2ForRewardModel and Qwen2ForProcessRewardModel: two matrices with a ReLU between."""
    theirs = peer("qwen2", tmp_path)
    head = torch.nn.Sequential(
        torch.nn.Linear(theirs.config.hidden_size, theirs.config.hidden_size),
        torch.nn.ReLU(),
        torch.nn.Linear(theirs.config.hidden_size, labels),
    )
    add_tensors(tmp_path, {f"score.{name}": value for name, value in head.state_dict().items()})
    model, config = built(tmp_path, head="token_classify", labels=labels)
    ids = prompt_of(20, config.vocab)
    with torch.inference_mode():
        want = head(theirs.model(torch.tensor([ids])).last_hidden_state[0])
        got = model.classify(states(model, config, ids))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def add_tensors(folder, tensors):
    path = folder / "model.safetensors"
    save_file(load_file(path) | {k: v.detach().clone() for k, v in tensors.items()}, path)


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("variant", ["qwen3", "gpt2", *tiers.long("opt", "gemma3_text")])
def test_a_folder_of_the_base_model_needs_no_head(variant, impl, tmp_path):
    theirs = peer(variant, tmp_path)
    getattr(theirs, theirs.base_model_prefix).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    names = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith(("model.", "transformer.", "lm_head")) for name in names)
    hf = json.loads((tmp_path / "config.json").read_text())
    hf["architectures"] = [one.removesuffix("Model") + "ForCausalLM" for one in hf["architectures"]]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    model, config = built(tmp_path, impl, head="none")
    ids = prompt_of(20, config.vocab)
    with torch.inference_mode():
        want = getattr(theirs, theirs.base_model_prefix)(torch.tensor([ids])).last_hidden_state[0]
    torch.testing.assert_close(states(model, config, ids), want, atol=1e-4, rtol=1e-4)
    assert not any("head" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_a_checkpoint_without_the_head_stops_the_start(impl, tmp_path):
    peer("llama", tmp_path)
    with pytest.raises(WeightError, match=r"1 missing in the checkpoint: score\.weight"):
        built(tmp_path, impl, head="classify", labels=2)
    add_tensors(tmp_path, {"score.weight": torch.zeros(3, 64)})
    with pytest.raises(WeightError, match=r"score\.weight is \[3, 64\], the model has \[2, 64\]"):
        built(tmp_path, impl, head="classify", labels=2)


def test_tokens_of_a_checkpoint_without_an_output_head_are_refused(tmp_path):
    classifier("llama", tmp_path, "Sequence")
    with pytest.raises(WeightError, match="no output head, so classifier_from_token"):
        built(tmp_path, head="classify", label_tokens=LabelTokens((1, 2), True))


def test_a_head_is_float32_whatever_the_models_dtype_is(tmp_path):
    classifier("llama", tmp_path, "Sequence")
    for dtype, stored in (("float32", torch.float32), ("model", torch.bfloat16)):
        settings = {"head": "classify", "labels": LABELS, "head_dtype": dtype}
        model_type, config = read_model_config(read_hf_config(tmp_path), **settings)
        model = build_model(
            model_type, config, folder=tmp_path, dtype=torch.bfloat16, progress=False
        )
        assert model.score.weight.dtype == stored
        assert model.classify(torch.randn(2, config.hidden)).dtype == torch.float32


def test_dummy_weights_classify():
    for settings in ({"labels": 2}, {"label_tokens": LabelTokens((1, 2), True)}):
        model_type, config = read_model_config(tiny("llama")[0], head="classify", **settings)
        model = build_model(model_type, config, load_format="dummy", dtype=torch.float32)
        assert model.classify(torch.randn(5, config.hidden)).shape[0] == 5


def test_models_with_an_encoder_and_a_decoder_do_not_pool(tmp_path):
    hf = {"model_type": "t5", "is_encoder_decoder": True, "vocab_size": 64, "d_model": 16}
    hf |= {"num_heads": 2, "num_layers": 1, "d_ff": 32, "d_kv": 8, "decoder_start_token_id": 0}
    model_type, config = read_model_config(hf, head="none")
    with pytest.raises(ConfigError, match="cannot be pooling models"):
        build_model(model_type, config, load_format="dummy", dtype=torch.float32)


INTERNLM2 = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def as_internlm2(folder):
    """Give a folder of Llama the names and the layout of InternLM2."""
    hf = json.loads((folder / "config.json").read_text())
    hf |= {"model_type": "internlm2", "architectures": ["InternLM2ForRewardModel"]}
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(hf))
    theirs, found = load_file(folder / "model.safetensors"), {}
    for name, value in theirs.items():
        for old, new in INTERNLM2.items():
            name = name.replace(old, new)
        if "q_proj" in name:
            q, k, v = (theirs[f"{name[: -len('q_proj.weight')]}{x}_proj.weight"] for x in "qkv")
            q = q.unflatten(0, (kv_heads, heads // kv_heads, -1))
            k, v = (x.unflatten(0, (kv_heads, 1, -1)) for x in (k, v))
            name = name.replace("self_attn.q_proj", "attention.wqkv")
            value = torch.cat((q, k, v), dim=1).flatten(0, 2)
        if "_proj" not in name:
            found[name] = value
    save_file(found, folder / "model.safetensors")


def test_the_reward_model_of_internlm2(tmp_path):
    theirs = peer("llama", tmp_path)
    as_internlm2(tmp_path)
    model, config = built(tmp_path)
    ids = prompt_of(20, config.vocab)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids]))
        got = model.logits(states(model, config, ids))
        hidden = theirs.model(torch.tensor([ids])).last_hidden_state[0]
    torch.testing.assert_close(got, want.logits[0], atol=1e-4, rtol=1e-4)
    matrix = torch.randn(1, config.hidden)
    add_tensors(tmp_path, {"v_head.weight": matrix})
    model, config = built(tmp_path, head="token_classify", labels=1)
    with torch.inference_mode():
        got = model.classify(states(model, config, ids))
    torch.testing.assert_close(got, hidden @ matrix.T, atol=1e-4, rtol=1e-4)
