"""Attributes that the classes of quire.llm share, and methods that are not supported yet."""

from __future__ import annotations

import logging

from quire.config.engine_config import ModelSection, SchedulerSection

log = logging.getLogger(__name__)
_logged: set[str] = set()


class ModelConfigView:
    """The facts of the model that scripts read from llm_engine.model_config."""

    def __init__(self, model: ModelSection, scheduler: SchedulerSection) -> None:
        self.model = model.name
        self.tokenizer = model.tokenizer
        self.dtype = model.dtype
        self.seed = model.seed
        self.served_model_name = model.served_names[0]
        self.max_logprobs = model.max_logprobs
        self.max_model_len = scheduler.max_model_len
        self.vocab_size = model.vocab

    def get_vocab_size(self) -> int:
        return self.vocab_size


def check_priority(priority: int, policy: str) -> int:
    """Return the priority; logs once where the scheduling policy does not use it."""
    if priority and policy != "priority" and policy not in _logged:
        _logged.add(policy)
        log.warning("priority has no effect with scheduling_policy='%s'", policy)
    return priority
