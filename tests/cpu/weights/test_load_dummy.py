"""Random stand-in weights: the same for a seed, never degenerate, and they keep numbers finite."""

import pytest
import torch

from quire.layers import ParamModule
from quire.models.build import build_model, read_model_config
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import VARIANTS, tiny
from tests.cpu.plain_param import plain_param


def dummy(variant, dtype=torch.float32, seed=0):
    model_type, config = read_model_config(tiny(variant)[0])
    return build_model(model_type, config, load_format="dummy", dtype=dtype, seed=seed), config


def parameters(model):
    leaves = ((name, m) for name, m in model.named_modules() if isinstance(m, ParamModule))
    names = [f"{name}.{param}" for name, leaf in leaves for param in leaf.param_names()]
    return {name: plain_param(model, name) for name in names}


def test_the_same_seed_gives_the_same_weights_and_another_does_not():
    first, again, other = (parameters(dummy("qwen3", seed=seed)[0]) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_no_two_rows_or_layers_are_alike_and_nothing_is_zero():
    found = parameters(dummy("llama")[0])
    for name, value in found.items():
        assert value.ne(0).float().mean() > 0.99, name
        if value.ndim == 2:
            assert len(value.unique(dim=0)) == len(value), name
    at = "layers.{}.mlp.down_proj.weight"
    assert not torch.equal(found[at.format(0)], found[at.format(1)])


def test_rows_differ_even_where_the_random_block_repeats():
    hf, _ = tiny("llama")
    model_type, config = read_model_config({**hf, "vocab_size": 40_000})  # 2.5 blocks
    model = build_model(model_type, config, load_format="dummy", dtype=torch.float32)
    weight = plain_param(model, "embed_tokens.weight")
    assert len(weight.unique(dim=0)) == len(weight)


def test_norm_weights_are_near_one_whatever_their_offset():
    for variant, offset in [("qwen3", 0.0), ("gemma3_text", 1.0)]:
        weight = plain_param(dummy(variant)[0], "norm.weight")
        assert (weight + offset - 1).abs().max() < 0.2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_stay_finite(variant):
    model, config = dummy(variant, torch.bfloat16)
    logits = Stepper(model, config, dtype=torch.bfloat16, max_tokens=64).logits(list(range(40)))
    assert logits.isfinite().all()
    assert 0.01 < logits.std() < 30
