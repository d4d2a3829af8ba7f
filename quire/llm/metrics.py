"""Snapshots for LLM.get_metrics: what the engine counts, by the names dashboards know."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.llm.engine import LLMEngine

REASONS = ("stop", "length", "abort", "error", "repetition")


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


def snapshot(engine: LLMEngine) -> list[Metric]:
    """Every metric, now."""
    stats = engine.engine.stats()
    labels = {"model_name": engine.config.model.served_names[0], "engine": "0"}
    gauges: dict[str, float] = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "num_requests_swapped": stats.swapped,
        "kv_cache_usage_perc": stats.usage,
    }
    counters = {
        "prefix_cache_queries": stats.prefix_query_tokens,
        "prefix_cache_hits": stats.prefix_hit_tokens,
        "num_preemptions": stats.preemptions,
        "prompt_tokens": engine.prompt_tokens,
        "generation_tokens": engine.generation_tokens,
    }
    found: list[Metric] = [Gauge(f"vllm:{n}", labels, v) for n, v in gauges.items()]
    found += [Counter(f"vllm:{name}", labels, value) for name, value in counters.items()]
    found += [
        Counter(
            "vllm:request_success", labels | {"finished_reason": reason}, engine.finished[reason]
        )
        for reason in REASONS
    ]
    return found
