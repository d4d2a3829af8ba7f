"""Images, videos and recordings of Qwen3-Omni's thinker: as qwen3_omni_moe's."""

from __future__ import annotations

from quire.media.processors import qwen3_omni_moe

Processor = qwen3_omni_moe.Processor
