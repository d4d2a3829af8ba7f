"""quire.sampling.on_device once more, through numpy, for tensors on the CPU.

Why twice: torch's operations cost 2 to 10 us each however small, and its argmax, comparisons, sorts
and exp are 2 to 12 times slower on one core than numpy's (bench/sampler.py). Functions, arguments
and results are those of on_device; see there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.sampling.on_device import CHUNK

SHORT = 1024
"""Rows with more weights than this are cut by a histogram before anything is sorted."""

BIN_SHIFT = 17
"""Bits of a float32 that a histogram's bin leaves out: bins are 1/64 of their weight wide."""


def exp_(x: Tensor) -> Tensor:
    """e**x in place."""
    view = x.numpy()
    np.exp(view, out=view)
    return x


def chunk_sums(weights: Tensor) -> Tensor:
    """Running sums over each row's chunks."""
    return torch.from_numpy(_chunk_sums(weights))


def _chunk_sums(weights: Tensor) -> np.ndarray:
    rows, width = weights.shape
    sums = weights.view(rows, width // CHUNK, CHUNK).sum(-1)  # torch's sum is the faster one
    return sums.numpy().cumsum(-1, dtype=np.float64)


def search(weights: Tensor, share: Tensor) -> Tensor:
    """The first column of each row at which the running sum is above share x total."""
    running = weights.cumsum(-1, dtype=torch.float64).numpy()
    return torch.from_numpy(_find(running, share.numpy()))


def _find(running: np.ndarray, share: np.ndarray) -> np.ndarray:
    total = running[:, -1]
    target = np.minimum(share * total, np.nextafter(total, 0.0))
    found = np.array([row.searchsorted(t, "right") for row, t in zip(running, target)])
    return np.minimum(found, running.shape[1] - 1)


def draw(weights: Tensor, share: Tensor) -> Tensor:
    """search() in two stages, for long rows."""
    rows, width = weights.shape
    running, shares, here = _chunk_sums(weights), share.numpy(), np.arange(rows)
    chunk = _find(running, shares)
    end = running[here, chunk]
    before = np.where(chunk > 0, running[here, chunk - 1], 0.0)
    with np.errstate(invalid="ignore"):  # spoilt rows: their error is reported elsewhere
        rest = ((shares * running[:, -1] - before) / (end - before)).clip(0.0, 1.0)
    inside = weights.numpy().reshape(rows, width // CHUNK, CHUNK)[here, chunk]
    return torch.from_numpy(chunk * CHUNK + _find(inside.cumsum(-1, dtype=np.float64), rest))


def above(x: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of each row that are >= least, packed to the left in column order."""
    view = x.numpy()
    flat = np.flatnonzero(view >= least.numpy()[:, None])
    if len(view) == 1 and len(flat):
        return torch.from_numpy(flat)[None], torch.from_numpy(view[0, flat])[None]
    rows, columns = np.divmod(flat, view.shape[1])
    counts = np.bincount(rows, minlength=len(view))
    places = np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
    shape = (len(view), max(1, int(counts.max())))
    packed, values = np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32)
    packed[rows, places] = columns
    values[rows, places] = view[rows, columns]
    return torch.from_numpy(packed), torch.from_numpy(values)


def kth(values: Tensor, k: Tensor) -> Tensor:
    """The k-th greatest of each row; -inf where k is 0 or the row has fewer."""
    wanted, width = k.numpy(), values.shape[1]
    found = np.full(len(wanted), -np.inf, np.float32)
    for row, (line, n) in enumerate(zip(values.numpy(), wanted)):
        if 0 < n <= width:
            found[row] = np.partition(line, width - n)[width - n]
    return torch.from_numpy(found)


def cut_by_mass(weights: Tensor, top_p: Tensor, mass: Tensor) -> None:
    """Zero what lies past top_p x mass, greatest first, equal ones in order."""
    for row, (p, all_of_it) in enumerate(zip(top_p.tolist(), mass.tolist())):
        if p < 1:
            _cut(weights[row].numpy(), p * all_of_it)


def _cut(weights: np.ndarray, limit: float) -> None:
    if np.count_nonzero(weights) > SHORT:
        _cut_long(weights, limit)
        return
    live = np.flatnonzero(weights)
    live = live[np.argsort(-weights[live], kind="stable")]
    ordered = weights[live]
    before = ordered.cumsum(dtype=np.float64) - ordered
    weights[live[before >= limit]] = 0.0


def _cut_long(weights: np.ndarray, limit: float) -> None:
    """Find the histogram bin in which the limit lies, and sort only that.

    A bin is the upper bits of a float, so bins are in order of weight.
    """
    bins = weights.view(np.int32) >> BIN_SHIFT
    masses = np.bincount(bins, weights=weights)[::-1]
    running = masses.cumsum()
    crossing = min(int(running.searchsorted(limit)), len(masses) - 1)
    bin_at = len(masses) - 1 - crossing
    inside = np.flatnonzero(bins == bin_at)
    inside = inside[np.argsort(-weights[inside], kind="stable")]
    ordered = weights[inside]
    before = (running[crossing] - masses[crossing]) + (ordered.cumsum(dtype=np.float64) - ordered)
    weights[inside[before >= limit]] = 0.0
    weights *= bins >= bin_at


def greater(x: Tensor, value: Tensor) -> Tensor:
    """How many of each row are strictly greater."""
    if x.dtype != torch.float32:
        return (x > value).sum(-1)
    return torch.from_numpy(np.count_nonzero(x.numpy() > value.numpy(), axis=-1))


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Column of each row's greatest value and that value. Here x is float32."""
    view = x.numpy()
    ids = view.argmax(-1)
    return torch.from_numpy(ids), torch.from_numpy(view[np.arange(len(view)), ids])
