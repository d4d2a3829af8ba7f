"""Images and videos of Qwen3-VL-MoE: as Qwen3-VL's."""

from __future__ import annotations

from quire.media.processors import qwen3_vl

Processor = qwen3_vl.Processor
