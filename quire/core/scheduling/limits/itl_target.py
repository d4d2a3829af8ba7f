"""Inter-token latency limit: bounds prompt tokens of a step, so that decoding rows meet a target.

There are two targets. A short prompt is over in a few steps, and each may take target_s; or longer,
where a step of decoding rows alone takes so long that less would starve prompts. A long prompt
takes hundreds of steps, and each may take less than twice a step without prompts, so that no token
comes at less than half its pace. That time is measured; if every step has prompts, one
step in fifty runs without.

The bound is learned from each applied step: more or fewer tokens as the step was quicker or slower
than the target. Fixed costs make this err on the small side; it needs no model of the device, and
recovers from a stall in a few steps. Where no row decodes, prompts get the whole step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quire.core.scheduling.limits.base import NO_BOUND, StepBudget, StepListener
from quire.core.types import Sequence, SequenceState

MIN_PROMPT_TOKENS = 64
"""Minimum of prompt tokens in a step, whatever the target: prompts must make progress."""
INITIAL_PROMPT_TOKENS = 256
"""Prompt tokens of the first step beside decoding rows, before anything is measured."""
MIN_LONG_PROMPT_TOKENS = 32
"""The same for long prompts. Fewer save almost nothing: a step reads the whole context anyway."""
FULL_STEP_SHARE = 0.4
"""Share of the bound from which a step counts as full: rounding may take more than half."""
LONG_STEP_FACTOR = 1.9
"""Time limit of a step with a long prompt, in steps without prompts; variation comes on top."""
LONG_PROMPT_STEPS = 8
"""A prompt is long if it would take more than this many full steps."""
PROBE_EVERY = 50
"""After so many steps with prompts one runs without, to measure that."""
PLAN_HISTORY = 8
"""Number of remembered plans: more than are in flight."""


@dataclass(slots=True)
class _PromptTokenFit:
    """Learns how many prompt tokens a step may have to take no longer than a target."""

    min_tokens: int
    max_tokens: float = float(NO_BOUND)

    def observe(self, prompt_tokens: int, seconds: float, target_s: float) -> None:
        fits = max(prompt_tokens * target_s / seconds, self.min_tokens)
        unknown = self.max_tokens >= NO_BOUND
        if unknown or fits < prompt_tokens or prompt_tokens >= FULL_STEP_SHARE * self.max_tokens:
            self.max_tokens = fits
        else:
            self.max_tokens = max(self.max_tokens, fits)


@dataclass(slots=True)
class _StepPromptTokens:
    """Prompt tokens in a step, and those of long prompts among them."""

    tokens: int = 0
    long_tokens: int = 0


class InterTokenLatencyLimit(StepBudget, StepListener):
    """left = what the target allows - prompt tokens taken in this step, if any row decodes.

    left for long prompts: the same with the lower target; their tokens count for both.
    """

    def __init__(self, target_s: float, *, least_of_long: int = MIN_LONG_PROMPT_TOKENS) -> None:
        assert target_s > 0, target_s
        self.target_s = target_s
        self.decode_step_s = 0.0  # time of a step of decoding rows alone; 0: unknown
        self.short_fit = _PromptTokenFit(MIN_PROMPT_TOKENS)
        self.long_fit = _PromptTokenFit(least_of_long)
        self.left = NO_BOUND
        self.left_for_long = NO_BOUND
        self.long_rows = 0  # rows of long prompts in this step
        self.recent_steps: deque[_StepPromptTokens] = deque(maxlen=PLAN_HISTORY)  # the latest last
        self.steps_since_probe = 0  # steps with prompts since one without
        self.decode_rows = 0  # rows of this step
        self.previous_decode_rows = 0  # rows of the step before: rows of this one may be added late

    def begin_step(self, sequences: int) -> None:
        self.previous_decode_rows, self.decode_rows = self.decode_rows, 0
        self.long_rows = 0
        self.recent_steps.append(_StepPromptTokens())
        self.left = self._prompt_budget(self.short_fit)
        self.left_for_long = min(self._prompt_budget(self.long_fit), self.left)
        if self._is_probe_step:
            self.left = self.left_for_long = 0

    def allow(self, seq: Sequence, want: int) -> int:
        if _is_decoding(seq) or not self._is_active:
            return want
        left = self.left
        if self._is_long(seq):
            left = self.left_for_long
            if self.left > 0 and not self.long_rows:
                left = max(left, self.long_fit.min_tokens)  # shorter ones took all, in every step
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

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        if not prompt_tokens:
            self._observe_decode_step(seconds)
            return
        self.steps_since_probe += 1
        long_tokens = self._long_tokens(prompt_tokens)
        if not long_tokens and prompt_tokens >= MIN_PROMPT_TOKENS:
            self.short_fit.observe(prompt_tokens, seconds, self._target_s)
        elif long_tokens == prompt_tokens and self.decode_step_s:
            self.long_fit.observe(prompt_tokens, seconds, LONG_STEP_FACTOR * self.decode_step_s)

    @property
    def _target_s(self) -> float:
        """Time limit of a step with short prompts only."""
        return max(self.target_s, LONG_STEP_FACTOR * self.decode_step_s)

    @property
    def _is_probe_step(self) -> bool:
        """Whether this step runs without prompts, to measure its time."""
        unknown = not self.decode_step_s and any(plan.long_tokens for plan in self.recent_steps)
        return self.previous_decode_rows > 0 and (unknown or self.steps_since_probe >= PROBE_EVERY)

    @property
    def _is_active(self) -> bool:
        return bool(self.decode_rows or self.previous_decode_rows)

    def _prompt_budget(self, fit: _PromptTokenFit) -> int:
        if self.short_fit.max_tokens >= NO_BOUND:
            return INITIAL_PROMPT_TOKENS
        most = fit.max_tokens
        if most >= NO_BOUND:  # no long prompt yet; half of what shorter ones promise
            most = (
                self.short_fit.max_tokens
                * LONG_STEP_FACTOR
                * self.decode_step_s
                / self._target_s
                / 2
            )
        return max(
            fit.min_tokens,
            _round_to_tiles(int(most) + self.previous_decode_rows) - self.previous_decode_rows,
        )

    def _count(self, seq: Sequence, n: int, sign: int) -> None:
        if _is_decoding(seq):
            self.decode_rows += sign
            return
        self.left -= sign * n
        self.left_for_long -= sign * n
        is_long = self._is_long(seq)
        self.long_rows += sign * is_long
        if self.recent_steps:
            self.recent_steps[-1].tokens += sign * n
            self.recent_steps[-1].long_tokens += sign * n * is_long

    def _long_tokens(self, prompt_tokens: int) -> int:
        """Long-prompt tokens of an applied step. Plans are applied in order; some never are."""
        for place, plan in enumerate(self.recent_steps):
            if plan.tokens == prompt_tokens:
                for _ in range(place + 1):
                    self.recent_steps.popleft()
                return plan.long_tokens
        return 0

    def _is_long(self, seq: Sequence) -> bool:
        """Whether its uncached prompt takes many steps; also true near the end of the prompt."""
        tokens = seq.pending
        if seq.state is SequenceState.RUNNING:
            tokens = max(tokens, seq.prompt_len - seq.cached)
        return tokens > LONG_PROMPT_STEPS * self.short_fit.max_tokens

    def _observe_decode_step(self, seconds: float) -> None:
        """Learn the time of a step without prompts. A single slow one has a limited effect."""
        self.steps_since_probe = 0
        if not self.decode_step_s:
            self.decode_step_s = seconds
        self.decode_step_s += (min(seconds, 2 * self.decode_step_s) - self.decode_step_s) / 8


def _is_decoding(seq: Sequence) -> bool:
    """Whether the row computes a next token, not a prompt or preempted tokens."""
    return seq.pending == 1 and seq.planned >= seq.prompt_len


def _round_to_tiles(tokens: int) -> int:
    """Round down to the tiles of matrix products, which pay for a partial tile in full.

    Not by much: a step with a third less would not show whether the third had fitted.
    """
    grain = 256 if tokens >= 1024 else 128 if tokens >= 512 else 1
    return tokens - tokens % grain
