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
    failed_steps: int = 0  # that raised
    failures_of_nobody: int = 0  # of those, with all that came of it: nobody was to blame
    blamed: int = 0  # requests that were ended, because steps fail with them
    corrupt_rows: int = 0  # sequences that were ended, because their logits were no numbers

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold."""
        return self.held_blocks / self.blocks
