"""Base of modules that own parameters: how checkpoint tensors fill them and ranks cut them.

It implements the loader's contract (quire.weights.mapping.ParamOwner). A module is built on the
meta device, with shapes only; `shard` may cut them; `set_param` brings the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.distributed.collectives import Collectives, SingleProcessCollectives
from quire.distributed.mesh import Mesh
from quire.weights.mapping import InitSpec, WeightShard, stored_shape, unsharded_layout


class ParamModule(nn.Module):
    """Parameters have the shape of their `layout`, before and after `shard`."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = Mesh()
        self.comm: Collectives = SingleProcessCollectives()
        self._param_names: list[str] = []

    def declare(self, *names: str) -> None:
        """Register parameters, empty, in the shape of their layout."""
        for name in names:
            self._param_names.append(name)
            self.set_param(name, torch.empty(stored_shape(self.layout(name))))

    def param_names(self) -> tuple[str, ...]:
        """Names of the parameters a checkpoint must fill."""
        return tuple(self._param_names)

    def shard(self, mesh: Mesh, comm: Collectives) -> None:
        """Become this rank's share, before values are loaded: parameters are emptied."""
        self.mesh, self.comm = mesh, comm
        for name in self._param_names:
            self.set_param(name, torch.empty(stored_shape(self.layout(name)), device="meta"))

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        """How checkpoint tensors fill a parameter."""
        raise NotImplementedError

    def local_part(self, param: str, part: int) -> int | None:
        """Return this rank's number of a part of a checkpoint's parameter; None: others have it."""
        return part

    def owner_of(self, param: str, part: int) -> tuple[str, int]:
        """Return the parameter, and the part of it, that a part of a checkpoint's parameter
        fills."""
        return param, part

    def stored_as(self, param: str, part: int) -> tuple[str, int]:
        """Return what a checkpoint calls a part: the inverse of local_part and owner_of."""
        return param, part

    def init_spec(self, param: str) -> InitSpec:
        """Return the distribution of random values of a parameter."""
        raise NotImplementedError

    def dtype(self, param: str) -> torch.dtype | None:
        """Return the stored dtype of a parameter. None: the model's."""
        return None

    def fused_shape(self, param: str) -> tuple[int, ...]:
        """The shape of one checkpoint tensor that is all parts of a parameter at once."""
        parts = self.layout(param)
        return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        """Such a tensor as views, one per part of the layout."""
        return torch.split(tensor, [part.shape[0] for part in self.layout(param)])

    def after_load(self, dtype: torch.dtype) -> None:
        """Called when all values have come and are in the form they will be multiplied in."""

    def set_param(self, param: str, value: object) -> None:
        """Replace a parameter by a tensor or by a packed form of it."""
        self._parameters.pop(param, None)
        self.__dict__.pop(param, None)
        if isinstance(value, nn.Parameter):  # shared with another layer: keep it one
            self.register_parameter(param, value)
        elif isinstance(value, Tensor):
            self.register_parameter(param, nn.Parameter(value, requires_grad=False))
        else:
            setattr(self, param, value)


class VectorModule(ParamModule):
    """Parameters are vectors that every rank holds whole."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((self.size,))
