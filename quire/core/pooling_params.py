"""PoolingParams: parameters of one pooling request. Plain data, no torch.

Names are those of vLLM, old ones too. An object is valid once it exists; `verify()` checks it again
after a change of its fields. quire.text.pooling_input checks what needs the model.
"""

from __future__ import annotations

import copy
from dataclasses import InitVar, dataclass, field
from typing import Any, get_args

from quire.config.engine_config import PoolingTask
from quire.core.param_checks import check_int, check_token_ids, invalid_param
from quire.core.params import RequestOutputKind
from quire.errors import RequestError, Unsupported

TASKS: tuple[str, ...] = get_args(PoolingTask)
OWN_TASK = "encode"
"""Old name of a task: the model's own."""
OLD_TASKS = {"score": "classify", "reward": "reward", OWN_TASK: OWN_TASK, "plugin": OWN_TASK}
"""Names of older releases. "reward": labels of the prompt, or of each token, as the model has.
"plugin": what vLLM calls the task of models whose results are tensors."""
_OLD_ACTIVATIONS = ("normalize", "softmax", "activation")
_UNSUPPORTED = {
    "late_interaction_params": "score() computes late interaction by itself",
    "extra_kwargs": "poolers of plug-ins are not supported",
    "late_chunking_params": "late chunking is not supported",
}


@dataclass(slots=True)
class PoolingParams:
    """Parameters of LLM.embed, encode, classify, score and reward."""

    use_activation: bool | None = None
    """Normalize an embedding; make probabilities of a classification. None: the model's default."""
    dimensions: int | None = None
    """Leading numbers of an embedding to keep, of a model trained for it (Matryoshka)."""
    step_tag_id: int | None = None
    """Token tasks: return the rows of this token alone."""
    returned_token_ids: list[int] | None = None
    """token_classify: return these columns alone."""
    task: str | None = None
    """embed, classify, token_embed, token_classify. None: what the call means."""
    requires_token_ids: bool = False
    """Outputs have the token ids of their prompts in any case."""
    skip_reading_prefix_cache: bool | None = None
    """Compute every token of the prompt. None: where the result needs the states of all tokens."""
    late_interaction_params: object | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    late_chunking_params: object | None = None
    truncate_prompt_tokens: int | None = None
    """Cut prompts to so many tokens. -1: to what the model takes."""
    prompt_name: str | None = None
    """The prefix of texts, by its name in the model's files: "query". None: the default one."""
    normalize: InitVar[bool | None] = field(default=None, kw_only=True)
    softmax: InitVar[bool | None] = field(default=None, kw_only=True)
    activation: InitVar[bool | None] = field(default=None, kw_only=True)

    def __post_init__(
        self, normalize: bool | None, softmax: bool | None, activation: bool | None
    ) -> None:
        for name, value in zip(_OLD_ACTIVATIONS, (normalize, softmax, activation)):
            if value is None:
                continue
            if self.use_activation not in (None, value):
                message = f"{name} is the old name of use_activation, and their values differ"
                raise RequestError(f"{message}: leave out {name}", param=name)
            self.use_activation = value
        self.verify()

    def verify(self) -> None:
        """Check the fields. Raises RequestError, Unsupported."""
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise invalid_param("use_activation", self.use_activation, "true, false or None")
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1, None, "an integer >= 1, or None")
        if self.step_tag_id is not None:
            check_int("step_tag_id", self.step_tag_id, 0, None, "a token id, or None")
        if self.returned_token_ids is not None:
            check_token_ids("returned_token_ids", self.returned_token_ids, empty=False)
        if self.task is not None and self.task not in (*TASKS, *OLD_TASKS):
            allowed = f"one of {', '.join(TASKS)} ({', '.join(OLD_TASKS)} in older releases)"
            raise invalid_param("task", self.task, allowed)
        self.task = OLD_TASKS.get(self.task or "", self.task)
        if self.output_kind != RequestOutputKind.FINAL_ONLY:
            allowed = "FINAL_ONLY: a pooling request has one output"
            raise invalid_param("output_kind", self.output_kind, allowed)
        if self.truncate_prompt_tokens not in (None, -1):
            allowed = "an integer >= 1, -1 or None"
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, None, allowed)
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise invalid_param("prompt_name", self.prompt_name, "a name, or None")
        for name, why in _UNSUPPORTED.items():
            if getattr(self, name):
                raise Unsupported(f"{name}: {why}", param=name)

    def clone(self) -> PoolingParams:
        """Return a copy that shares no list with this one."""
        copied = copy.copy(self)
        if self.returned_token_ids is not None:
            copied.returned_token_ids = list(self.returned_token_ids)
        return copied
