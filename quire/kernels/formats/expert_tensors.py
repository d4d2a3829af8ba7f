"""Tensors of one expert of a bank, in whatever form the bank is, to copy the expert elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def stored_tensors(bank: Any, expert: int) -> list[Tensor]:
    """Return the tensors of an expert, as views: writing to them changes the expert.

    Those that several experts share are left out.
    """
    own = list(_tensors(bank[expert]))
    if len(bank) == 1:
        return own
    beside = _tensors(bank[expert - 1])
    return [one for one, other in zip(own, beside) if one.data_ptr() != other.data_ptr()]


def shared_tensors(bank: Any) -> list[Tensor]:
    """Return the tensors that all experts of a bank share."""
    if len(bank) == 1:
        return []
    pairs = zip(_tensors(bank[0]), _tensors(bank[1]))
    return [one for one, other in pairs if one.data_ptr() == other.data_ptr()]


def stored_form(weight: Any) -> str:
    """Describe a stored weight without the content of its tensors."""
    if isinstance(weight, Tensor):
        return f"{weight.dtype}{list(weight.shape)}"
    if is_dataclass(weight):
        values = {one.name: stored_form(getattr(weight, one.name)) for one in fields(weight)}
        return f"{type(weight).__name__}{values}"
    if isinstance(weight, tuple):
        return str([stored_form(one) for one in weight])
    return repr(weight)


def _tensors(weight: Any) -> Iterator[Tensor]:
    """The tensors of a stored weight. Fields that its constructor makes, of the others, are not."""
    if isinstance(weight, Tensor):
        yield weight.detach()
    elif is_dataclass(weight):
        for one in fields(weight):
            if one.init:
                yield from _tensors(getattr(weight, one.name))
    elif isinstance(weight, tuple):
        for one in weight:
            yield from _tensors(one)
