"""Decoders that attend in both directions, against transformers' classes."""

import json

import pytest
import torch

from quire.config.model_identity import resolve_identity
from quire.errors import ConfigError
from quire.models.build import build_model, read_model_config
from tests import tiers
from tests.cpu.encoders.tiny_encoders import hidden_of, texts_of
from tests.cpu.models.peers import scale_weights, tiny

IS_CAUSAL = ["llama", "mistral_window", "qwen3"]
IS_CAUSAL_TOO = ["qwen2", "qwen2_windows", "qwen3_bias_windows", "gemma2", "phi3", "mixtral_window"]
IS_CAUSAL_TOO += ["qwen3_moe", "gpt2", "gpt_neox", "olmo2"]


def base_of(variant, folder, **fields):
    """The base model of a variant in transformers, saved to the folder."""
    from transformers import AutoConfig, AutoModel

    hf, test = tiny(variant)
    torch.manual_seed(3)
    config = AutoConfig.for_model(**hf | fields)
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    scale_weights(model, test.get("embeddings", 0.3 if "gemma" in hf["model_type"] else 2.0))
    model.save_pretrained(folder)
    return model


def compare(theirs, folder, lengths=(1, 2, 33, 70)):
    hf = resolve_identity(json.loads((folder / "config.json").read_text()))
    model_type, config = read_model_config(hf, head="none")
    assert config.bidirectional
    assert config.attention_layers() == ()
    model = build_model(model_type, config, folder=folder, dtype=torch.float32, progress=False)
    texts = texts_of(lengths, config.vocab)
    for ids, got in zip(texts, hidden_of(model, texts), strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    with torch.inference_mode():
        changed = theirs(torch.tensor([[*ids[:-1], 3]]), use_cache=False).last_hidden_state[0]
    assert (changed[0] - want[0]).abs().max() > 1e-3, "the first token does not see the last"
    return config


@pytest.mark.slow("the first of them imports transformers")
@pytest.mark.parametrize("variant", [*IS_CAUSAL, *tiers.long(*IS_CAUSAL_TOO)])
def test_a_decoder_that_is_not_causal(variant, tmp_path):
    compare(base_of(variant, tmp_path, is_causal=False), tmp_path, (1, 2, 33, 20))


@pytest.mark.parametrize("window", [16, 17])
def test_gemma3_in_both_directions_halves_its_window(window, tmp_path):
    fields = {"use_bidirectional_attention": True, "sliding_window": window}
    theirs = base_of("gemma3_text", tmp_path, **fields)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["sliding_window"] // 2 == window // 2
    (tmp_path / "config.json").write_text(json.dumps(saved | {"sliding_window": window}))
    config = compare(theirs, tmp_path, (1, 12, 70, 15))
    assert set(config.windows) == {None, window // 2 + 1}


@pytest.mark.parametrize(
    ("variant", "says"),
    [("deepseek_v2", "runs in one direction only"), ("gpt_oss", "is_causal is False")],
)
def test_a_type_whose_attention_runs_in_one_direction_is_refused(variant, says):
    with pytest.raises(ConfigError, match=says):
        read_model_config(tiny(variant)[0] | {"is_causal": False})
