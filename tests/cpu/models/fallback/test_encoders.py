"""Encoders that run through their class of transformers have its outputs."""

import json
from dataclasses import replace

import pytest
import torch

from quire.config.conventions import ENCODERS
from quire.errors import ConfigError
from quire.models.build import build_model, read_model_config
from quire.models.fallback.hf_classes import encoder_class
from tests import tiers
from tests.cpu.encoders.tiny_encoders import hidden_of, scale_weights, texts_of
from tests.cpu.models.fallback.tiny_models import tiny_config

EVERYDAY = ["roc_bert", "roberta-prelayernorm"]
TYPES = [*EVERYDAY, *tiers.long(*(one for one in ENCODERS if one not in EVERYDAY))]
LABELS = 3
POOLED_BY_THE_BASE = {("classify", "roc_bert")}
"""Heads of which a part is in the base model."""


def pair(model_type, folder, head):
    """(the class of transformers, ours) of one random checkpoint."""
    config = tiny_config(model_type)
    config.num_labels, config._attn_implementation = LABELS, "eager"
    torch.manual_seed(1)
    theirs = encoder_class(config, head)(config).eval()
    scale_weights(theirs)
    theirs.save_pretrained(folder)
    hf = json.loads((folder / "config.json").read_text())
    labels = LABELS if "classify" in head else 0
    kind, read = read_model_config(hf, impl="transformers", head=head, labels=labels)
    read = replace(read, max_len=min(read.max_len, 128))
    assert read.bidirectional
    assert read.attention_layers() == ()
    return theirs, build_model(kind, read, folder=folder, dtype=torch.float32, progress=False)


@pytest.mark.slow("the first of them imports transformers")
@pytest.mark.parametrize("model_type", TYPES)
def test_hidden_states_of_packed_texts_are_those_of_each_alone(model_type, tmp_path):
    theirs, model = pair(model_type, tmp_path, "none")
    base = getattr(theirs, theirs.base_model_prefix)
    texts = texts_of((1, 2, 33, 50), 290)
    for ids, got in zip(texts, hidden_of(model, texts), strict=True):
        with torch.inference_mode():
            want = base(torch.tensor([ids]))[0][0]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("head", ["lm", "classify", "token_classify"])
def test_heads_are_those_of_the_class(model_type, head, tmp_path):
    if (head, model_type) in POOLED_BY_THE_BASE:
        with pytest.raises(ConfigError, match="the head that classifies of models of type"):
            pair(model_type, tmp_path, head)
        return
    theirs, model = pair(model_type, tmp_path, head)
    texts = texts_of((2, 33), 290)
    for ids, states in zip(texts, hidden_of(model, texts), strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([ids])).logits[0]
            if head == "lm":
                got = model.logits(states)
            else:
                got = model.classify(states[:1] if head == "classify" else states).squeeze(0)
        torch.testing.assert_close(got, want.view(got.shape), atol=1e-4, rtol=1e-4)


def test_a_decoder_is_no_encoder(monkeypatch):
    from quire.models.fallback import config

    monkeypatch.setattr(config, "ENCODERS", {"xglm": False, "biogpt": False})
    hf = json.loads(tiny_config("biogpt").to_json_string()) | {"model_type": "biogpt"}
    with pytest.raises(ConfigError, match=r"no class for it|one direction|neither all tokens"):
        read_model_config(hf, impl="transformers")
