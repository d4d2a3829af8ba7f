"""Penalties for tokens that a sequence already contains, and the token counts they use.

    repetition  logit / r if positive, * r if not: once for each token of prompt or output
    frequency   logit - f * (times in the output)
    presence    logit - p if in the output

Counts are a table [slots, V] of int16: 0 unseen, the sign bit for the prompt, the other bits
the outputs. To count a token is to add one number, so graphs can do it. The factors are in the
slots' rows of the sampling table (quire.kernels.sample).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.sampling_table_layout import build_table, unpack_penalties
from quire.kernels.framework.op import op

MAX_COUNT = 0x7FFF
"""Greatest count of a token that is stored."""

_PENALTIES = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.5, 0.0), (0.8, -0.2, 1.5), (2.0, 0.1, -0.3)]


def _case_tables(vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lines and counts of five slots, most tokens unseen."""
    params = [{"repetition": r, "frequency": f, "presence": p} for r, f, p in _PENALTIES]
    times = torch.randint(0, 30, (len(_PENALTIES), vocab)) * (
        torch.rand(len(_PENALTIES), vocab) < 0.1
    )
    prompt = (torch.rand(len(_PENALTIES), vocab) < 0.1).int() * -0x8000
    return build_table(params).to(device), (times | prompt).to(torch.int16).to(device)


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for r, v in [(1, 40), (6, 3001), (33, 50_257)]:
        table, counts = _case_tables(v, device)
        slots = torch.arange(r, device=device, dtype=torch.int32) % 6 - 1
        logits = 3 * torch.randn(r, v, device=device)
        logits[:, ::7] = -torch.inf
        yield {"logits": logits, "slots": slots, "table": table, "counts": counts}


@op(cases=_cases, gpu="sampling.penalties")
def apply_penalties(logits: Tensor, slots: Tensor, table: Tensor, counts: Tensor) -> Tensor:
    """Change logits [R, V] float32 in place, and return them.

    slots: [R] int32, negative: leave the row alone. table: see
    quire.kernels.formats.sampling_table_layout. counts:
    [slots, V] int16.
    """
    at = slots.long().clamp(min=0)
    penalized = penalize(logits, table[at], counts[at])
    logits.copy_(torch.where(slots[:, None] >= 0, penalized, logits))
    return logits


def penalize(x: Tensor, lines: Tensor, counts: Tensor) -> Tensor:
    """Float32 logits [R, V] after penalties. lines: [R, WORDS], counts: [R, V]."""
    repetition, frequency, presence = (value[:, None] for value in unpack_penalties(lines))
    times = (counts & MAX_COUNT).float()
    y = torch.where(x > 0, x / repetition, x * repetition)
    y = y - frequency * times - presence * (times > 0)
    return torch.where(counts != 0, y, x)


def _update_token_counts_cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for r, v in [(1, 40), (7, 300), (50, 100_000)]:
        counts = torch.randint(-0x8000, 0x7FFF, (64, v)).to(torch.int16)
        counts[:, 5] = 0x7FFF
        slots = torch.randperm(64, device=device)[:r].int()
        slots[0] = -1
        ids = torch.randint(0, v, (r,), device=device, dtype=torch.int32)
        ids[-1] = 5
        yield {"ids": ids, "slots": slots, "counts": counts.to(device)}


@op(cases=_update_token_counts_cases, gpu="sampling.token_counts")
def update_token_counts(ids: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    """One more output of each row's slot: change counts in place, and return them.

    ids: [R] int32 or int64. slots: [R] int32, each at most once; negative: padding.
    """
    at, where = slots.long().clamp(min=0), ids.long()
    had = counts[at, where]
    more = (had & ~MAX_COUNT) | ((had & MAX_COUNT) + (had & MAX_COUNT < MAX_COUNT))
    # Padding rows add nothing to slot 0: sums of differences do not depend on their order.
    change = torch.where(slots >= 0, more - had, 0).to(torch.int16)
    return counts.index_put_((at, where), change, accumulate=True)
