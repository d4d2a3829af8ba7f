"""An executor whose model proposes drafts, and which runs steps that continue others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from quire.executors.fake import Executor


class ProposingExecutor(Executor):
    """propose(seq, tokens): what a model drafts behind the tokens of a sequence."""

    def __init__(self, next_token, propose):
        super().__init__(next_token)
        self._propose, self._proposed = propose, {}

    def submit(self, plan):
        count = len(plan.continues)
        rows = (*map(self._ahead, plan.rows[:count]), *plan.rows[count:])
        step = super().submit(replace(plan, rows=rows))
        drafts = {}
        for i, row in enumerate(plan.rows if plan.proposals else ()):
            if step.wait().token_ids[i]:
                slot = row.seq.slot
                drafts[i] = tuple(self._propose(row.seq, self._tokens[slot])[: plan.proposals])
                self._proposed[slot] = drafts[i]
        step.wait().drafts.update(drafts)
        return step

    def _ahead(self, row):
        """Return a row as the worker runs it, which has its start and its drafts."""
        slot = row.seq.slot
        drafts = (*self._proposed.get(slot, ()), *[0] * row.drafts)
        seq = SimpleNamespace(slot=slot, drafts=drafts)
        return row._replace(seq=seq, start=len(self._tokens[slot]) - 1)
