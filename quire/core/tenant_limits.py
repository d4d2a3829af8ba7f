"""Tenant limits: bound the engine's use by one tenant. They come with each request.

A tenant is the set of keys with the same name in the key file (quire.server.auth.api_keys). The
limits of its latest request are in force; None is no limit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of one tenant. The defaults are unlimited."""

    weight: float = 1.0  # a waiting tenant with twice the weight gets twice the service
    max_requests: int | None = None  # running and waiting requests at a time
    tokens_per_minute: int | None = None  # of prompts and answers together
    max_queued_tokens: int | None = None  # of prompts that are not computed yet
    kv_share: float | None = None  # share of KV cache blocks; at it no more sequences start


UNRESTRICTED = TenantLimits()
"""Limits of requests without a tenant."""
