"""What one tenant may have of an engine. It travels with requests: the engine keeps no list.

A tenant is whoever shares a name in the key file (quire.server.auth.api_keys). The terms of its
latest
request are in force; None is no limit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Of one tenant. Of the defaults all is free."""

    weight: float = 1.0  # of two that wait, who has twice the weight gets twice the service
    max_requests: int | None = None  # here at a time, running and waiting
    tokens_per_minute: int | None = None  # of prompts and answers together
    max_queued_tokens: int | None = None  # of prompts that are not computed yet
    kv_share: float | None = None  # of the KV cache's blocks; who holds more is let in no further


UNRESTRICTED = TenantLimits()
"""Of who is told apart from nobody."""
