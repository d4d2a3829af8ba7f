"""Specifications of all metrics: name, kind, help, labels, buckets.

quire.server.telemetry.metrics fills them. Names are those that dashboards of this field expect,
without the prefix. `own` marks metrics of quire alone: their prefix is always quire. All have the
labels model_name and engine, except those of HTTP, which have no prefix either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.core.admission import admission_control
from quire.core.sequence_timing import BREAKDOWN_FIELDS
from quire.core.snapshot import STEP_TOKENS

MetricKind = Literal["counter", "gauge", "histogram", "summary"]


def _parse_bounds(words: str) -> tuple[float, ...]:
    return tuple(map(float, words.split()))


TTFT_BUCKETS_S = _parse_bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
ITL_BUCKETS_S = _parse_bounds(
    "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
REQUEST_BUCKETS_S = _parse_bounds(
    "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
HTTP_BUCKETS_S = (0.1, 0.5, 1.0)
HTTP_FINE_BUCKETS_S = _parse_bounds(
    "0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1 1.5 2 2.5 3 3.5 4 4.5 5 7.5 10 30 60"
)

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


def build_1_2_5_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `most`."""
    found = [digit * 10**i for i in range(len(str(most))) for digit in (1, 2, 5)]
    return tuple(one for one in found if one <= most)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. label: the label of its series, with all its values."""

    name: str
    kind: MetricKind
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()
    bounds: tuple[float, ...] | Literal["context"] = ()
    """Of a histogram's buckets; "context": 1, 2, 5, 10 ... up to the longest sequence."""
    is_quire_only: bool = False

    def bounds_for(self, max_model_len: int) -> tuple[float, ...]:
        return build_1_2_5_buckets(max_model_len) if self.bounds == "context" else self.bounds


def _counter(
    name: str, about: str, label: str | None = None, *values: str, own: bool = False
) -> MetricSpec:
    return MetricSpec(name, "counter", about, label, values, is_quire_only=own)


def _gauge(
    name: str, about: str, label: str | None = None, *values: str, own: bool = False
) -> MetricSpec:
    return MetricSpec(name, "gauge", about, label, values, is_quire_only=own)


def _histogram(name: str, bounds: tuple[float, ...] | Literal["context"], about: str) -> MetricSpec:
    return MetricSpec(name, "histogram", about, bounds=bounds)


ENGINE_METRICS = (
    _gauge("num_requests_running", "Sequences that the steps compute."),
    _gauge("num_requests_waiting", "Sequences that wait to run."),
    _gauge(
        "num_requests_waiting_by_reason",
        "Of those, by what they wait for: KV blocks, a grammar, a prompt of a sibling.",
        "reason",
        "capacity",
        "deferred",
    ),
    _gauge("kv_cache_usage_perc", "Share of the KV blocks that sequences hold, 0 to 1."),
    _gauge("host_kv_cache_usage_perc", "Share of the host's KV blocks with content.", own=True),
    _gauge(
        "engine_sleep_state", "1 at the state that the engine is in.", "sleep_state", *SLEEP_STATES
    ),
    MetricSpec("cache_config_info", "gauge", "1, with the size of the KV cache in labels."),
    MetricSpec(
        "lora_requests_info",
        "gauge",
        "The time, with adapters in labels: names of those of the last step, and of others that "
        "requests wait for.",
    ),
    _counter("expert_rebalances", "Times that experts were balanced over ranks.", own=True),
    _counter("experts_moved", "Experts that were written to another rank.", own=True),
    _gauge(
        "expert_balancedness",
        "Tokens of ranks' experts before the last balancing: mean over greatest.",
        own=True,
    ),
    _gauge(
        "expert_balancedness_after",
        "Of the same tokens, with the experts where they are now.",
        own=True,
    ),
    _counter(
        "encoder_cache_hits",
        "Images, videos and recordings whose embeddings were cached.",
        own=True,
    ),
    _counter("encoder_cache_misses", "Images, videos and recordings encoded.", own=True),
    _counter("encoder_cache_evictions", "Of those, dropped from the device for others.", own=True),
    _counter("encoder_rows", "Embeddings of images, videos and recordings computed.", own=True),
    _gauge("encoder_cache_usage_perc", "Share of the encoder cache that is in use.", own=True),
    _gauge("encoder_cache_bytes", "Bytes of embeddings in the encoder cache.", own=True),
    _counter("lora_slot_loads", "Adapters whose weights were sent to the device.", own=True),
    _counter("lora_loads", "Adapters read from their files, also again.", own=True),
    _counter("lora_load_seconds", "Time of these reads.", own=True),
    _counter("lora_load_failures", "Adapters whose files were missing or wrong.", own=True),
    _counter("lora_evictions", "Adapters dropped from host memory for others.", own=True),
    _gauge("lora_names", "Names of adapters.", own=True),
    _gauge("lora_host_adapters", "Adapters in host memory.", own=True),
    _counter("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache."),
    _counter("prefix_cache_hits", "Tokens of prompts found in the prefix cache on the device."),
    _counter("external_prefix_cache_queries", "Tokens of prompts looked up in host memory."),
    _counter("external_prefix_cache_hits", "Tokens of prompts found in host memory."),
    _counter("host_kv_blocks_stored", "KV blocks copied from the device to the host.", own=True),
    _counter("host_kv_blocks_loaded", "KV blocks copied from the host to the device.", own=True),
    _counter("num_preemptions", "Sequences that lost their blocks to others."),
    _counter("prompt_tokens", "Tokens of prompts, cached ones included; once a request."),
    _counter(
        "prompt_tokens_by_source",
        "The same, by where their KV came from.",
        "source",
        "local_compute",
        "local_cache_hit",
        "external_kv_transfer",
    ),
    _counter("prompt_tokens_cached", "Tokens of prompts that the prefix cache had."),
    _counter("prompt_tokens_cached_by_source", "The same, by tier.", "source", "device", "host"),
    _counter("generation_tokens", "Tokens generated."),
    _histogram("iteration_tokens_total", STEP_TOKENS, "Tokens in a step of the engine."),
    _counter("spec_decode_num_drafts", "Steps of a sequence that verified drafts."),
    _counter("spec_decode_num_draft_tokens", "Drafted tokens in them."),
    _counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "The same, by position among the drafts of a step.",
        "position",
    ),
    _counter("engine_steps", "Steps that had rows.", own=True),
    _counter("engine_step_seconds", "Time in which a step was under way.", own=True),
    _counter(
        "kernel_compilations_after_ready",
        "Kernels compiled or first loaded when the engine was ready: requests waited.",
        own=True,
    ),
    _counter(
        "graph_captures_after_ready",
        "CUDA graphs captured when the engine was ready: requests waited.",
        own=True,
    ),
    _counter("engine_restarts", "Engines that took over from one that died.", own=True),
    _counter("engine_failed_steps", "Steps that raised.", own=True),
    _counter(
        "engine_failures_unattributed",
        "Of those, steps whose requests all passed when they ran again.",
        own=True,
    ),
    _counter(
        "engine_faulty_requests", "Requests that ended because steps fail with them.", own=True
    ),
    _counter("corrupt_rows", "Sequences that were ended: NaN or infinite logits.", own=True),
    _counter("corrupted_requests", "The same number, by vLLM's name."),
    _gauge("grammars_waiting", "Grammars of structured output that are to be compiled.", own=True),
    _gauge("grammars_kept", "Grammars that are compiled, those in use included.", own=True),
    _gauge("grammars_kept_bytes", "Memory that they hold, about.", own=True),
    _counter("grammars_compiled", "Grammars that were compiled.", own=True),
    _counter("grammars_failed", "Grammars that could not be compiled.", own=True),
    _counter("grammar_cache_hits", "Requests with a grammar that was compiled already.", own=True),
    _counter("grammar_compile_seconds", "Time in which grammars were compiled.", own=True),
    _gauge("queued_prompt_tokens", "Tokens of prompts that wait to be computed.", own=True),
    _gauge(
        "predicted_time_to_first_token_seconds",
        "Of a prompt of the usual length that came now; 0: nothing is known yet.",
        own=True,
    ),
    _counter(
        "admission_rejections",
        "Requests that got 429, by the bound they met.",
        "reason",
        *admission_control.REJECT_REASONS,
    ),
    _counter(
        "request_time_seconds",
        "Where the time of ended sequences went in the engine.",
        "cause",
        *BREAKDOWN_FIELDS,
        own=True,
    ),
)
"""Read from the engine on each scrape."""

KEY_METRICS = (
    _counter("key_requests", "Accepted requests of a key.", "key", own=True),
    _counter("key_refused", "Requests of a key that got 429.", "key", own=True),
    _counter("key_prompt_tokens", "Tokens of their prompts, cached ones too.", "key", own=True),
    _counter("key_generation_tokens", "Tokens generated for a key.", "key", own=True),
    _gauge("key_requests_here", "Requests of a key, running and waiting.", "key", own=True),
    _gauge("key_queued_tokens", "Tokens of a key's prompts that wait.", "key", own=True),
)
"""Of each name in the key file; the same."""

REQUEST_METRICS = (
    _counter("mm_cache_queries", "Media items looked up in the cache of processed ones."),
    _counter("mm_cache_hits", "Of those, found there."),
    _counter(
        "key_file_reads", "Readings of a changed key file.", "result", "ok", "failed", own=True
    ),
    _counter(
        "request_success", "Sequences that ended, by how.", "finished_reason", *FINISH_REASONS
    ),
    _histogram("request_prompt_tokens", "context", "Tokens of a prompt."),
    _histogram("request_generation_tokens", "context", "Tokens of an answer."),
    _histogram(
        "request_max_num_generation_tokens", "context", "Tokens of a request's longest answer."
    ),
    _histogram("request_params_max_tokens", "context", "max_tokens of a request."),
    _histogram("request_params_n", CHOICE_BUCKETS, "Answers per request (`n`)."),
    _histogram(
        "request_prefill_kv_computed_tokens", "context", "Tokens of a prompt that were computed."
    ),
    _histogram("request_num_preemptions", PREEMPTION_BUCKETS, "How often an answer was preempted."),
    _histogram("time_to_first_token_seconds", TTFT_BUCKETS_S, "From arrival to the first token."),
    _histogram("inter_token_latency_seconds", ITL_BUCKETS_S, "From a token to the next."),
    _histogram(
        "request_time_per_output_token_seconds",
        ITL_BUCKETS_S,
        "Mean of an answer, without its first.",
    ),
    _histogram("e2e_request_latency_seconds", REQUEST_BUCKETS_S, "From arrival to the last token."),
    _histogram("request_queue_time_seconds", REQUEST_BUCKETS_S, "Until the first step with it."),
    _histogram("request_prefill_time_seconds", REQUEST_BUCKETS_S, "From there to the first token."),
    _histogram(
        "request_decode_time_seconds", REQUEST_BUCKETS_S, "From the first token to the last."
    ),
    _histogram(
        "request_inference_time_seconds",
        REQUEST_BUCKETS_S,
        "From the first step to the last token.",
    ),
)
"""Counted by the API processes."""

HTTP_METRICS = (
    _counter("http_requests_total", "Requests by handler, method and class of status."),
    _histogram("http_request_duration_seconds", HTTP_BUCKETS_S, "By handler and method."),
    _histogram("http_request_duration_highr_seconds", HTTP_FINE_BUCKETS_S, "Of all handlers."),
    MetricSpec("http_request_size_bytes", "summary", "Content-Length of requests, by handler."),
    MetricSpec("http_response_size_bytes", "summary", "Content-Length of answers, by handler."),
)
"""Without a prefix."""

ALL_METRICS = (*ENGINE_METRICS, *KEY_METRICS, *REQUEST_METRICS, *HTTP_METRICS)
