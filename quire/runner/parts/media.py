"""Media part: encodes the items that a step is the first to need, and puts rows of items in place
of the token embeddings of prompt positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import msgspec
import numpy as np
from torch import Tensor

from quire.attention.base import SpanAttentionStep
from quire.core.media.item_rows import rows_between, undivided_runs
from quire.core.scheduling.limits.media_encoder import MediaSteps
from quire.core.types import StepPlan
from quire.models.base import LanguageModel, StepInputs
from quire.runner.media.encoder_pool import EncodeItem, row_indexes
from quire.runner.media.media_rows import FIRST_ROW, find_media_rows
from quire.runner.parts.base import ChangeTensors, StepPart, StepVariant
from quire.runner.profiler import span
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import to_device


class MediaPart(StepPart, frozen=True, array_like=True):
    """New items of one step, and which of its tokens take which rows of the pool."""

    encodes: tuple[EncodeItem, ...]
    tokens: bytes  # int64 [n], indexes into the step's T tokens
    rows: bytes  # int64 [n]
    spans: bytes  # int32 [T, 2], as attention reads them; b"": each token attends to those before

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> MediaPart | None:
        """Copy from the plan; None if no token takes a row."""
        found = next((part for part in plan.parts if isinstance(part, MediaSteps)), None)
        if found is None:
            return None
        encodes, pages = found.ranks[plan.rows[0].seq.dp_rank]
        tokens, rows = [], []
        spans: np.ndarray | None = None
        for at, i in enumerate(batch.rows):
            row = plan.rows[i]
            first = int(batch.q_starts[at]) - row.start
            for item in row.seq.request.media:
                for run in rows_between(item, row.start, row.start + row.count):
                    indexes = row_indexes(pages[item.digest], item.num_rows)
                    tokens.append(np.arange(run.count) + first + run.position)
                    rows.append(indexes[run.row : run.row + run.count])
            for begin, end in undivided_runs(row.seq.request):
                low, high = max(begin, row.start), min(end, row.start + row.count)
                if low < high:
                    if spans is None:
                        spans = np.zeros((len(batch.token_slots), 2), np.int32)
                    spans[first + low : first + high] = begin, end
        if not tokens:
            return None
        return cls(
            tuple(
                EncodeItem(item.modality, item.num_rows, item.tensors, own) for item, own in encodes
            ),
            np.concatenate(tokens).tobytes(),
            np.concatenate(rows).tobytes(),
            b"" if spans is None else spans.tobytes(),
        )

    def with_tensors(self, change: ChangeTensors) -> MediaPart:
        encodes = tuple([one.with_tensors(change) for one in self.encodes])
        return msgspec.structs.replace(self, encodes=encodes)

    @property
    def changes_inputs(self) -> bool:
        return bool(self.spans)

    @classmethod
    def variant(cls, model: LanguageModel) -> StepVariant | None:
        return find_media_rows(model)

    @classmethod
    def call(cls, model: LanguageModel, request: bytes) -> bytes:
        """Encode items that no step has, on the first pipeline stage."""
        found = find_media_rows(model)
        if found is not None:
            found.pool.encode(msgspec.msgpack.decode(request, type=list[EncodeItem]))
        return b""

    def write_inputs(self, model: LanguageModel, batch: StepBatch) -> None:
        """Encode new items, and put rows in place of token ids, on the first pipeline stage."""
        found = find_media_rows(model)
        if found is None:
            return
        with span("encode"):
            found.pool.encode(self.encodes)
        tokens = np.frombuffer(self.tokens, np.int64)
        batch.token_ids[tokens] = FIRST_ROW - np.frombuffer(self.rows, np.int64)

    def before_forward(
        self, model: LanguageModel, step: StepInputs, variant: StepVariant
    ) -> StepInputs:
        """Give attention the spans in which tokens attend to each other."""
        if not self.spans:
            return step
        spans = np.frombuffer(self.spans, np.int32).reshape(-1, 2).copy()
        attention = cast(SpanAttentionStep, step.attention)
        on_device = to_device(spans, step.token_ids.device)
        if window := getattr(model, "span_window", None):
            first = cast(Tensor, step.positions) - (window - 1)
            on_device[:, 0] = on_device[:, 0].maximum(first).minimum(on_device[:, 1])
        return replace(step, attention=attention.with_spans(on_device))


PART = MediaPart
