"""Rotary positions: a table of cosines and sines, and the layer that applies it.

The table is made once for the engine's longest sequence, so the rotation of a position never
depends on what else is in the batch or how a prompt is cut. Layers alike share one table.

A token of an image or a video has a position per axis (M-RoPE). A step with such tokens gathers
their cosines and sines once for all layers (`Rope.gather`); other steps pay nothing for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.rope import rope
from quire.layers.rope_scaling import RopeScaling


@dataclass(frozen=True, slots=True)
class RopeTemperature:
    """Queries grow with position p: by 1 + beta * ln(1 + floor((first + p) / length))."""

    beta: float
    length: int  # positions without growth
    first: int = 0  # number of the first position


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into angles."""

    theta: float
    dims: int  # leading dims of each head that are rotated
    scaling: RopeScaling
    temperature: RopeTemperature | None = None  # of a table for queries; it needs whole heads
    axes: tuple[int, ...] = ()
    """[R/2] of M-RoPE: the axis (0 time, 1 height, 2 width) whose position turns each pair."""

    def table(self, max_len: int) -> Tensor:
        """[max_len, R] float32: cosines in the first half of a row, sines in the second."""
        inverse, magnitude = self.scaling.frequencies(self.theta, self.dims, max_len)
        positions = torch.arange(max_len, dtype=torch.float32)
        angles = torch.outer(positions, inverse)
        table = torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=1)
        if self.temperature is not None:
            grown = self.temperature
            steps = torch.floor((positions + grown.first) / grown.length)
            table *= (1 + self.temperature.beta * torch.log(1 + steps))[:, None]
        return table


@dataclass(frozen=True, slots=True)
class TokenAngles:
    """Cosines and sines of a step's tokens, in place of their positions."""

    table: Tensor  # [T, R] float32: rows as in RopeConfig.table
    rows: Tensor  # [T] int32: 0, 1, 2, ...


class Rope(nn.Module):
    """Rotates queries and keys. `set_table` must come before the first forward.

    interleaved: channels (2i, 2i + 1) are a pair, else (i, i + R/2).
    """

    def __init__(self, config: RopeConfig, max_len: int, *, interleaved: bool = False) -> None:
        super().__init__()
        self.config, self.max_len, self.interleaved = config, max_len, interleaved
        self._table = torch.empty(0)  # until `set_table`
        self._axes = torch.empty(0)  # so too

    def set_table(self, tables: dict[tuple[RopeConfig, int], Tensor], device: torch.device) -> None:
        """Take the table from `tables`, where the first layer of a kind puts it."""
        key = (self.config, self.max_len)
        if key not in tables:
            with torch.device("cpu"):
                tables[key] = self.config.table(self.max_len).to(device)
        self._table = tables[key]
        self._axes = torch.tensor(self.config.axes, device=device)

    @property
    def table(self) -> Tensor:
        """The table of RopeConfig.table."""
        return self._table

    def gather(self, positions: Tensor) -> TokenAngles:
        """Look up the angles of tokens with a position per axis: [3, T] int32."""
        assert self.config.axes, "positions per axis, of a model with one axis"
        rows = positions.long()[self._axes].T  # [T, R/2]
        angles = [part.gather(0, rows) for part in self._table.chunk(2, dim=1)]
        numbers = torch.arange(len(rows), dtype=torch.int32, device=positions.device)
        return TokenAngles(torch.cat(angles, dim=1), numbers)

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | TokenAngles
    ) -> tuple[Tensor, Tensor]:
        """q [T, H, D], k [T, K, D], positions [T] int32 -> both rotated."""
        if isinstance(positions, TokenAngles):
            return rope(q, k, positions.rows, positions.table, self.interleaved)
        return rope(q, k, positions, self._table, self.interleaved)
