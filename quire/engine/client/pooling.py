"""Pooling requests of one call: all run to their ends, and the results come in order."""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.types import Request, Update
from quire.engine.client.engine_pool import EnginePool
from quire.errors import RequestError


async def pool(
    client: EnginePool, requests: Iterable[Request], rank: int | None = None
) -> list[Update]:
    """Run pooling requests to their ends; return the last update of each, in order.

    If one fails, the others are aborted. Raises its error, and what EnginePool.generate() raises.
    rank: of the engine that runs them; None: any.
    """
    stream = await client.generate(requests, rank)
    found: dict[str, Update] = {}
    try:
        async for updates in stream:
            for update in updates:
                if update.error is not None:
                    raise update.to_exception()
                if update.pooled is None:
                    raise RequestError("the request was aborted")
                found[update.request_id] = update
    finally:
        stream.close()
    return [found[name] for name in stream.request_ids]
