"""State layout: what recurrent layers keep of a sequence, whatever its length. Arithmetic only.

    conv        the last inputs of a convolution    [channels, steps]   in the model's dtype
    recurrent   what a scan carries on              any shape           float32

A state is that of all layers. The tensors have a row for each slot of a running sequence, for each
checkpoint, and one for rows that pad a step. Ranks divide the heads of a layer, else its channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.errors import ConfigError

MAX_LISTED = 12
"""Numbers of ranks that an error lists."""


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What one layer keeps of a sequence."""

    conv: tuple[int, int]  # channels, steps
    recurrent: tuple[int, ...] = ()  # (): the layer has a convolution alone
    weights: int = 0  # elements of the layer's matrices, about
    heads: int = 0  # that ranks divide
    heads_are: str = "channels"
    groups: int = 0  # that ranks divide, or share if there are fewer than ranks
    group_channels: int = 0  # of the convolution, of each group

    def bytes(self, itemsize: int) -> int:
        """Bytes of a row. itemsize: of the model's dtype."""
        scanned = math.prod(self.recurrent) if self.recurrent else 0
        return math.prod(self.conv) * itemsize + scanned * 4

    def can_cut(self, ranks: int) -> bool:
        """Whether so many ranks can share the layer."""
        groups = self.groups or ranks
        return self.heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)

    def of_rank(self, ranks: int) -> StateFacts:
        """Return what one of `ranks` keeps. Raises ConfigError."""
        if ranks == 1:
            return self
        if not self.can_cut(ranks):
            grouped = f" in {self.groups} groups" if self.groups else ""
            sizes = [n for n in range(1, self.heads + 1) if self.can_cut(n)]
            listed = ", ".join(map(str, sizes[:MAX_LISTED]))
            raise ConfigError(
                f"tensor_parallel_size={ranks} cannot cut the recurrent layers of this model: they "
                f"have {self.heads} {self.heads_are}{grouped}; sizes that work: {listed}"
            )
        channels, steps = self.conv
        own = (channels - self.groups * self.group_channels) // ranks
        groups = max(1, self.groups // ranks) if self.groups else 0
        first = tuple(size // ranks for size in self.recurrent[:1])
        return replace(
            self,
            conv=(own + groups * self.group_channels, steps),
            recurrent=(*first, *self.recurrent[1:]),
            heads=self.heads // ranks,
            groups=groups,
        )


def state_bytes(layers: Sequence[StateFacts], itemsize: int) -> int:
    """Bytes of the state of one sequence."""
    return sum(one.bytes(itemsize) for one in layers)


def state_rows(max_seqs: int, checkpoints: int) -> int:
    """Rows of the tensors."""
    return max_seqs + checkpoints + 1
