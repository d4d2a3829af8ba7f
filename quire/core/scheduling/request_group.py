"""Request group: the n sequences of one request; the leader computes the prompt for the others.

Followers stay out of the queue until they can share the leader's blocks. A request made with `hold`
keeps its blocks after the end, and others may name it as their parent. Written by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.kv.cross_blocks import source_digest
from quire.core.types import Request, Sequence, SequenceState


@dataclass(slots=True, eq=False)
class RequestGroup:
    """followers: sequences that have not forked yet, in order. left: number that have not ended.

    There may be thousands: work for each of them must not visit all of them.
    """

    request: Request
    sequences: tuple[Sequence, ...]
    leader: Sequence
    followers: dict[Sequence, None]
    num_unfinished: int
    hold: bool
    waits_for_resources: bool = False

    @classmethod
    def create(
        cls, request: Request, max_len: int, new_tables: Callable[[], tuple[list[int], ...]]
    ) -> RequestGroup:
        stop_ids = request.stop.eos_ids | request.stop.token_ids
        end = min(len(request.prompt) + request.stop.max_tokens, max_len)
        if request.pooling is not None:
            end = len(request.prompt)  # so its rows are never planned as decodes
        if request.n == 1 and not request.resumed_tokens:  # most requests
            only = Sequence(
                request,
                0,
                list(request.prompt),
                new_tables(),
                max_len=end,
                plain_len=end,
                stop_ids=stop_ids,
            )
            return cls(request, (only,), only, {}, 1, request.hold)
        sequences = tuple(
            Sequence(
                request,
                i,
                list(request.prompt),
                new_tables(),
                max_len=end,
                plain_len=end,
                stop_ids=stop_ids,
            )
            for i in range(request.n)
        )
        for seq, generated in zip(sequences, request.resumed_tokens):
            if generated is None:
                seq.state = SequenceState.FINISHED
            else:
                seq.tokens.extend(generated)
        first, *others = [seq for seq in sequences if seq.state is not SequenceState.FINISHED]
        unfinished = 1 + len(others)
        return cls(request, sequences, first, dict.fromkeys(others), unfinished, request.hold)

    @property
    def unfinished(self) -> list[Sequence]:
        return [seq for seq in self.sequences if seq.state is not SequenceState.FINISHED]

    @property
    def shared_len(self) -> int:
        """Number of prompt tokens that all share; each computes the last one, to sample its own."""
        return len(self.request.prompt) - 1


def best_parent(group: RequestGroup, child: Sequence) -> tuple[Sequence, int]:
    """Return the sequence of a held group that shares most with the child, and how many tokens."""
    return max(
        ((seq, _shared_prefix_len(seq, child)) for seq in group.sequences),
        key=lambda pair: pair[1],
    )


def _shared_prefix_len(parent: Sequence, child: Sequence) -> int:
    """Number of leading tokens of the child whose KV the parent has. At least one is left."""
    one, other = parent.request, child.request
    if source_digest(one) != source_digest(other):
        return 0
    if not other.read_prefix_cache:
        return 0
    differing = {*parent.request.extra_content} ^ {*child.request.extra_content}
    most = min(parent.computed, child.prompt_len - 1, *(at for at, _ in differing))
    a, b = parent.tokens[:most], child.tokens[:most]
    return most if a == b else next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
