"""What the scheduler says about itself: one moment, and counters since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Sequences, blocks, counters. held + cached + free = blocks."""

    running: int
    waiting: int
    swapped: int
    blocks: int
    held_blocks: int
    cached_blocks: int
    free_blocks: int
    host_blocks: int
    free_host_blocks: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    following: int = 0  # of the waiting: their sibling computes the prompt
    kept: int = 0  # of the waiting: a limit keeps them out of the queue

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold."""
        return self.held_blocks / self.blocks
