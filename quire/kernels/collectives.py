"""Collectives sum, gather, copy and send tensors among the processes that share a model.

They are ops, so on a GPU every kernel that lazy fusion holds is launched before they read. `group`
is a torch.distributed backend (gloo or NCCL); None is a group of one process, where they change
nothing. All ranks must call the same collectives in the same order. `peers` is memory that GPUs of
one host share; with it sums take microseconds, and are part of the norm behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats.peer_memory import PeerMemory
from quire.kernels.framework.op import op
from quire.kernels.native.op_tape import refuse_recording

Group = Any
"""torch.distributed.ProcessGroupGloo or ProcessGroupNCCL. Any: torch's stubs lack parts of both."""


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, e, dtype in ((1, 64, torch.float32), (7, 101, torch.bfloat16)):
        yield {"x": torch.randn(t, e, device=device).to(dtype), "group": None}


def _gather_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    return ({**case, "total": case["x"].shape[1]} for case in _cases(device))


@op(cases=_cases, gpu="collectives")
def all_reduce(x: Tensor, group: Group, peers: PeerMemory | None = None) -> Tensor:
    """The sum of every rank's x, the same bits on every rank. x may be overwritten.

    Terms are added in float32 in rank order and rounded once, so a row's sum does not depend on
    the rows beside it.
    """
    if group is None:
        return x
    first, *others = _gathered(x, group).unbind(0)
    total = first.to(torch.promote_types(x.dtype, torch.float32))
    for part in others:
        total = total + part
    return total.to(x.dtype)


@op(cases=_gather_cases)
def all_gather(x: Tensor, total: int, group: Group, size: int | None = None) -> Tensor:
    """Every rank's x [..., n] side by side along the last axis, in rank order: [..., total].

    n is `size`, or ceil(total / ranks), and less where that passes the end (`uneven_shard_range`).
    """
    if group is None:
        return x
    padded = F.pad(x, (0, (size or -(-total // group.size())) - x.shape[-1]))
    return torch.cat(_gathered(padded, group).unbind(0), -1)[..., :total].contiguous()


@op(cases=_cases)
def broadcast(x: Tensor, group: Group) -> Tensor:
    """Overwrite x by that of rank 0, and return it."""
    if group is not None:
        refuse_recording("broadcast")
        group.broadcast(x, 0).wait()
    return x


@op(cases=lambda device: ({**case, "to": 0} for case in _cases(device)))
def send(x: Tensor, group: Group, to: int) -> Tensor:
    """Send x to one rank of the group, which must receive it, and return it."""
    if group is not None:
        refuse_recording("send")
        group.send([x.contiguous()], to, 0).wait()
    return x


@op(cases=lambda device: ({**case, "source": 0} for case in _cases(device)))
def receive(x: Tensor, group: Group, source: int) -> Tensor:
    """Overwrite x by what one rank of the group sends, and return it. Sends arrive in order."""
    if group is not None:
        refuse_recording("receive")
        group.recv([x], source, 0).wait()
    return x


@op(cases=_cases)
def all_gather_stacked(x: Tensor, group: Group) -> Tensor:
    """Every rank's x, in rank order: [ranks, ...]."""
    if group is None:
        return x[None]
    refuse_recording("all_gather_stacked")
    return _gathered(x, group)


@op(cases=lambda device: ({"x": torch.randn(1, 4, 5, device=device), "group": None},))
def all_to_all_equal(x: Tensor, group: Group) -> Tensor:
    """Send x[i] to rank i; return what each rank sends to this one: [ranks, ...], as x is."""
    if group is None:
        return x
    refuse_recording("all_to_all_equal")
    x = x.contiguous()
    out = torch.empty_like(x)
    group.alltoall_base(out, x, [], []).wait()
    return out


def _gathered(x: Tensor, group: Group) -> Tensor:
    """Every rank's x: [ranks, *x.shape]."""
    out = torch.empty(group.size() * x.numel(), dtype=x.dtype, device=x.device)
    group._allgather_base(out, x.reshape(-1)).wait()
    return out.view(group.size(), *x.shape)


def all_to_all(pieces: Sequence[Tensor], sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Send pieces[i], of bytes, to rank i; return what each rank sent here, of so many bytes.

    It is no op: it runs between steps.
    """
    given = torch.cat([one.view(-1) for one in pieces])
    taken = given.new_empty(sum(sizes))
    group.alltoall_base(taken, given, list(sizes), [len(one) for one in pieces]).wait()
    return list(taken.split(list(sizes)))
