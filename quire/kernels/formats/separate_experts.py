"""Experts that have a weight each, in a layout that has none of its own for experts."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.formats.grouped_weight import GroupedWeight
from quire.kernels.formats.panel_int8 import PanelInt8
from quire.kernels.formats.weight import ExpertBank


@dataclass(frozen=True, slots=True, eq=False)
class SeparateExperts(ExpertBank):
    """X weights [O, I] of one layout."""

    experts: tuple[GroupedWeight, ...] | tuple[PanelInt8, ...]

    @property
    def kind(self) -> str:  # type: ignore[override]
        """That of its experts."""
        return self.experts[0].kind

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, expert: int) -> GroupedWeight | PanelInt8:
        return self.experts[expert]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.experts), *self.experts[0].shape

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.experts)
