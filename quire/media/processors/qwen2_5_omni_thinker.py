"""Images, videos and recordings of Qwen2.5-Omni's thinker: as qwen2_5_omni's."""

from __future__ import annotations

from quire.media.processors import qwen2_5_omni

Processor = qwen2_5_omni.Processor
