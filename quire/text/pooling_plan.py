"""What PoolingParams mean with one model: task, activation, dimensions, prefix, length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.config.engine_config import PoolingSection, PoolingTask
from quire.core.param_checks import invalid_param
from quire.core.pooling_params import OWN_TASK, PoolingParams
from quire.core.types import Pooling
from quire.errors import RequestError
from quire.text.marked_media import MarkedTexts

Role = Literal["query", "document"]
Side = Literal["left", "right"]
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of prefixes for the two sides of a score, the best first."""
EMBEDDINGS = ("embed", "token_embed")
TOKEN_TASKS = ("token_embed", "token_classify")
_START_AS = {
    "embed": "--runner pooling --convert embed",
    "classify": "--runner pooling --convert classify",
    "token_embed": """--runner pooling --pooler-config '{"task": "token_embed"}'""",
    "token_classify": """--runner pooling --pooler-config '{"task": "token_classify"}'""",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInputOptions:
    """What a caller may set for all texts of a request, beside PoolingParams."""

    add_special_tokens: bool = True
    use_prompts: bool = True  # write the model's prefix before texts; False: they are whole
    truncation_side: Side | None = None  # None: the tokenizer's
    cache_salt: str | None = None
    max_tokens_per_query: int = 0  # of scores; 0: no limit
    max_tokens_per_doc: int = 0
    instruction: str | None = None  # of score templates
    chat_template: str | None = None  # of scores; None: the model's
    marked: MarkedTexts | None = None  # media of texts that have marks, prepared


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """Resolved parameters of a prompt."""

    pooling: Pooling
    max_tokens: int | None  # to which it is cut; None: too long is an error
    prefix: str  # of its text
    role: Role | None  # of a ColBERT model
    read_cache: bool


class PoolingPlanner:
    """Resolves parameters of requests to one model."""

    def __init__(self, section: PoolingSection, max_model_len: int, vocab_size: int) -> None:
        self.section = section
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size

    def plans(
        self,
        params: PoolingParams | Sequence[PoolingParams] | None,
        count: int,
        task: str | None,
        options: PoolingInputOptions,
    ) -> list[PoolingPlan]:
        """Return one for each of `count` prompts. Raises RequestError."""
        if params is None or isinstance(params, PoolingParams):
            return [self.plan(params, task, options)] * count
        if len(params) != count:
            message = f"give one pooling_params for all, or one per prompt ({count})"
            raise RequestError(f"{message}; got {len(params)}", param="pooling_params")
        return [self.plan(one, task, options) for one in params]

    def plan(
        self,
        params: PoolingParams | None,
        task: str | None,
        options: PoolingInputOptions,
        role: Role | None = None,
    ) -> PoolingPlan:
        """Resolve. task: of params that have none. role: of one side of a score."""
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            message = f"pooling_params must be PoolingParams, got a {type(params).__name__}"
            raise RequestError(message, param="pooling_params")
        params.verify()  # its fields may have been changed since it was made
        wanted = self.resolve_task(params.task or task)
        pooling = Pooling(
            wanted,
            use_activation=self._use_activation(params, wanted),
            dimensions=self._dimensions(params.dimensions, wanted),
            step_tag_id=self._step_tag(params, wanted),
            returned_token_ids=self._columns(params, wanted),
        )
        prefix, role = self._prefix(params.prompt_name, wanted, options, role)
        most, read_cache = self._max_tokens(params), self._reads_cache(params, wanted)
        return PoolingPlan(pooling, most, prefix, role, read_cache)

    def resolve_task(self, task: str | None) -> PoolingTask:
        """Return the task that a caller's name means. Raises RequestError with what to do."""
        tasks = self.section.tasks
        if task in (None, OWN_TASK):
            return tasks[0]
        if task == "reward":
            task = next((one for one in tasks if one not in EMBEDDINGS), "classify")
        for one in tasks:
            if one == task:
                return one
        raise RequestError(
            f"this model has no task {task!r}, it has {', '.join(tasks)}: start it with "
            f"{_START_AS[str(task)]}, if its files allow that",
            param="task",
        )

    def _use_activation(self, params: PoolingParams, task: PoolingTask) -> bool:
        if params.use_activation is not None:
            return params.use_activation
        return self.section.normalize if task in EMBEDDINGS else self.section.use_activation

    def _dimensions(self, given: int | None, task: PoolingTask) -> int | None:
        section = self.section
        if given is None:
            wanted = section.default_dimensions if task in EMBEDDINGS else None
            return None if wanted == section.size else wanted
        if task not in EMBEDDINGS:
            message = f"dimensions cuts embeddings; a result of the task {task} cannot be cut"
            raise RequestError(message, param="dimensions")
        if not section.matryoshka:
            raise RequestError(
                "this model does not support Matryoshka embeddings; dimensions must be unset. If "
                "it was trained for them, start it with --hf-overrides "
                "'{\"is_matryoshka\": true}'",
                param="dimensions",
            )
        if section.matryoshka_dimensions and given not in section.matryoshka_dimensions:
            allowed = f"one of {', '.join(map(str, section.matryoshka_dimensions))}"
            raise invalid_param("dimensions", given, allowed)
        if given > section.size:
            raise invalid_param("dimensions", given, f"in [1, {section.size}]")
        return None if given == section.size else given

    def _step_tag(self, params: PoolingParams, task: PoolingTask) -> int | None:
        tag = params.step_tag_id
        if tag is None:
            return self.section.step_tag_id if task in TOKEN_TASKS else None
        if task not in TOKEN_TASKS:
            message = f"step_tag_id selects tokens; the task {task} has one result a prompt"
            raise RequestError(message, param="step_tag_id")
        if tag >= self.vocab_size:
            raise invalid_param("step_tag_id", tag, f"a token id in [0, {self.vocab_size})")
        return tag

    def _columns(self, params: PoolingParams, task: PoolingTask) -> tuple[int, ...]:
        columns = params.returned_token_ids
        if columns is None:
            return self.section.returned_token_ids if task == "token_classify" else ()
        if task != "token_classify":
            message = f"returned_token_ids belongs to token_classify; the task here is {task}"
            raise RequestError(message, param="returned_token_ids")
        if max(columns) >= self.section.size:
            allowed = f"columns of the result, in [0, {self.section.size})"
            raise invalid_param("returned_token_ids", columns, allowed)
        return tuple(columns)

    def _max_tokens(self, params: PoolingParams) -> int | None:
        most = params.truncate_prompt_tokens
        if most is not None and most > self.max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens is {most}, more than max_model_len "
                f"({self.max_model_len}); lower it",
                param="truncate_prompt_tokens",
            )
        return self.max_model_len if most == -1 else most

    def _reads_cache(self, params: PoolingParams, task: PoolingTask) -> bool:
        whole = self.section.reads_whole_prompt(task)
        if params.skip_reading_prefix_cache is False and whole:
            raise RequestError(
                "skip_reading_prefix_cache=False: this result needs the states of all tokens, "
                "which cached ones do not have; leave it out",
                param="skip_reading_prefix_cache",
            )
        return not (whole or params.skip_reading_prefix_cache)

    def _prefix(
        self, name: str | None, task: PoolingTask, options: PoolingInputOptions, role: Role | None
    ) -> tuple[str, Role | None]:
        """Return what is written before a text, and its role in late interaction."""
        known = self.section.prompts
        late = self.section.late_interaction if task == "token_embed" else None
        if name is not None and name not in known and not (late and name in ("query", "document")):
            listed = ", ".join(map(repr, known)) or "it has none"
            message = f"prompt_name must be a prompt of this model's files ({listed})"
            raise RequestError(f"{message}, got {name!r}", param="prompt_name")
        if late is not None and role is None:
            role = "query" if name in QUERY_PROMPTS else "document"
        if name is None and role is not None:
            names = QUERY_PROMPTS if role == "query" else DOCUMENT_PROMPTS
            name = next((one for one in names if one in known), None)
        name = self.section.default_prompt if name is None else name
        prefix = known.get(name, "") if name is not None and options.use_prompts else ""
        if late is None:
            return prefix, None
        marker = late.query_prefix if role == "query" else late.document_prefix
        return prefix.removeprefix(marker), role
