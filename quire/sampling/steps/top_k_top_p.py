"""Temperature, min_p, top_k and top_p: which tokens stay, and the draw among them.

In this order, each on what the one before left:
    min_p   probability >= min_p x the best one's
    top_k   logit >= the k-th greatest: all tokens tied with the k-th stay
    top_p   the likeliest tokens, in order, until their share reaches top_p; of equal ones the
            lowest ids first; the best always stays

The vocabulary is not sorted. A bound that no kept token is below leaves a short list of candidates,
and all that is exact is done on that. The draw goes through the candidates in id order. The
arithmetic is quire.sampling.numpy_ops's; a GPU does all of it in quire.kernels.sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.sampling import numpy_ops
from quire.sampling.row_ops import ScratchBuffers, concat_blocks, select_rows
from quire.sampling.top_k_top_p_batch import TopKTopPBatch


def sample_rows(
    logits: Tensor, cuts: TopKTopPBatch, shares: Tensor, scratch: ScratchBuffers
) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of `cuts`. Returns ids [n] int64 and the rows' best logits [n].

    logits: [R, V] any float dtype, not changed. shares: [n] float64 in [0, 1), one draw each.
    """
    ids, tops = [], []
    for block in scratch.blocks(len(cuts.row_indices)):
        z, top = _scaled(select_rows(logits, cuts.device_rows, block), cuts, block, scratch)
        if cuts.is_unfiltered:
            numpy_ops.exp_(z)
            ids.append(numpy_ops.draw(scratch.buffer(0, len(z)), shares[block]))
        else:
            buffer = scratch.buffer(1, len(z))
            ids.append(numpy_ops.draw_filtered(z, buffer, cuts.params[block], shares[block]))
        tops.append(top)
    return concat_blocks(ids), concat_blocks(tops)


def processed_logits(logits: Tensor, cuts: TopKTopPBatch, scratch: ScratchBuffers) -> Tensor:
    """The rows' logits divided by the temperature, -inf where min_p, top_k or top_p cut. [n, V]."""
    out = torch.empty((len(cuts.row_indices), scratch.vocab), device=logits.device)
    for block in scratch.blocks(len(out)):
        x = select_rows(logits, cuts.device_rows, block).float() / cuts.temperature[block, None]
        if not cuts.is_unfiltered:
            z, _ = _scaled(select_rows(logits, cuts.device_rows, block), cuts, block, scratch)
            columns, weights = numpy_ops.filter_rows(
                z, scratch.buffer(1, len(z)), cuts.params[block]
            )
            here, at = (weights > 0).nonzero(as_tuple=True)
            at = columns[here, at]
            whole, x = x, torch.full_like(x, -torch.inf)
            x[here, at] = whole[here, at]
        out[block] = x
    return out


def _scaled(
    x: Tensor, cuts: TopKTopPBatch, block: slice, scratch: ScratchBuffers
) -> tuple[Tensor, Tensor]:
    """(x - best) / temperature in scratch 0 [B, V], and best [B]."""
    top = x.amax(-1, keepdim=True).float()
    z = scratch.buffer(0, len(x))[:, : scratch.vocab]
    torch.sub(x, top, out=z)
    if cuts.has_temperature:
        z.div_(cuts.temperature[block, None])
    return z, top[:, 0]
