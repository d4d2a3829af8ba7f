"""All-reduce by NCCL: in place, in the order of the current stream."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def outputs(x: Tensor, group: Any) -> Tensor:
    return x if x.is_contiguous() else NotImplemented


def launch(out: Tensor, x: Tensor, group: Any) -> None:
    if group is not None:
        group.allreduce([x]).wait()  # the stream waits, the host does not
