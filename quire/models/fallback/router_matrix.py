"""Router matrix: a parameter of a class's own code whose products do not depend on the batch.

Torch's product of a row differs in its last bits with the number of rows. Where the class chooses
experts by it, an answer would depend on the other rows of its step: with FP8 layers one such bit
grows to a different token. In float64 those bits are far below what float32 keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MAX_OUTPUTS = 1024
"""Routers have fewer; a wider matrix keeps torch's product, which is faster."""


class RouterMatrix(Tensor):
    """A matrix [O, I] that code of transformers multiplies with `functional.linear`."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear and len(args) == 2 and not kwargs:
            with torch._C.DisableTorchFunctionSubclass():
                x, matrix = args
                return functional.linear(x.double(), matrix.double()).to(x.dtype)
        return super().__torch_function__(func, types, args, kwargs or {})


def router_matrix(value: Tensor) -> Tensor:
    """Return the value as a RouterMatrix if it may be one's."""
    may_be = value.dim() == 2 and len(value) <= MAX_OUTPUTS and value.is_floating_point()
    return value.as_subclass(RouterMatrix) if may_be else value
