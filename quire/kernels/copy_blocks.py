"""Block copy moves whole KV blocks between caches: copy on write, swap out to the host, swap in.

One call copies the same block pairs in every tensor (one tensor per layer place), also
across devices. It is not an op with cases: it computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_blocks(
    sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    """targets[i][dst] = sources[i][src] for every (src, dst) of pairs, in place.

    sources, targets: [N, 2, K, B, D] each, of one shape but for N. No dst of one call may be a
    src of the same call: the order is not defined.
    """
    assert len(sources) == len(targets), (len(sources), len(targets))
    if not pairs or not sources:
        return
    if len(pairs) == 1:
        ((src, dst),) = pairs
        for source, target in zip(sources, targets):
            target[dst].copy_(source[src])
        return
    index = torch.tensor([(src, dst) for src, dst in pairs], dtype=torch.int64)
    srcs, dsts = index[:, 0].to(sources[0].device), index[:, 1].to(targets[0].device)
    for source, target in zip(sources, targets):
        target[dsts] = source[srcs].to(target.device)
