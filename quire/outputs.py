"""Outputs: plain data that callers get, with vLLM's field names. Imports the standard library only.

quire.text.output.output_processor builds them. `FlatLogprobs` keeps the logprobs of many positions
in six flat lists, so that a long answer is a few objects for the garbage collector, not thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar, overload

from quire.errors import RequestError


@dataclass(slots=True)
class Logprob:
    """The logprob of one token at one position. rank: 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class FlatLogprobs(Sequence["dict[int, Logprob] | None"]):
    """A list of dicts in columns; position i has entries [start_indices[i], end_indices[i])."""

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def append_fast(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Sequence[int | None],
        decoded_tokens: Sequence[str | None],
    ) -> None:
        """Add one position from columns."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def append(self, entry: dict[int, Logprob] | None) -> None:
        """Add one position; None (the first of a prompt) is a position without entries."""
        entry = entry or {}
        values = entry.values()
        self.append_fast(
            list(entry),
            [one.logprob for one in values],
            [one.rank for one in values],
            [one.decoded_token for one in values],
        )

    def extend(self, entries: Iterable[dict[int, Logprob] | None]) -> None:
        for entry in entries:
            self.append(entry)

    def _entry_at(self, position: int) -> dict[int, Logprob]:
        entries = range(self.start_indices[position], self.end_indices[position])
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in entries
        }

    def _slice(self, start: int, stop: int) -> FlatLogprobs:
        cut = FlatLogprobs()
        if start >= stop:
            return cut
        first, last = self.start_indices[start], self.end_indices[stop - 1]
        cut.start_indices = [i - first for i in self.start_indices[start:stop]]
        cut.end_indices = [i - first for i in self.end_indices[start:stop]]
        cut.token_ids = self.token_ids[first:last]
        cut.logprobs = self.logprobs[first:last]
        cut.ranks = self.ranks[first:last]
        cut.decoded_tokens = self.decoded_tokens[first:last]
        return cut

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        if isinstance(index, int):
            return self._entry_at(range(len(self))[index])
        start, stop, step = index.indices(len(self))
        if step == 1:
            return self._slice(start, stop)
        cut = FlatLogprobs()
        cut.extend(self._entry_at(i) for i in range(start, stop, step))
        return cut

    def __len__(self) -> int:
        return len(self.start_indices)

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (self._entry_at(i) for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatLogprobs) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # mutable, as a list is


LogprobsOnePosition = dict[int, Logprob]
SampleLogprobs = list[LogprobsOnePosition] | FlatLogprobs
PromptLogprobs = list[LogprobsOnePosition | None] | FlatLogprobs


@dataclass(slots=True)
class RequestStateStats:
    """Times and counts of a request. `_ts` and arrival_time: monotonic clock, seconds."""

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False


@dataclass(slots=True)
class SpecDecodeMetrics:
    """Drafts of one sequence. acceptance_histogram[i]: steps that accepted i of their drafts.

    A step here is one with drafts. num_spec_tokens: the most that one of them accepted.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int

    @classmethod
    def from_counts(cls, steps: int, drafted: int, accepted: Sequence[int]) -> SpecDecodeMetrics:
        """accepted[i]: steps that accepted more than i drafts."""
        total = sum(accepted)
        at_least = (steps, *accepted)
        return cls(
            mean_acceptance_length=1 + total / max(steps, 1),
            draft_acceptance_rate=total / max(drafted, 1),
            acceptance_histogram=[a - b for a, b in zip(at_least, (*accepted, 0))],
            num_spec_steps=steps,
            num_accepted_draft_tokens=total,
            num_draft_tokens=drafted,
            num_spec_tokens=len(accepted),
        )


@dataclass
class FunctionCall:
    """arguments: JSON text."""

    name: str
    arguments: str


@dataclass
class ToolCall:
    """A tool call of a model; `dataclasses.asdict` makes the entry for a message."""

    id: str
    function: FunctionCall
    type: str = "function"


@dataclass
class CompletionOutput:
    """One answer to a prompt.

    finish_reason: "stop", "length", "abort", "error", "repetition", or None before the end.
    stop_reason: the stop string or stop token id that ended it; None on EOS.
    reasoning, tool_calls: parsed from the text by chat() on request; `text` is the rest, and
    finish_reason may be "tool_calls". notes: invalid tool calls and the like.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    routed_experts: object | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: object | None = None
    sampling_mask: object | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None
    weight_versions: list[tuple[str, int, int]] | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, "
            f"token_ids={self.token_ids}, cumulative_logprob={self.cumulative_logprob}, "
            f"logprobs={self.logprobs}, finish_reason={self.finish_reason}, "
            f"stop_reason={self.stop_reason})"
        )


@dataclass
class RequestOutput:
    """The answers to one prompt, in full or what is new, depending on the output kind."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: object | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    prompt_token_id_logprobs: object | None = None
    kv_transfer_params: dict[str, object] | None = None
    ec_transfer_params: dict[str, object] | None = None
    error: str | None = None  # why, when an output's finish_reason is "error"
    fault: RequestError | None = None  # the error, if the request caused it

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, "
            f"encoder_prompt={self.encoder_prompt!r}, "
            f"encoder_prompt_token_ids={self.encoder_prompt_token_ids}, "
            f"prompt_logprobs={self.prompt_logprobs}, outputs={self.outputs}, "
            f"finished={self.finished}, metrics={self.metrics}, "
            f"lora_request={self.lora_request}, num_cached_tokens={self.num_cached_tokens})"
        )


@dataclass
class BeamSearchSequence:
    """One beam. tokens holds the prompt, then the output."""

    orig_prompt: object
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    lora_request: object | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class TensorLike(Protocol):
    """The part of a tensor that is used here, without a tensor library."""

    @property
    def shape(self) -> Sequence[int]: ...
    def tolist(self) -> object: ...


class PoolingOutput:
    """The raw result of a pooling model."""

    def __init__(self, data: TensorLike) -> None:
        self._data = data

    @property
    def data(self) -> Any:
        """The result as a torch tensor, made of a NumPy array when it is first read."""
        if type(self._data).__module__ == "numpy":
            import torch

            self._data = torch.tensor(self._data)
        return self._data

    def vector(self, what: str) -> list[float]:
        """Return the numbers of a one-dimensional result. Raises ValueError for others."""
        if len(self._data.shape) != 1:
            shape = tuple(self._data.shape)
            raise ValueError(f"{what} needs a one-dimensional tensor, got shape {shape}")
        values = self._data.tolist()
        assert isinstance(values, list), type(values)
        return values

    def __repr__(self) -> str:
        return f"PoolingOutput(data={self.data})"


class EmbeddingOutput:
    """A vector. Its list of numbers is made when it is first read."""

    def __init__(self, embedding: list[float] | PoolingOutput) -> None:
        self._embedding = embedding

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> EmbeddingOutput:
        return EmbeddingOutput(pooling_output.vector("an embedding"))

    @property
    def embedding(self) -> list[float]:
        if isinstance(self._embedding, PoolingOutput):
            self._embedding = self._embedding.vector("an embedding")
        return self._embedding

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmbeddingOutput) and self.embedding == other.embedding

    __hash__ = None  # type: ignore[assignment]  # mutable, as a list is

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass
class ClassificationOutput:
    probs: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> ClassificationOutput:
        return ClassificationOutput(pooling_output.vector("a classification"))

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


@dataclass
class ScoringOutput:
    score: float

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> ScoringOutput:
        value = pooling_output.data.tolist()
        while isinstance(value, list) and len(value) == 1:  # shape [1], [1, 1] or []
            value = value[0]
        if not isinstance(value, int | float):
            shape = tuple(pooling_output.data.shape)
            raise ValueError(  # noqa: TRY004  the content of a tensor is a value
                f"a score needs a tensor with one number, got shape {shape}"
            )
        return ScoringOutput(float(value))

    def __repr__(self) -> str:
        return f"ScoringOutput(score={self.score})"


Pooled = TypeVar("Pooled")


@dataclass
class PoolingRequestOutput(Generic[Pooled]):
    """The result of one pooling request."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None
    late_chunking: object | None = field(default=None, repr=False)

    @classmethod
    def _with_outputs(cls, base: PoolingRequestOutput[PoolingOutput], outputs: Pooled) -> Self:
        """The result of the same request in another form."""
        ids, cached = base.prompt_token_ids, base.num_cached_tokens
        return cls(base.request_id, outputs, ids, cached, base.finished)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(request_id={self.request_id!r}, outputs={self.outputs!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, "
            f"num_cached_tokens={self.num_cached_tokens}, finished={self.finished})"
        )


@dataclass(repr=False)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls._with_outputs(base, EmbeddingOutput.from_base(base.outputs))


@dataclass(repr=False)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls._with_outputs(base, ClassificationOutput.from_base(base.outputs))


@dataclass(repr=False)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls._with_outputs(base, ScoringOutput.from_base(base.outputs))
