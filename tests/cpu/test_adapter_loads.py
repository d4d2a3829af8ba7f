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
from quire.weights.adapters.fill import is_finite, transposed


def random(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


DELTAS = [
    LinearDelta(random(4, 8), random(4, 6)),
    LinearDelta(random(1, 8), random(1, 6), random(6), torch.rand(6)),
    EmbeddingDelta(random(4, 50), random(4, 8)),
    ExpertsDelta(random(3, 2, 8), random(3, 2, 6)),
    WholeWeight(random(6, 8)),
    TokenRows(torch.tensor([2, 5]), random(2, 8), torch.tensor([-1, -1, 0, -1, -1, 1])),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.3, 2.0, 1 / 3, 16 / 64**0.5, 1e-3])
def test_a_scale_is_multiplied_in_float32_whatever_the_dtype(dtype, scale):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    every = every[every.isfinite()]
    want = (every.float() * scale).to(dtype)
    assert torch.equal(every.clone().mul_(scale), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(16, 4096), (1, 7), (33, 1), (0, 5), (3, 3)])
def test_matrices_are_transposed_into_memory_of_their_own(shape, dtype):
    matrix = torch.randn(shape).to(dtype)
    found = transposed(matrix)
    assert torch.equal(found, matrix.t())
    assert found.is_contiguous()
    before = found.clone()
    matrix.zero_()
    assert torch.equal(found, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 16, 1000])
def test_every_value_that_is_not_finite_is_found(size, dtype, bad):
    values = torch.randn(size).to(dtype)
    values[0] = torch.finfo(dtype).max  # the sum of some is infinite
    values[-1] = values[0] if size > 1 else 0
    assert is_finite(values)
    for at in {0, size // 2, size - 1}:
        broken = values.clone()
        broken[at] = bad
        assert not is_finite(broken)
    assert is_finite(values[:0])
