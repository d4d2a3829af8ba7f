"""Row exchange: rows of a step go to the ranks that share experts, and their sums come back.

Data-parallel ranks have different rows: `counts` has how many each, on every rank. The ranks of one
tensor-parallel group have the same rows. As the other collectives, these are ops, `group` is a
torch.distributed backend, and every rank must call them in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.collectives import Group
from quire.kernels.framework.op import op
from quire.kernels.native.op_tape import refuse_recording


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, n, dtype in ((1, 64, torch.float32), (7, 101, torch.bfloat16)):
        x = torch.randn(t, n, device=device).to(dtype)
        yield {"x": x, "counts": (t,), "group": None}


@op(cases=_cases)
def gather_rows(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """Every rank's rows x [T, n], one after the other: [sum(counts), n].

    counts: T of each rank of the group; they are sent padded to the largest.
    """
    if group is None:
        return x
    refuse_recording("gather_rows")
    most = max(counts)
    sent = x.contiguous() if len(x) == most else F.pad(x, (0, 0, 0, most - len(x)))
    found = torch.empty(len(counts) * most, x.shape[1], dtype=x.dtype, device=x.device)
    group._allgather_base(found, sent).wait()
    if min(counts) == most:
        return found
    return torch.cat([found[i * most : i * most + count] for i, count in enumerate(counts)])


@op(cases=_cases)
def sum_rows(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """The sum of every rank's x [sum(counts), n], of this rank's rows only: [T, n].

    counts: T of each data-parallel rank, of which the group has equally many ranks each, side by
    side. Terms are added in float32 in rank order and rounded once, so a row's sum does not depend
    on the rows beside it.
    """
    if group is None:
        return x
    refuse_recording("sum_rows")
    ranks, same = group.size(), group.size() // len(counts)
    own = counts[group.rank() // same]
    sent = x if same == 1 else torch.cat([part.repeat(same, 1) for part in x.split(list(counts))])
    found = torch.empty(ranks * own, x.shape[1], dtype=x.dtype, device=x.device)
    sizes = [count for count in counts for _ in range(same)]
    group.alltoall_base(found, sent.contiguous(), [own] * ranks, sizes).wait()
    first, *others = found.view(ranks, own, x.shape[1]).unbind(0)
    total = first.to(torch.promote_types(x.dtype, torch.float32))
    for part in others:
        total = total + part
    return total.to(x.dtype)


def gather_parts(
    parts: Sequence[Tensor], counts: Sequence[int], group: Group
) -> tuple[Tensor, ...]:
    """Every rank's rows of several tensors [T, n], in one collective: see gather_rows.

    They are sent as bytes, side by side.
    """
    sent = [part.contiguous().view(torch.uint8) for part in parts]
    rows = gather_rows(torch.cat(sent, 1), counts, group)
    found = rows.split([one.shape[1] for one in sent], 1)
    return tuple(
        torch.empty(one.shape, dtype=one.dtype, device=one.device).copy_(one).view(part.dtype)
        for one, part in zip(found, parts, strict=True)
    )
