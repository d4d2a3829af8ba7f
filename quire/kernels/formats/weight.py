"""Weight objects: a matrix, or matrices of experts, in some stored form that multiplies itself.

A form declares its `kind`. Kernels register for the kinds they support, and fuse by kind.
A form with kernels of its own overrides the methods instead; no other module changes.

Axes: T tokens in the step, I inputs, O outputs, V vocabulary, E hidden size, k experts of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

_KERNELS: dict[tuple[str, str], Callable[..., Tensor]] = {}
F = TypeVar("F", bound=Callable[..., Tensor])


def kernel_for(method: str, *kinds: str) -> Callable[[F], F]:
    """Register an op as a method of the weights of these kinds."""

    def register(op: F) -> F:
        for kind in kinds:
            _KERNELS[method, kind] = op
        return op

    return register


class StoredWeight:
    """A weight [O, I] in one stored form."""

    __slots__ = ()
    kind: ClassVar[str]

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias: [T, I] -> a new [T, O] of x's dtype."""
        return _KERNELS["product", self.kind](x, self, bias)

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """weight[ids] * scale: ids [T] int32 -> a new [T, I]."""
        return _KERNELS["rows", self.kind](ids, self, scale)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [O, I]. dtype None: the one that fits the form best."""
        raise NotImplementedError


class StoredExperts:
    """The same matrix of X experts: a weight [X, O, I]."""

    __slots__ = ()
    kind: ClassVar[str]

    def mlp(self, x: Tensor, ids: Tensor, weights: Tensor, down: Any, *further: Any) -> Tensor:
        """As the op moe_experts, whose gate_up this is: x [T, E], ids and weights [T, k]."""
        return _KERNELS["mlp", self.kind](x, ids, weights, self, down, *further)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrices [X, O, I]."""
        raise NotImplementedError


class ExpertBank(StoredExperts, ABC):
    """Experts in another form than one tensor: `bank[i]` is the weight [O, I] of one."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, expert: int) -> StoredWeight: ...

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrices [X, O, I], as a new tensor."""
        return torch.stack([self[i].dequantize(dtype) for i in range(len(self))])


class PlainWeight(StoredWeight, nn.Parameter):
    """A weight that is a tensor."""

    kind = "plain"

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.detach().to(dtype or self.dtype)


class PlainExperts(StoredExperts, nn.Parameter):
    """Weights of experts that are a tensor."""

    kind = "plain"

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.detach().to(dtype or self.dtype)
