"""Scales of an fp8 cache come with the checkpoint, under the names of several makers."""

import pytest
import torch

from quire.distributed.mesh import Mesh
from quire.errors import WeightError
from quire.layers.attention import Attention
from quire.quant.kv_scales import KvScaleLoader
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
        (torch.ones(3), r"k_scale is \[3\]; one scale per layer or per KV head"),
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


def heads(scales):
    return scales.tolist() if scales is not None else None


@pytest.mark.parametrize("shape", [(4,), (4, 1, 1)])
def test_scales_of_heads_land_on_the_heads_of_the_rank(tmp_path, shape):
    at = "model.layers.1.self_attn."
    k = torch.tensor([0.5, 0.25, 0.125, 2.0])
    tensors = plain() | {f"{at}k_scale": k.view(shape), f"{at}v_scale": torch.tensor(3.0)}
    whole = attention(load(tmp_path, tensors), 1)
    assert heads(whole.head_scales) == [k.tolist(), [3.0] * 4]
    assert attention(load(tmp_path, tensors), 0).head_scales is None
    layer = Attention(4, 4, 8)
    layer.shard(Mesh(tp=2, rank=1))
    loader = KvScaleLoader({"0.attn": layer}, SamePaths(), torch.device("cpu"))
    given = [("0.v_scale", torch.tensor(3.0)), ("0.k_scale", k), ("0.q_proj.weight", k)]
    assert [name for name, _ in loader.extract_scales(given)] == ["0.q_proj.weight"]
    assert heads(layer.head_scales) == [[0.125, 2.0], [3.0, 3.0]]


class SamePaths:
    def module_path(self, name):
        return name


def test_a_cache_of_integers_needs_the_scales_of_all_layers():
    layers = {f"{i}.attn": Attention(4, 4, 8) for i in range(2)}
    loader = KvScaleLoader(layers, SamePaths(), torch.device("cpu"))
    list(loader.extract_scales([("0.kv_scale", torch.tensor(0.5)), ("1.k_scale", torch.ones(1))]))
    with pytest.raises(WeightError, match=r"none for 1: 1\.v_scale; set kv_cache_dtype"):
        loader.require_all()
    list(loader.extract_scales([("1.v_scale", torch.ones(1))]))
    loader.require_all()
