"""Pool of worker processes that render chat templates from requests.

One request's template blocks at most one worker, for a bounded time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.errors import EngineError
from quire.sandbox.tenant_turns import NO_TENANT, TenantShare
from quire.sandbox.worker_handle import StartWorker
from quire.sandbox.worker_pool import PoolNames, SandboxPool
from quire.text.templates.render_worker import (
    RENDER_DECODER,
    RenderJob,
    RenderMessage,
    RenderResult,
    encode_arguments,
)

MAX_WORKERS = 2
MAX_WAITING = 64
CPU_LIMIT_S = 1.0
"""Of processor time, for one conversation."""
WALL_LIMIT_S = 8.0
"""By the clock: a worker gives way to others."""
MEMORY_LIMIT = 1 << 28
"""Bytes of memory, for one conversation."""
NAMES = PoolNames(
    threads="quire-templates",
    process="process for chat templates",
    task="the chat template",
    action="rendering the chat template",
)


class TemplateRenderPool:
    """For one event loop. Without prepare() nothing is started before the first template."""

    def __init__(
        self, hire: StartWorker, *, seconds: float = CPU_LIMIT_S, memory: int = MEMORY_LIMIT
    ) -> None:
        self._seconds, self._memory = seconds, memory
        self._workers: SandboxPool[RenderMessage] = SandboxPool(
            hire,
            RENDER_DECODER,
            NAMES,
            size=MAX_WORKERS,
            max_waiting=MAX_WAITING,
            wall_limit_s=WALL_LIMIT_S,
        )
        self.prepare = self._workers.prepare
        self.close = self._workers.close

    async def render(
        self,
        source: str,
        special: Mapping[str, object],
        call: dict[str, Any],
        most: int,
        share: TenantShare = NO_TENANT,
    ) -> str:
        """The prompt. call: what ChatTemplate.render takes. most: characters.

        Raises RequestError, Overloaded, EngineError.
        """

        def make_job() -> RenderJob:
            arguments = encode_arguments(call)
            return RenderJob(source, dict(special), arguments, most, self._seconds, self._memory)

        answer = await self._workers.run(make_job, param="chat_template", share=share)
        if not isinstance(answer, RenderResult):
            kind = type(answer).__name__
            raise EngineError(f"the process that renders chat templates sent {kind}")
        return str(json.loads(answer.text))

    @property
    def idle_workers(self) -> list[int]:
        """Process ids of workers without a job."""
        return self._workers.idle_workers
