"""Numpy operations: row arithmetic on the CPU, one row after the other.

Why not torch: an operation costs 2 to 10 us however small, and torch's argmax, comparisons, sorts
and exp are 2 to 12 times slower on one core than numpy's (bench/sampler.py). With that few
microseconds per call, a loop over rows costs no more than batched work on padded candidates.

A row's result depends on that row alone, to the bit: element-wise work is exact under any split,
and sums are made of chunks of a fixed size, added one after another in float64.

Axes: B rows of a block, V vocab, C columns that may be kept. Shares are float64 in [0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.sampling.top_k_top_p_batch import TopKTopPParams

CHUNK = 512

BOUND_MARGIN = 1e-3
"""How far, in logits, a bound stays below what rounding could move."""

MIN_FLOAT32 = torch.finfo(torch.float32).min
"""Masked logits are -inf; a bound of LOWEST leaves them out and keeps all others."""

GROUP_SIZE = 64

SORT_LIMIT = 1024
"""Rows with more weights than this are cut by a histogram before anything is sorted."""

BIN_SHIFT = 17
"""Bits of a float32 that a histogram's bin leaves out: bins are 1/64 of their weight wide."""


def exp_(x: Tensor) -> Tensor:
    """e**x in place. float32."""
    view = x.numpy()
    np.exp(view, out=view)
    return x


def chunk_sums(weights: Tensor) -> Tensor:
    """Running sums over each row's chunks. [B, width] float32 -> [B, width / CHUNK] float64."""
    rows, width = weights.shape
    sums = weights.view(rows, width // CHUNK, CHUNK).sum(-1)  # torch's sum is the faster one
    return torch.from_numpy(sums.numpy().cumsum(-1, dtype=np.float64))


def draw(weights: Tensor, share: Tensor) -> Tensor:
    """The first column of each row at which the running sum is above share x total.

    weights: [B, width] float32 >= 0. A column of weight 0 is never found, whatever the rounding.
    """
    rows, width = weights.shape
    chunked = weights.view(rows, width // CHUNK, CHUNK)
    places = find_chunks(chunked.sum(-1).numpy(), share.tolist())
    chunks = [chunk for chunk, _ in places]
    inside = torch.from_numpy(chunked.numpy()[np.arange(rows), chunks])
    sums = inside.cumsum(-1, dtype=torch.float64).numpy()
    found = [
        c * CHUNK + _search_cumulative(line, rest)
        for line, (c, rest) in zip(sums, places)
        if rest >= 0
    ]
    if len(found) < rows:  # rows with NaN or infinity: their error is reported elsewhere
        good = iter(found)
        found = [next(good) if rest >= 0 else 0 for _, rest in places]
    return torch.tensor(found)


def find_chunks(sums: np.ndarray, shares: Sequence[float]) -> list[tuple[int, float]]:
    """The chunk of each row that has the share of its weights, and the share of that chunk.

    sums: [B, C] float32 of the chunks. The share is -1 if a row has no finite sum.
    """
    running = sums.cumsum(-1, dtype=np.float64)
    return [_locate_chunk(*one) for one in zip(running, shares)]


def find_column(weights: np.ndarray, share: float) -> int:
    """The column that has the share of the weights of one chunk: [CHUNK] float32, or fewer."""
    padded = np.zeros(CHUNK, np.float32)
    padded[: len(weights)] = weights
    return _search_cumulative(padded.cumsum(dtype=np.float64), share)


def _locate_chunk(running: np.ndarray, share: float) -> tuple[int, float]:
    """Which chunk of a row, and the share of that chunk; -1 if the row has no sum."""
    chunk = _search_cumulative(running, share)
    end, before = running.item(chunk), running.item(chunk - 1) if chunk else 0.0
    if not end > before:
        return chunk, -1.0
    return chunk, min(max((share * running.item(-1) - before) / (end - before), 0.0), 1.0)


def _search_cumulative(running: np.ndarray, share: float) -> int:
    total = running.item(-1)
    target = min(share * total, math.nextafter(total, 0.0))
    return min(int(running.searchsorted(target, "right")), len(running) - 1)


def draw_filtered(
    z: Tensor, buffer: Tensor, params: Sequence[TopKTopPParams], share: Tensor
) -> Tensor:
    """Draw among what the cuts leave of each row, in column order. [B] int64.

    z: [B, V] float32, best 0. buffer: [B, width], 0 from V on.
    """
    found = []
    for (columns, weights), u in zip(_filter_each(z, buffer, params), share.tolist()):
        at = _search_cumulative(weights.cumsum(dtype=np.float64), u) if len(columns) else -1
        found.append(columns.item(at) if at >= 0 else 0)
    return torch.tensor(found)


def draw_allowed(
    logits: np.ndarray,
    words: np.ndarray,
    temperatures: Sequence[float],
    shares: Sequence[float],
) -> list[tuple[int, float]]:
    """A column of each row among those that its mask (words [B, W], a bit each) allows, and the
    best logit of those. temperature 0: the best one's column.
    """
    found = []
    for row, mask, temperature, share in zip(logits, words, temperatures, shares, strict=True):
        columns = _set_bits(mask)
        values = row[columns]
        at = int(values.argmax()) if len(values) else -1
        top = values.item(at) if len(values) else -math.inf
        if math.isfinite(top) and temperature:
            weights = np.exp((values - values[at]) / np.float32(temperature))
            at = _search_cumulative(weights.cumsum(dtype=np.float64), share)
        found.append((columns.item(at) if len(values) else 0, top))
    return found


def _set_bits(mask: np.ndarray) -> np.ndarray:
    """Which bits of 32-bit words are 1."""
    places = mask.nonzero()[0]
    bits = np.unpackbits(mask[places].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, columns = bits.nonzero()
    found: np.ndarray = places[rows] * 32 + columns
    return found


def filter_rows(
    z: Tensor, buffer: Tensor, params: Sequence[TopKTopPParams]
) -> tuple[Tensor, Tensor]:
    """What min_p, top_k and top_p leave of each row of z (see draw_filtered).

    Returns columns [B, C] in order and weights [B, C] float32, 0 where cut off or padding.
    """
    kept = list(_filter_each(z, buffer, params))
    shape = (len(kept), max(1, *(len(columns) for columns, _ in kept)))
    columns, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for row, (c, w) in enumerate(kept):
        columns[row, : len(c)], weights[row, : len(w)] = c, w
    return torch.from_numpy(columns), torch.from_numpy(weights)


def _filter_each(
    z: Tensor, buffer: Tensor, params: Sequence[TopKTopPParams]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """filter_rows() with each row's columns and weights as long as they are."""
    mass = (
        _row_masses(z, buffer)
        if any(cut.needs_full_mass for cut in params)
        else [0.0] * len(params)
    )
    view = z.numpy()
    flat = np.flatnonzero(view >= _row_bounds(z, params, mass))
    ends = flat.searchsorted(np.arange(1, len(params) + 1) * view.shape[1])
    rows = np.repeat(np.arange(len(params)), np.diff(ends, prepend=0))
    columns = flat - rows * view.shape[1]
    values = view[rows, columns]
    weights = np.exp(values)
    start = 0
    for cut, all_of_it, end in zip(params, mass, ends.tolist()):
        own = weights[start:end]
        _filter_row(own, values[start:end], cut, all_of_it)
        yield columns[start:end], own
        start = end


def _row_masses(z: Tensor, buffer: Tensor) -> list[float]:
    """Sum of e**z of each row."""
    np.exp(z.numpy(), out=buffer.numpy()[:, : z.shape[1]])
    masses: list[float] = chunk_sums(buffer)[:, -1].tolist()
    return masses


def _row_bounds(z: Tensor, params: Sequence[TopKTopPParams], mass: list[float]) -> np.ndarray:
    """A logit per row that every kept token reaches. [B, 1] float32."""
    groups = z.shape[1] // GROUP_SIZE
    tops = None
    if any(0 < cut.top_k <= groups for cut in params):
        tops = z[:, : groups * GROUP_SIZE].reshape(len(z), groups, GROUP_SIZE).amax(-1).numpy()
    bounds = [MIN_FLOAT32] * len(params)
    for row, cut in enumerate(params):
        if cut.min_p > 0:
            bounds[row] = math.log(cut.min_p) - BOUND_MARGIN
        if tops is not None and 0 < cut.top_k <= groups:
            bounds[row] = max(bounds[row], _kth_greatest(tops[row], cut.top_k))
        if cut.needs_full_mass and (rare := (1 - cut.top_p) * mass[row] / z.shape[1]) > 0:
            # All tokens rarer than (1 - p) / V together are less than 1 - p.
            bounds[row] = math.log(rare) - BOUND_MARGIN
    return np.array(bounds, np.float32)[:, None]


def _kth_greatest(values: np.ndarray, k: int) -> float:
    """The k-th greatest. 1 <= k <= len(values)."""
    at = len(values) - k
    return float(np.partition(values, at)[at])


def _filter_row(weights: np.ndarray, values: np.ndarray, cut: TopKTopPParams, mass: float) -> None:
    """Zero the candidates of one row that are not kept. mass: of the row, for cuts by mass."""
    if cut.min_p > 0:
        weights[weights < np.float32(cut.min_p)] = 0.0
    if 0 < cut.top_k < len(values):
        weights[values < np.float32(_kth_greatest(values, cut.top_k))] = 0.0
    if cut.top_p < 1 and len(weights):
        left = mass if cut.needs_full_mass else weights.cumsum(dtype=np.float64).item(-1)
        _apply_top_p(weights, cut.top_p * left)


def _apply_top_p(weights: np.ndarray, limit: float) -> None:
    """Zero what is past the limit, greatest first, equal ones in order."""
    if len(weights) > SORT_LIMIT and np.count_nonzero(weights) > SORT_LIMIT:
        _apply_top_p_histogram(weights, limit)
        return
    order = np.argsort(-weights, kind="stable")
    ordered = weights[order]
    before = ordered.cumsum(dtype=np.float64) - ordered
    weights[order[before >= limit]] = 0.0


def _apply_top_p_histogram(weights: np.ndarray, limit: float) -> None:
    """Find the histogram bin that has the limit, and sort only that.

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


def top_k_columns(x: Tensor, k: int) -> Tensor:
    """Columns of the k greatest of each row, best first, equal ones by column. [B, k] int64."""
    view, groups = x.numpy(), x.shape[1] // GROUP_SIZE
    if k > groups:
        return torch.from_numpy(np.argsort(-view, axis=-1, kind="stable")[:, :k])
    tops = x[:, : groups * GROUP_SIZE].reshape(len(x), groups, GROUP_SIZE).amax(-1).numpy()
    found = [_top_k_row(line, _kth_greatest(top, k), k) for line, top in zip(view, tops)]
    return torch.from_numpy(np.stack(found))


def _top_k_row(view: np.ndarray, bound: float, k: int) -> np.ndarray:
    """top_k_columns() of one row, of which at least k columns reach the bound."""
    columns = np.flatnonzero(view >= np.float32(bound))  # all of them if it is -inf
    if len(columns) < k:  # NaN: any list will do
        columns = np.arange(len(view))
    order: np.ndarray = columns[np.argsort(-view[columns], kind="stable")[:k]]
    return order


def count_greater(x: Tensor, value: Tensor) -> Tensor:
    """How many of each row are strictly greater. x: [B, V], value: [B, 1] -> [B] int64."""
    if x.dtype != torch.float32:
        return (x > value).sum(-1)
    pairs = zip(x.numpy(), value.numpy())
    return torch.tensor([np.count_nonzero(row > than) for row, than in pairs])


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Column of each row's greatest value (the lowest of equals), and that value: NaN if any is.

    x: [B, V] float32. Returns [B] int64, [B] float32.
    """
    view = x.numpy()
    ids = view.argmax(-1)
    return torch.from_numpy(ids), torch.from_numpy(view[np.arange(len(view)), ids])
