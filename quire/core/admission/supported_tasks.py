"""Supported tasks: refuse requests for results that the engine's model does not compute."""

from __future__ import annotations

from collections.abc import Collection

from quire.config.engine_config import PoolingTask
from quire.core.scheduling.limits.base import Admission
from quire.core.types import ALIGN, Request
from quire.errors import RequestError, Unsupported

ALIGNS = (
    "times of words need a model that reads recordings, on one rank, and a KV cache of more than "
    "8 bits"
)


class SupportedTasks(Admission):
    """generates: requests may be for tokens. tasks: of pooling requests; (): there may be none.
    media: prompts may have images, video or audio. aligns: tokens find their positions in a
    source."""

    def __init__(
        self,
        *,
        generates: bool,
        tasks: Collection[PoolingTask],
        media: bool = False,
        aligns: bool = False,
    ) -> None:
        assert generates or tasks, "a model does something"
        self._generates = generates
        self._tasks = tasks
        self._media = media
        self._aligns = aligns

    def check_request(self, request: Request) -> None:
        if request.media and not self._media:
            modality = request.media[0].modality
            message = f"this engine reads text only; the prompt has {modality}"
            raise Unsupported(message, param=modality)
        pooling = request.pooling
        if pooling is None:
            if not self._generates:
                tasks = ", ".join(self._tasks)
                raise Unsupported(
                    f"this model generates no tokens; its tasks are {tasks}. Generation needs a "
                    "model with a language model head, started with runner generate"
                )
            return
        if pooling.task == ALIGN:
            if not self._aligns:
                raise Unsupported(ALIGNS, param="timestamp_granularities")
            return
        if not self._tasks:
            raise Unsupported(
                "this engine generates tokens only; embeddings, scores and rewards need "
                "--runner pooling, with --convert embed or classify for a generating model",
                param="task",
            )
        if pooling.task not in self._tasks:
            raise Unsupported(
                f"task {pooling.task!r} is not one of this model's: {', '.join(self._tasks)}",
                param="task",
            )
        if request.n > 1:
            raise RequestError(f"a pooling request has one result, got n={request.n}", param="n")
