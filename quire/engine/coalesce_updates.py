"""Coalescing: merges several updates of one sequence into one."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.types import Update


def coalesce(updates: Sequence[Update]) -> Update:
    """Returns one equal update. Prompt logprobs come once; the last timing and counts hold."""
    last = updates[-1]
    if len(updates) == 1:
        return last
    logprobs = [one for update in updates for one in update.logprobs or ()]
    prompts = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
    timings = [update.timing for update in updates if update.timing is not None]
    counts = [update.draft_counts for update in updates if update.draft_counts is not None]
    return last._replace(
        token_ids=[token for update in updates for token in update.token_ids],
        logprobs=logprobs or None,
        prompt_logprobs=prompts[0] if prompts else None,
        timing=timings[-1] if timings else None,
        draft_counts=counts[-1] if counts else None,
    )
