"""The decoder skeleton: pipeline stages, given vectors and taps, over models that differ most."""

import dataclasses
import json

import pytest
import torch

from quire.config.recurrent_layers import stage_shares
from quire.layers import ParamModule
from quire.models.base import HiddenTaps
from quire.models.build import build_model, read_model_config
from tests import tiers
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import VARIANTS as ALL_VARIANTS
from tests.cpu.models.peers import peer, prompt_of, tiny

VARIANTS = ["llama", "opt_post_norm_projected", "gpt2", "gemma2", "deepseek_v3"]


class Extended:
    """A model whose steps get further inputs."""

    def __init__(self, model, **further):
        self.model, self.further = model, further
        self.modules, self.logits = model.modules, model.logits

    def __call__(self, step):
        return self.model(dataclasses.replace(step, **self.further))


def build_of(variant):
    model_type, config = read_model_config(tiny(variant)[0])

    def build(**settings):
        return build_model(
            model_type, config, load_format="dummy", dtype=torch.float32, seed=3, **settings
        )

    return build, config, prompt_of(40, config.vocab)


@pytest.fixture(params=VARIANTS)
def built(request):
    return build_of(request.param)


UNCUT = ("gemma4",)
"""Beginnings of variants whose layers share what no stage boundary can hand on."""
CUT = [one for one in ALL_VARIANTS if not one.startswith(UNCUT)]


@pytest.mark.parametrize(
    "variant", [*VARIANTS, *tiers.long(*(one for one in CUT if one not in VARIANTS))]
)
def test_stages_one_after_another_compute_what_one_model_does(variant):
    build, config, ids = build_of(variant)
    want = Stepper(build(), config).logits(ids)
    cut, facts = config.layers // 2, config.attention_layers()
    first, last = build(stage=range(cut)), build(stage=range(cut, config.layers))
    names = [
        {name for name, one in stage.named_modules() if isinstance(one, ParamModule)}
        for stage in (first, last)
    ]
    assert any("layers." in name for name in names[0])
    shared = {"embed_tokens"} if config.tied else set()
    assert names[0] & names[1] == shared, "each stage has its own weights"
    split = stage_shares(config.kinds, range(cut))[0].stop
    carried = Stepper(first, config, layers=facts[:split]).hidden(ids)
    stepper = Stepper(Extended(last, carried=carried), config, layers=facts[split:], seed=1)
    assert torch.equal(stepper.logits(ids), want)


def test_given_vectors_take_the_place_of_token_embeddings(built):
    build, config, ids = built
    model = build()
    want = Stepper(model, config).logits(ids)
    vectors = model.embed_tokens(torch.tensor(ids, dtype=torch.int32))
    blanks = [0] * len(ids)
    got = Stepper(Extended(model, inputs_embeds=vectors), config).logits(blanks)
    assert torch.equal(got, want)
    assert not torch.equal(Stepper(model, config).logits(blanks), want)


def test_a_tap_after_the_last_layer_is_what_the_last_norm_reads(built):
    build, config, ids = built
    model = build()
    want = Stepper(model, config).hidden(ids)
    taps = HiddenTaps(frozenset({0, config.layers - 1}))
    got = Stepper(Extended(model, taps=taps), config).hidden(ids)
    assert torch.equal(got, want)
    assert set(taps.hidden) == taps.layers
    torch.testing.assert_close(model.finish(taps.hidden[config.layers - 1], None), want)
    assert not torch.equal(taps.hidden[0], taps.hidden[config.layers - 1])


def test_a_stage_loads_its_share_of_a_checkpoint(tmp_path):
    peer("llama", tmp_path)
    model_type, config = read_model_config(json.loads((tmp_path / "config.json").read_text()))
    settings = {"folder": tmp_path, "dtype": torch.float32, "progress": False}
    whole = build_model(model_type, config, **settings).layers[1]
    stage = build_model(model_type, config, stage=range(1, 2), **settings).layers
    assert torch.equal(stage[1].input_layernorm.weight, whole.input_layernorm.weight)
    assert not list(stage[0].parameters())
