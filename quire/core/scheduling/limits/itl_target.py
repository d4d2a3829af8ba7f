"""Inter-token latency limit: bounds prompt tokens of a step, so that decoding rows meet a target.

A step takes as many prompt tokens as fit into the target. That number is adapted after each
applied step: more tokens if the step was quicker than the target, fewer if it was slower. Fixed
costs make the number too small rather than too large. It needs no model of the device, and recovers
from a stall in a few steps.

A short prompt is over in a few steps. A long prompt takes hundreds, so after each of its steps
follow steps without it, until decoding rows have had their share of the time: half of it; less if
there are more prompts than decoding rows, because total throughput would fall. Its parts are as
small as stays efficient: a step with few prompt tokens may cost as much as one with a hundred.
Where no row decodes, prompts get the whole step.
"""

from __future__ import annotations

from quire.core.media.item_rows import least_tokens
from quire.core.scheduling.limits.base import NO_BOUND, StepBudget, StepListener
from quire.core.types import Sequence, SequenceState

MIN_PROMPT_TOKENS = 64
"""Minimum of prompt tokens in a step that has any: fewer cost as much, because of fixed costs."""
INITIAL_PROMPT_TOKENS = 256
"""Prompt tokens of the first step beside decoding rows, before anything is measured."""
FULL_STEP_SHARE = 0.4
"""Share of the bound from which a step counts as full: rounding may take more than half."""
LONG_PART_SHARE = FULL_STEP_SHARE
"""Share of the bound that a step takes of long prompts at least."""
LONG_PART_TOKENS = 128
"""The same in tokens, if they fit the target: few cost nearly as much as many on a CPU."""
MAX_CHANGE = 4.0
"""Factor by which one step changes the bound at most, and by which a step of a long prompt counts
as longer than the target: a single step may have stalled."""
DECODE_STEPS_PER_TARGET = 1.9
"""The target is at least so many steps of decoding rows alone: less would starve prompts."""
DECODE_SHARE = 0.5
"""Share of the time, beside long prompts, in which decoding rows alone are computed."""
LONG_PROMPT_STEPS = 4
"""A prompt is long if it would take more than this many full steps."""
PROBE_EVERY = 50
"""After so many steps with prompts one runs without, to measure that."""


class InterTokenLatencyLimit(StepBudget, StepListener):
    """left = what the target allows - prompt tokens taken in this step, if any row decodes."""

    def __init__(self, target_s: float) -> None:
        assert target_s > 0, target_s
        self.target_s = target_s
        self.decode_step_s = 0.0  # time of a step of decoding rows alone; 0: unknown
        self.fitting_tokens = float(NO_BOUND)  # prompt tokens of a step that takes the target
        self.cost_ratio = 1.0  # seconds of a step with prompts over those that its tokens predict
        self.decode_debt_s = 0.0  # time of decode steps before the next part of a long prompt
        self.left = NO_BOUND
        self.prompt_tokens = 0  # of this step
        self.long_tokens = 0  # of this step, those of long prompts
        self.decode_rows = 0  # rows of this step
        self.previous_decode_rows = 0  # rows of the step before: rows of this one may be added late
        self.decode_tokens = self.previous_decode_tokens = 0  # the same with drafts
        self.steps_since_probe = 0  # steps with prompts since one without

    def begin_step(self, sequences: int) -> None:
        self._account_for_step(sequences)
        self.previous_decode_rows, self.decode_rows = self.decode_rows, 0
        self.previous_decode_tokens, self.decode_tokens = self.decode_tokens, 0
        self.prompt_tokens = self.long_tokens = 0
        self.left = 0 if self._is_probe_step else self._prompt_budget()

    def allow(self, seq: Sequence, want: int) -> int:
        if _is_decoding(seq) or not self._is_active:
            return want
        left = self.left
        if self._is_long(seq):
            if self.decode_debt_s > 0:
                return 0
            if left > 0 and not self.long_tokens:  # shorter ones may take all, in every step
                left = max(left, MIN_PROMPT_TOKENS)
            left = min(left, self._long_part() - self.long_tokens)
        if left > 0 and seq.request.media:
            left = max(left, least_tokens(seq))
        return max(0, min(want, left))

    def prompt_tokens_left(self) -> int:
        """Prompt tokens that this step can still take."""
        return max(self.left, 0) if self._is_active else NO_BOUND

    def take(self, seq: Sequence, n: int) -> None:
        self._count(seq, n, 1)

    def undo(self, seq: Sequence, n: int) -> None:
        self._count(seq, n, -1)

    def free_decode_rows(self) -> int:
        return NO_BOUND

    def take_decode_rows(self, rows: int) -> None:
        self.decode_rows += rows
        self.decode_tokens += rows

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        if prompt_tokens:
            self.steps_since_probe += 1
            self._observe_prompt_step(prompt_tokens, seconds)
        else:
            self.steps_since_probe = 0
            known = self.decode_step_s or seconds
            self.decode_step_s = known + (min(seconds, 2 * known) - known) / 8

    def _observe_prompt_step(self, prompt_tokens: int, seconds: float) -> None:
        """Adapt the number of tokens that fit. A step that was not full can only raise it."""
        bound, fits = self.fitting_tokens, prompt_tokens * self._target_s / seconds
        if bound >= NO_BOUND:
            if prompt_tokens >= MIN_PROMPT_TOKENS:
                self.fitting_tokens = max(fits, 1.0)
            return
        ratio = seconds / (min(prompt_tokens / bound, MAX_CHANGE) * self._target_s)
        self.cost_ratio += (min(ratio, MAX_CHANGE) - self.cost_ratio) / 8
        if fits > prompt_tokens and prompt_tokens < FULL_STEP_SHARE * bound:
            fits = max(fits, bound)
        most = MAX_CHANGE * max(bound, MIN_PROMPT_TOKENS)
        self.fitting_tokens = max(min(fits, most), bound / MAX_CHANGE, 1.0)

    @property
    def _target_s(self) -> float:
        return max(self.target_s, DECODE_STEPS_PER_TARGET * self.decode_step_s)

    @property
    def _is_probe_step(self) -> bool:
        """Whether this step runs without prompts, to measure its time."""
        due = PROBE_EVERY if self.decode_step_s else 1
        return self.previous_decode_rows > 0 and self.steps_since_probe >= due

    @property
    def _is_active(self) -> bool:
        return bool(self.decode_rows or self.previous_decode_rows)

    def _prompt_budget(self) -> int:
        if self.fitting_tokens >= NO_BOUND:
            return INITIAL_PROMPT_TOKENS
        beside = self.previous_decode_tokens
        return max(MIN_PROMPT_TOKENS, _round_to_tiles(int(self.fitting_tokens) + beside) - beside)

    def _long_part(self) -> int:
        """Tokens of long prompts in a step."""
        most = self._prompt_budget()
        least_s = DECODE_STEPS_PER_TARGET * self.decode_step_s
        share = min(max(least_s / self._target_s, LONG_PART_SHARE), 1.0)
        return max(int(most * share), min(most, LONG_PART_TOKENS))

    def _account_for_step(self, sequences: int) -> None:
        """Account for the step planned last. sequences: how many run or wait now."""
        if not self.decode_rows:
            self.decode_debt_s = 0.0
        elif self.long_tokens:
            prompts_per_row = (sequences - self.decode_rows) / self.decode_rows
            share = min(DECODE_SHARE, 1 / (1 + max(prompts_per_row, 0.0)))
            full_steps = min(self.long_tokens / self.fitting_tokens, MAX_CHANGE)
            prompt_s = full_steps * self._target_s * self.cost_ratio - self.decode_step_s * min(
                full_steps, 1.0
            )
            owed_s = prompt_s * share / (1 - share) - self.decode_step_s
            self.decode_debt_s = max(self.decode_debt_s + owed_s, 0.0)
        elif not self.prompt_tokens:  # below 0 by a part of a step: a whole one was too much
            self.decode_debt_s = max(self.decode_debt_s, 0.0) - self.decode_step_s

    def _count(self, seq: Sequence, n: int, sign: int) -> None:
        if _is_decoding(seq):
            self.decode_rows += sign
            self.decode_tokens += sign * n
            return
        self.left -= sign * n
        self.prompt_tokens += sign * n
        self.long_tokens += sign * n * self._is_long(seq)

    def _is_long(self, seq: Sequence) -> bool:
        """Whether its uncached prompt takes many steps; also true near the end of the prompt."""
        tokens = seq.pending
        if seq.state is SequenceState.RUNNING:
            tokens = max(tokens, seq.prompt_len - seq.cached)
        return tokens > LONG_PROMPT_STEPS * max(self.fitting_tokens, MIN_PROMPT_TOKENS)


def _is_decoding(seq: Sequence) -> bool:
    """Whether the row computes a next token, not a prompt or preempted tokens."""
    return seq.pending == 1 and seq.planned >= seq.prompt_len


def _round_to_tiles(tokens: int) -> int:
    """Round down to the tiles of matrix products, which pay for a partial tile in full.

    Not by much: a step with a third less would not show whether the third had fitted.
    """
    grain = 256 if tokens >= 1024 else 128 if tokens >= 512 else 1
    return tokens - tokens % grain
