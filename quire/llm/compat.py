"""Attributes that the classes of quire.llm share, and methods that are not supported yet."""

from __future__ import annotations

from quire.config.engine_config import ModelSection, SchedulerSection
from quire.errors import Unsupported


class ModelConfigView:
    """The few facts of the model that scripts read from llm_engine.model_config."""

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


def refuse_lora(lora_request: object | None) -> None:
    """Adapters come later; a list of Nones is no adapter."""
    given = lora_request if isinstance(lora_request, (list, tuple)) else [lora_request]
    if any(one is not None for one in given):
        raise Unsupported("lora_request: LoRA adapters are not supported yet", param="lora_request")
