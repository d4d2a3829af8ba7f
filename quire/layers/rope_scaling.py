"""Scalings of rotary positions beyond the length of training.

Each scaling gives the R/2 angular frequencies (float32) and a factor on cosine and sine. All are
functions of the longest sequence served, never of the current one: a key once cached keeps its
angle. "dynamic" and "longrope", which transformers switches by the sequence at hand, thus take the
side that fits `max_len`; with max_len <= the training length both are unscaled.

Source: linear, dynamic: kaiokendev, bloc97 and emozilla; yarn: arXiv 2309.00071; longrope: arXiv
2402.13753; llama3: Llama 3.1 reference code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RopeScaling(Protocol):
    """One way to choose frequencies."""

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        """([R/2] float32, factor on cosine and sine)."""
        ...


def unscaled_frequencies(theta: float, dims: int) -> Tensor:
    """Frequencies without scaling."""
    exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
    return 1.0 / (theta**exponents)


@dataclass(frozen=True, slots=True)
class UnscaledRope:
    """None."""

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        return unscaled_frequencies(theta, dims), 1.0


@dataclass(frozen=True, slots=True)
class Unrotated:
    """No rotation: for a table that scales queries only."""

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        return torch.zeros(dims // 2), 1.0


@dataclass(frozen=True, slots=True)
class AxialRope:
    """Every axis of positions has an equal part of the pairs, with frequencies of its own.

    alternate: pairs of the axes take turns.
    """

    axes: int
    alternate: bool = False

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        found = unscaled_frequencies(theta, dims // self.axes)
        if self.alternate:
            return found.repeat_interleave(self.axes), 1.0
        return found.repeat(self.axes), 1.0


@dataclass(frozen=True, slots=True)
class SharedAxialRope:
    """Axes of positions have equal parts of the pairs, and take turns in one row of frequencies."""

    axes: int

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        found = unscaled_frequencies(theta, dims)
        return torch.cat([found[axis :: self.axes] for axis in range(self.axes)]), 1.0


@dataclass(frozen=True, slots=True)
class ProportionalRope:
    """The first `share` of the pairs turns, by the angles of a whole head; the others do not."""

    share: float
    factor: float = 1.0  # every position is divided by it

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        inverse = unscaled_frequencies(theta, dims) / self.factor
        inverse[int(self.share * dims // 2) :] = 0.0
        return inverse, 1.0


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Every position divided by `factor`."""

    factor: float

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        return unscaled_frequencies(theta, dims) / self.factor, 1.0


@dataclass(frozen=True, slots=True)
class DynamicNTKScaling:
    """A larger base, just enough for max_len. (NTK-aware)"""

    factor: float
    trained_len: int  # positions the model was trained on

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        length = max(max_len, self.trained_len)
        stretch = self.factor * length / self.trained_len - (self.factor - 1)
        return unscaled_frequencies(theta * stretch ** (dims / (dims - 2)), dims), 1.0


@dataclass(frozen=True, slots=True)
class FixedNTKScaling:
    """Frequency i divided by factor ** (2 (i + 1) / dims): the last one by `factor`. (GTE)"""

    factor: float

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        return unscaled_frequencies(theta * self.factor, dims) / self.factor ** (2 / dims), 1.0


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp between."""

    factor: float
    low: float
    high: float
    trained_len: int

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        inverse = unscaled_frequencies(theta, dims)
        wavelength = 2 * math.pi / inverse
        smooth = (self.trained_len / wavelength - self.low) / (self.high - self.low)
        ramp = (1 - smooth) * inverse / self.factor + smooth * inverse
        slow = wavelength > self.trained_len / self.low
        fast = wavelength < self.trained_len / self.high
        mixed = torch.where(slow, inverse / self.factor, ramp)
        return torch.where(fast, inverse, mixed), 1.0


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """Between dims that turn often and dims that hardly turn, a ramp; and hotter attention."""

    factor: float
    trained_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        low, high = self._range(theta, dims)
        steps = torch.arange(dims // 2, dtype=torch.float32)
        kept = 1 - torch.clamp((steps - low) / (high - low), 0, 1)
        grown = theta ** (torch.arange(0, dims, 2).float() / dims)
        inverse = 1.0 / (self.factor * grown) * (1 - kept) + 1.0 / grown * kept
        return inverse, self._magnitude()

    def _range(self, theta: float, dims: int) -> tuple[float, float]:
        """Dims between which the ramp runs."""

        def dim_of(turns: float) -> float:
            return dims * math.log(self.trained_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dim_of(self.beta_fast), dim_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        return low, high + 0.001 if low == high else high  # never a ramp of no width

    def _magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._compute_mscale(self.mscale) / self._compute_mscale(self.mscale_all_dim)
        return self._compute_mscale(1.0)

    def _compute_mscale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """A divisor per frequency: one list within the training length, another beyond it."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained_len: int
    factor: float
    attention_factor: float | None = None

    def frequencies(self, theta: float, dims: int, max_len: int) -> tuple[Tensor, float]:
        chosen = self.long if max_len > self.trained_len else self.short
        exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
        inverse = 1.0 / (torch.tensor(chosen, dtype=torch.float32) * theta**exponents)
        return inverse, self._magnitude()

    def _magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.trained_len))
