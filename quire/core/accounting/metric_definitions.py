"""Defines the engine's metrics by the names that dashboards use; the server and LLM share them.

The consumers add prefixes, model labels and help texts.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.admission.admission_control import REJECT_REASONS
from quire.core.sequence_timing import BREAKDOWN_FIELDS
from quire.core.snapshot import Snapshot

MetricValues = dict[str, Mapping[str, float]]
"""Name -> label value -> number. The label value is "" for a metric without a label."""


def gauges(now: Snapshot) -> MetricValues:
    """Return the gauges: the current state of the engine."""
    stats = now.stats
    return {
        "num_requests_running": {"": stats.running},
        "num_requests_waiting": {"": stats.waiting},
        "num_requests_waiting_by_reason": {
            "capacity": stats.waiting - stats.following - stats.waiting_for_resources,
            "deferred": stats.following + stats.waiting_for_resources,
        },
        "host_kv_cache_usage_perc": {"": stats.host_usage},
        "kv_cache_usage_perc": {"": stats.usage},
        "expert_balancedness": {"": now.experts.balancedness},
        "expert_balancedness_after": {"": now.experts.balancedness_after},
        "encoder_cache_usage_perc": {"": now.media.cached_bytes / max(now.media.capacity_bytes, 1)},
        "encoder_cache_bytes": {"": now.media.cached_bytes},
        "lora_names": {"": now.adapters.names},
        "lora_host_adapters": {"": now.adapters.host_copies},
        "grammars_waiting": {"": now.grammars.waiting},
        "grammars_kept": {"": now.grammars.cached},
        "grammars_kept_bytes": {"": now.grammars.cached_bytes},
        "queued_prompt_tokens": {"": now.admission.queued_tokens},
        "predicted_time_to_first_token_seconds": {"": now.admission.predicted_ttft_s},
    }


def counters(now: Snapshot) -> MetricValues:
    """Return the counters: totals since the engine started."""
    stats, counted = now.stats, now.counters
    cached, loaded = counted.cached_tokens, counted.loaded_tokens
    drafts = counted.draft_counts
    return {
        "prefix_cache_queries": {"": stats.prefix_query_tokens},
        "prefix_cache_hits": {"": stats.prefix_hit_tokens},
        "external_prefix_cache_queries": {"": stats.tier_query_tokens},
        "external_prefix_cache_hits": {"": stats.tier_hit_tokens},
        "host_kv_blocks_stored": {"": stats.host_stored_blocks},
        "host_kv_blocks_loaded": {"": stats.host_loaded_blocks},
        "num_preemptions": {"": stats.preemptions},
        "engine_failed_steps": {"": stats.failed_steps},
        "engine_failures_unattributed": {"": stats.unattributed_failures},
        "engine_faulty_requests": {"": stats.failed_requests},
        "corrupt_rows": {"": stats.corrupt_rows},
        "corrupted_requests": {"": stats.corrupt_rows},
        "prompt_tokens": {"": counted.answered_tokens},
        "prompt_tokens_by_source": {
            "local_compute": counted.answered_tokens - cached,
            "local_cache_hit": cached - loaded,
            "external_kv_transfer": loaded,
        },
        "prompt_tokens_cached": {"": cached},
        "prompt_tokens_cached_by_source": {"device": cached - loaded, "host": loaded},
        "generation_tokens": {"": counted.generated_tokens},
        "spec_decode_num_drafts": {"": drafts.rows},
        "spec_decode_num_draft_tokens": {"": drafts.tokens},
        "spec_decode_num_accepted_tokens": {"": sum(drafts.accepted)},
        "spec_decode_num_accepted_tokens_per_pos": {
            str(position): number for position, number in enumerate(drafts.accepted or (0,))
        },
        "engine_steps": {"": counted.steps},
        "engine_step_seconds": {"": counted.step_seconds},
        "kernel_compilations_after_ready": {"": now.late_work.kernel_compilations},
        "graph_captures_after_ready": {"": now.late_work.graph_captures},
        "expert_rebalances": {"": now.experts.rebalances},
        "experts_moved": {"": now.experts.moved_experts},
        "encoder_cache_hits": {"": now.media.hits},
        "encoder_cache_misses": {"": now.media.misses},
        "encoder_cache_evictions": {"": now.media.evictions},
        "encoder_rows": {"": now.media.encoded_rows},
        "lora_slot_loads": {"": now.adapters.slot_loads},
        "lora_loads": {"": now.adapters.loads},
        "lora_load_seconds": {"": now.adapters.load_seconds},
        "lora_load_failures": {"": now.adapters.load_failures},
        "lora_evictions": {"": now.adapters.evictions},
        "grammars_compiled": {"": now.grammars.compiled},
        "grammars_failed": {"": now.grammars.failed},
        "grammar_cache_hits": {"": now.grammars.hits},
        "grammar_compile_seconds": {"": now.grammars.compile_seconds},
        "request_time_seconds": dict(zip(BREAKDOWN_FIELDS, counted.breakdown_seconds)),
        "admission_rejections": {
            reason: now.admission.refused.get(reason, 0) for reason in REJECT_REASONS
        },
    }


def per_key_counters(now: Snapshot, names: Mapping[bytes, str]) -> MetricValues:
    """Return the counters per tenant; tenants without a known name are summed into one entry.

    names: tenant -> name of its API key.
    """
    metrics: dict[str, dict[str, float]] = {}
    for digest, stats in now.admission.tenants.items():
        name = names.get(bytes.fromhex(digest), "")
        values = {
            "key_requests": stats.requests,
            "key_refused": stats.refused,
            "key_prompt_tokens": stats.prompt_tokens,
            "key_generation_tokens": stats.generated_tokens,
            "key_requests_here": stats.active_requests,
            "key_queued_tokens": stats.queued_tokens,
        }
        for metric, value in values.items():
            by_name = metrics.setdefault(metric, {})
            by_name[name] = by_name.get(name, 0) + value
    return {**metrics}
