"""Updates of one sequence as one: what piled up, or what nobody wants piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.types import Update


def coalesce(updates: Sequence[Update]) -> Update:
    """One update that says the same. Prompt logprobs come once; of the timings the last counts."""
    last = updates[-1]
    if len(updates) == 1:
        return last
    logprobs = [one for update in updates for one in update.logprobs or ()]
    prompts = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
    timings = [update.timing for update in updates if update.timing is not None]
    return last._replace(
        token_ids=[token for update in updates for token in update.token_ids],
        logprobs=logprobs or None,
        prompt_logprobs=prompts[0] if prompts else None,
        timing=timings[-1] if timings else None,
    )
