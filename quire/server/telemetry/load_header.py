"""Load report in a response header, for inference gateways (ORCA, Open Request Cost Aggregation).

A request with `endpoint-load-metrics-format: TEXT` or `JSON` gets `endpoint-load-metrics`.
"""

from __future__ import annotations

import json

from starlette.requests import Request

from quire.server.telemetry.instrumentation import LOAD_TIMEOUT_S, get_telemetry

REQUEST_HEADER = "endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"


async def build_load_header(http: Request) -> dict[str, str]:
    """Return the header in the requested format; {} without one, or without an answer in time."""
    wanted = http.headers.get(REQUEST_HEADER, "").upper()
    if wanted not in ("TEXT", "JSON"):
        return {}
    found = await get_telemetry(http).fetch_snapshots(LOAD_TIMEOUT_S)
    engines = [now.stats for now in found if now is not None]
    if not engines:
        return {}
    usage = sum(one.usage for one in engines) / len(engines)
    metrics = {
        "kv_cache_usage_perc": round(usage, 6),
        "num_requests_waiting": sum(one.waiting for one in engines),
    }
    if wanted == "JSON":
        return {RESPONSE_HEADER: f"JSON {json.dumps({'named_metrics': metrics})}"}
    pairs = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
    return {RESPONSE_HEADER: f"TEXT {pairs}"}
