"""One layer filled from checkpoint tensors by the loader, without a model."""

import torch

from quire.weights.mapping import ParamTarget, checkpoint_shape
from quire.weights.weight_loader import WeightLoader


def load_layer(layer, method, tensors, dtype=torch.float32):
    """The layer with this method and {parameter: tensor}, finished."""
    method = method.adapted(layer, dict.fromkeys(tensors, ()))
    layer.set_quant_method(method)
    loader = WeightLoader(
        {"x": layer},
        lambda one: method.process_after_load(one, dtype),
        dtype=dtype,
        device=torch.device("cpu"),
    )
    assert set(layer.param_names()) == set(tensors)
    targets = {name: ParamTarget("x", name, None, False) for name in tensors}
    for name, target in targets.items():
        assert checkpoint_shape(layer, target) == tensors[name].shape, name
    loader.load(targets, tensors.items())
    return layer
