"""Images and videos of Qwen3.5: those of Qwen3-VL, and a row of the encoder for each cell alone."""

from __future__ import annotations

from typing import ClassVar

from quire.media.processors import qwen3_vl


class Processor(qwen3_vl.Processor):
    default_levels: ClassVar[tuple[int, ...]] = ()
