"""From an adapter on the host to a slot: what travels with a step, and where it is copied."""

import msgspec
import pytest
import torch

from quire.runner import model_input
from quire.runner.adapters.adapted_layer import SlotLoad
from quire.runner.model_input import ModelInput
from quire.runner.parts.adapters import AdaptersPart
from quire.weights.adapters.adapter import (
    EmbeddingDelta,
    ExpertsDelta,
    LinearDelta,
    TokenRows,
    WholeWeight,
    tensors_of,
)


def random(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


DELTAS = [
    LinearDelta(random(4, 8), random(4, 6)),
    LinearDelta(random(1, 8), random(1, 6), random(6), torch.rand(6)),
    EmbeddingDelta(random(4, 50), random(4, 8)),
    ExpertsDelta(random(3, 2, 8), random(3, 2, 6)),
    WholeWeight(random(6, 8)),
    TokenRows(torch.tensor([2, 5]), random(2, 8)),
]


@pytest.mark.parametrize("delta", DELTAS, ids=lambda one: type(one).__name__)
def test_every_kind_of_delta_travels_to_other_processes(delta):
    part = AdaptersPart(bytes(4), (SlotLoad(1, {"layers.0.mlp": {2: delta}}),))
    step = ModelInput((), (), [], (), (), (), None, {"adapters": part})
    decoded = model_input.decode(model_input.encode(step), {"adapters": AdaptersPart})
    (load,) = decoded.parts["adapters"].loads
    assert load.slot == 1
    found = load.deltas["layers.0.mlp"][2]
    assert type(found) is type(delta)
    want = dict(tensors_of(delta))
    assert dict(tensors_of(found)).keys() == want.keys()
    for name, tensor in tensors_of(found):
        assert tensor.dtype == want[name].dtype
        assert torch.equal(tensor, want[name])


def test_a_delta_of_no_kind_is_refused():
    part = AdaptersPart(bytes(4), (SlotLoad(1, {"layers.0.mlp": {2: [random(1)]}}),))
    step = ModelInput((), (), [], (), (), (), None, {"adapters": part})
    with pytest.raises(msgspec.ValidationError):
        model_input.decode(model_input.encode(step), {"adapters": AdaptersPart})
