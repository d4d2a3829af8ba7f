"""Scales of an fp8 cache come with the checkpoint, under the names of several makers."""

import pytest
import torch

from quire.errors import WeightError
from tests.cpu.quant.checkpoints import load, plain


def attention(model, layer=0):
    return model.layers[layer].self_attn.attn


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (("k_scale", "v_scale"), (0.5, 0.25)),
        (("attn.k_scale", "attn.v_scale"), (0.5, 0.25)),
        (("k_proj.k_scale", "v_proj.v_scale"), (0.5, 0.25)),
        (("k_proj.output_scale", "v_proj.output_scale"), (0.5, 0.25)),
        (("kv_scale", "q_scale"), (0.5, 0.5)),
    ],
)
def test_they_land_on_their_layer(tmp_path, names, want):
    at = "model.layers.1.self_attn."
    scales = {at + names[0]: torch.tensor([0.5]), at + names[1]: torch.tensor(0.25)}
    model = load(tmp_path, plain() | scales)
    assert (attention(model, 1).k_scale, attention(model, 1).v_scale) == want
    assert (attention(model, 0).k_scale, attention(model, 0).v_scale) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (torch.ones(4), r"k_scale is \[4\]; one scale per layer"),
        (torch.tensor(0.0), "k_scale is 0.0; a scale is a positive number"),
        (torch.tensor(float("nan")), "k_scale is nan"),
    ],
)
def test_what_is_no_scale_is_refused(tmp_path, scale, says):
    with pytest.raises(WeightError, match=says):
        load(tmp_path, plain() | {"model.layers.0.self_attn.k_scale": scale})


def test_of_a_layer_that_is_not_there_they_are_unexpected(tmp_path):
    with pytest.raises(WeightError, match=r"unexpected .* model\.layers\.7\.self_attn\.k_scale"):
        load(tmp_path, plain() | {"model.layers.7.self_attn.k_scale": torch.tensor(1.0)})
