"""The state of a scheduler at one moment: its load, and all of it with counters since the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class EngineLoad(NamedTuple):
    """What an engine has to do."""

    queued_tokens: int = 0  # of prompts, that no step has computed
    sequences: int = 0  # that run or wait


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Sequences, blocks, counters. held + cached + free = blocks."""

    running: int
    waiting: int
    blocks: int
    held_blocks: int
    cached_blocks: int
    free_blocks: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int  # on the device
    tier_query_tokens: int = 0  # not found on the device, looked up in the tiers
    tier_hit_tokens: int = 0
    host_blocks: int = 0
    held_host_blocks: int = 0  # that steps in flight copy
    cached_host_blocks: int = 0  # the others with content
    host_stored_blocks: int = 0  # copied from the device since the start
    host_loaded_blocks: int = 0  # copied to the device
    following: int = 0  # of the waiting: their sibling computes the prompt
    waiting_for_resources: int = 0  # of the waiting: not in the queue yet
    failed_steps: int = 0  # steps that raised
    unattributed_failures: int = 0  # of those, with their trials: no culprit was found
    failed_requests: int = 0  # ended because steps with them raise
    corrupt_rows: int = 0  # sequences that ended because their logits were not finite

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold."""
        return self.held_blocks / self.blocks if self.blocks else 0.0

    @property
    def host_usage(self) -> float:
        """Share of the host blocks that have content."""
        used = self.held_host_blocks + self.cached_host_blocks
        return used / self.host_blocks if self.host_blocks else 0.0
