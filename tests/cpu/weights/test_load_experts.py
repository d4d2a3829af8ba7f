"""A bank of experts is filled from one tensor per expert and projection, or from one for all."""

import pytest
import torch

from quire.distributed.collectives import SingleProcessCollectives
from quire.distributed.mesh import Mesh
from quire.errors import WeightError
from quire.layers import ExpertActivation, Experts, Router, RoutingMethod
from quire.weights.mapping import Weights, assign_tensors
from quire.weights.weight_loader import WeightLoader

WEIGHTS = Weights(experts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)})
X, E, F = 3, 4, 6


def bank(bias=False, turned=False, mesh=None):
    made = Experts(E, F, X, ExpertActivation(), bias=bias, turned=turned, interleaved=turned)
    if mesh is not None:
        made.shard(mesh, SingleProcessCollectives())
    return made


def one_by_one():
    """Tensors of a checkpoint as most have them."""
    shapes = {"gate_proj": (F, E), "up_proj": (F, E), "down_proj": (E, F)}
    return {
        f"mlp.experts.{i}.{name}.weight": torch.randn(shape)
        for i in range(X)
        for name, shape in shapes.items()
    }


def load(layer, tensors, weights=WEIGHTS):
    holders = {"mlp.experts": layer}
    shapes = [(name, tensor.shape) for name, tensor in tensors.items()]
    targets = assign_tensors(holders, weights, shapes, tied=False)
    filler = WeightLoader(holders, lambda _: None, dtype=torch.float32, device=torch.device("cpu"))
    filler.load(targets, tensors.items())
    return layer


def test_tensors_of_single_experts_are_stacked():
    tensors = one_by_one()
    layer = load(bank(), dict(reversed(tensors.items())))
    for i in range(X):
        gate, up = layer.gate_up_proj[i].chunk(2)
        assert torch.equal(gate, tensors[f"mlp.experts.{i}.gate_proj.weight"])
        assert torch.equal(up, tensors[f"mlp.experts.{i}.up_proj.weight"])
        assert torch.equal(layer.down_proj[i], tensors[f"mlp.experts.{i}.down_proj.weight"])


def test_a_tensor_of_all_experts_is_taken_as_it_is():
    tensors = {
        "mlp.experts.gate_up_proj": torch.randn(X, 2 * F, E),
        "mlp.experts.down_proj": torch.randn(X, E, F),
    }
    layer = load(bank(), tensors)
    assert torch.equal(layer.gate_up_proj, tensors["mlp.experts.gate_up_proj"])
    assert torch.equal(layer.down_proj, tensors["mlp.experts.down_proj"])


def test_turned_tensors_are_turned_back_and_their_rows_sorted():
    tensors = {
        "mlp.experts.gate_up_proj": torch.randn(X, E, 2 * F),
        "mlp.experts.gate_up_proj_bias": torch.randn(X, 2 * F),
        "mlp.experts.down_proj": torch.randn(X, F, E),
        "mlp.experts.down_proj_bias": torch.randn(X, E),
    }
    layer = load(bank(bias=True, turned=True), tensors)
    first = tensors["mlp.experts.gate_up_proj"]
    want = torch.cat([first[:, :, 0::2], first[:, :, 1::2]], -1).transpose(1, 2)
    assert torch.equal(layer.gate_up_proj, want)
    bias = tensors["mlp.experts.gate_up_proj_bias"]
    assert torch.equal(layer.gate_up_proj_bias, torch.cat([bias[:, 0::2], bias[:, 1::2]], -1))
    assert torch.equal(layer.down_proj, tensors["mlp.experts.down_proj"].transpose(1, 2))
    assert torch.equal(layer.down_proj_bias, tensors["mlp.experts.down_proj_bias"])


def test_ranks_have_slices_of_every_expert_that_sum_to_the_whole():
    tensors = one_by_one()
    x, weights = torch.randn(5, E), torch.rand(5, 2)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1], [0, 2]], dtype=torch.int32)
    want = load(bank(), tensors)(x, ids, weights)
    parts = [load(bank(mesh=Mesh(tp=2, rank=rank)), tensors)(x, ids, weights) for rank in (0, 1)]
    torch.testing.assert_close(parts[0] + parts[1], want)


def test_what_is_missing_or_too_much_is_named_as_the_checkpoint_would():
    tensors = one_by_one()
    del tensors["mlp.experts.1.up_proj.weight"]
    tensors["mlp.experts.3.up_proj.weight"] = torch.randn(F, E)
    tensors["mlp.experts.2.down_proj.weight"] = torch.randn(F, E)
    with pytest.raises(WeightError) as caught:
        load(bank(), tensors)
    said = str(caught.value)
    assert "1 missing in the checkpoint: mlp.experts.1.up_proj.weight" in said
    assert "1 unexpected in the checkpoint: mlp.experts.3.up_proj.weight" in said
    assert "mlp.experts.2.down_proj.weight is [6, 4], the model has [4, 6]" in said


def test_a_bank_given_both_ways_is_refused():
    tensors = {**one_by_one(), "mlp.experts.down_proj": torch.randn(X, E, F)}
    with pytest.raises(WeightError, match=r"given more than once: mlp\.experts\.down_proj"):
        load(bank(), tensors)


def test_the_correction_of_a_router_stays_float32():
    layer = Router(E, X, RoutingMethod(1, "sigmoid"), correction=True)
    filler = WeightLoader(
        {"gate": layer}, lambda _: None, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    filler.fill_dummy(0)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.e_score_correction_bias.dtype == torch.float32
