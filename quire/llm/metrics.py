"""Snapshots for LLM.get_metrics: the engine's counters, under the names of the HTTP metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.accounting import metric_definitions
from quire.llm.engine import LLMEngine

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
COUNTER_NAMES = {
    "prefix_cache_queries": "vllm",
    "prefix_cache_hits": "vllm",
    "num_preemptions": "vllm",
    "prompt_tokens": "vllm",
    "prompt_tokens_cached": "vllm",
    "generation_tokens": "vllm",
    "spec_decode_num_drafts": "vllm",
    "spec_decode_num_draft_tokens": "vllm",
    "spec_decode_num_accepted_tokens": "vllm",
    "kernel_compilations_after_ready": "quire",
    "graph_captures_after_ready": "quire",
}
"""Name -> prefix; metrics that vLLM does not have are quire's."""
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True, slots=True)
class Metric:
    """A name and labels; the kinds below add values."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """Goes up and down."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Several counters under one name."""

    values: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Counts at or below each bound."""

    count: int
    sum: float
    buckets: dict[str, int]


def collect_metrics(engine: LLMEngine) -> list[Metric]:
    """Return every metric of this moment."""
    snapshots = engine.engine.snapshots()
    model = {"model_name": engine.config.model.served_names[0]}
    found: list[Metric] = []
    for number, now in enumerate(snapshots):
        labels = {**model, "engine": str(number)}
        found += [
            Gauge(f"vllm:{name}", labels, values[""])
            for name, values in metric_definitions.gauges(now).items()
            if "" in values
        ]
        found += [
            Counter(f"{COUNTER_NAMES[name]}:{name}", labels, int(values[""]))
            for name, values in metric_definitions.counters(now).items()
            if name in COUNTER_NAMES
        ]
        accepted = list(now.counters.draft_counts.accepted)
        found.append(Vector(f"vllm:{PER_POSITION}", labels, accepted))
    labels = {**model, "engine": "0" if len(snapshots) == 1 else "all"}
    found += [
        Counter(
            "vllm:request_success", labels | {"finished_reason": reason}, engine.finished[reason]
        )
        for reason in FINISH_REASONS
    ]
    return found
