"""A parameter of a model as a plain tensor, whatever its stored form."""

from torch import Tensor, nn

from quire.layers.param_module import ParamModule


def plain_param(model: nn.Module, name: str) -> Tensor:
    """Return one parameter. Raises KeyError."""
    path, _, param = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    module = module if isinstance(module, ParamModule) else None
    known = (*module.param_names(), *getattr(module, "matrices", ())) if module else ()
    if param not in known:
        raise KeyError(f"no parameter {name!r}")
    value = getattr(module, param)
    return value.detach() if isinstance(value, Tensor) else value.dequantize()
