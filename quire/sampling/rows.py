"""Whole-row arithmetic over logits, of which each row's result depends on that row alone.

Not here: what the numbers mean. The one idea: bit for bit the same whether a row is alone or among
others. Element-wise work is exact under any split; sums are made of chunks of a fixed size, each
added in a fixed order, and the chunks' sums are added one after another in float64.

Big batches go block by block through one scratch that stays in the CPU's cache. On the CPU a few
operations go through numpy, which is 2 to 10 times faster there than torch (bench/sampler.py).

Axes: B rows of a block, V vocab, C chosen columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

CHUNK = 512
CACHED = 1 << 17
"""Elements of a block on the CPU: half a MiB of float32, which fits the second-level cache."""


class Scratch:
    """Two reusable float32 buffers of a block's size, valid until the next take."""

    def __init__(self, vocab: int, device: torch.device, most_rows: int) -> None:
        self.vocab = vocab
        self.width = -(-vocab // CHUNK) * CHUNK
        on_cpu = device.type == "cpu"
        self.block = max(1, min(most_rows, CACHED // vocab)) if on_cpu else max(1, most_rows)
        shape = (2, self.block, self.width)
        self._buffers = torch.zeros(shape, dtype=torch.float32, device=device)

    def take(self, which: int, rows: int) -> Tensor:
        """A buffer [rows, width] whose columns from vocab on are 0, and must stay 0."""
        return self._buffers[which, :rows]

    def blocks(self, rows: int) -> Iterator[slice]:
        """Split rows into blocks."""
        for start in range(0, rows, self.block):
            yield slice(start, min(start + self.block, rows))


def select(logits: Tensor, rows: Tensor | None, block: slice) -> Tensor:
    """Rows `rows[block]` of logits; rows None: all of them, in order."""
    return logits[block] if rows is None else logits.index_select(0, rows[block])


def exp_(x: Tensor) -> Tensor:
    """e**x in place. float32."""
    if x.device.type != "cpu":
        return x.exp_()
    view = x.numpy()
    np.exp(view, out=view)
    return x


def chunk_sums(weights: Tensor) -> Tensor:
    """Running sums over each row's chunks. [B, width] float32 -> [B, width / CHUNK] float64."""
    rows, width = weights.shape
    return weights.view(rows, width // CHUNK, CHUNK).sum(-1).double().cumsum(-1)


def search(running: Tensor, share: Tensor) -> Tensor:
    """Index of the first element above share x total, for each row.

    running: [B, C] float64, not decreasing. share: [B] float64 in [0, 1). An element that adds
    nothing is never found, whatever the rounding.
    """
    total = running[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    found = torch.searchsorted(running, torch.minimum(share[:, None] * total, below), right=True)
    return found[:, 0].clamp_(max=running.shape[1] - 1)


def draw(weights: Tensor, share: Tensor) -> Tensor:
    """Draw one column per row by inverse CDF, in column order. [B, width], [B] -> [B] int64."""
    rows, width = weights.shape
    running = chunk_sums(weights)
    chunk = search(running, share)
    here = torch.arange(rows, device=weights.device)
    inside = weights.view(rows, width // CHUNK, CHUNK)[here, chunk].double().cumsum(-1)
    end = running[here, chunk]
    before = torch.where(chunk > 0, running[here, (chunk - 1).clamp_(min=0)], 0.0)
    rest = ((share * running[:, -1] - before) / (end - before)).clamp_(0.0, 1.0)
    return chunk * CHUNK + search(inside, rest)


def log_sums(logits: Tensor, scratch: Scratch) -> Tensor:
    """log(sum(exp(row))) of each row, float64. logits: [n, V]."""
    out = torch.empty(len(logits), dtype=torch.float64, device=logits.device)
    for block in scratch.blocks(len(logits)):
        x = logits[block]
        buffer = scratch.take(0, len(x))
        top = x.amax(-1, keepdim=True).float()
        exp_(torch.sub(x, top, out=buffer[:, : scratch.vocab]))
        out[block] = chunk_sums(buffer)[:, -1].log() + top[:, 0].double()
    return out


def above(x: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of each row that are >= least, packed to the left in column order.

    x: [B, V] float32, least: [B]. Returns columns [B, C] int64 (0 where there are no more), values
    [B, C] float32 (-inf there), counts [B] int64.
    """
    rows, columns = _where(x, least)
    counts = torch.bincount(rows, minlength=len(x))
    width = max(1, int(counts.max()))
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(rows), device=x.device) - starts[rows]
    packed = torch.zeros((len(x), width), dtype=torch.int64, device=x.device)
    values = torch.full((len(x), width), -torch.inf, device=x.device)
    packed[rows, places] = columns
    values[rows, places] = x[rows, columns]
    return packed, values, counts


def _where(x: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    if x.device.type != "cpu":
        rows, columns = (x >= least[:, None]).nonzero(as_tuple=True)
        return rows, columns
    keep = x.numpy() >= least.numpy()[:, None]
    flat = torch.from_numpy(np.flatnonzero(keep))
    return flat // x.shape[1], flat % x.shape[1]


LOWEST = torch.finfo(torch.float32).min
"""Masked logits are -inf; a bound of LOWEST leaves them out and keeps all others."""

GROUP = 64


def lower_bounds(x: Tensor, counts: Tensor) -> Tensor:
    """A value per row that at least counts[row] columns reach, and not many more. float32.

    Source: ours. The k-th largest of the maxima of groups is at most the k-th largest of all.
    """
    groups = x.shape[1] // GROUP
    most = max(1, int(counts.max()))
    if most > groups:
        return torch.full((len(x),), LOWEST, device=x.device)
    tops = x[:, : groups * GROUP].reshape(len(x), groups, GROUP).amax(-1)
    ordered: Tensor = tops.topk(most, dim=-1).values
    return ordered.gather(1, (counts - 1).clamp_(min=0)[:, None])[:, 0].clamp_(min=LOWEST)


def argmax(logits: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Column of each row's greatest value (the lowest of equals) and that value, float32.

    A row with a NaN gives a NaN. logits: [n, V], any float dtype.
    """
    if logits.device.type != "cpu":
        ids = logits.argmax(-1)
        top = logits.gather(1, ids[:, None])[:, 0].float()
        return ids, torch.where(logits.isnan().any(-1), torch.nan, top)
    if logits.dtype == torch.float32:
        x = logits.numpy()
        found = x.argmax(-1)
        return torch.from_numpy(found), torch.from_numpy(x[np.arange(len(x)), found])
    ids = torch.empty(len(logits), dtype=torch.int64)
    tops = torch.empty(len(logits))
    for block in scratch.blocks(len(logits)):
        part = scratch.take(0, block.stop - block.start)[:, : scratch.vocab]
        ids[block], tops[block] = argmax(part.copy_(logits[block]), scratch)
    return ids, tops
