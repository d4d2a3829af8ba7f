"""Images and videos of Qwen3.5 with experts."""

from __future__ import annotations

from quire.media.processors import qwen3_5

Processor = qwen3_5.Processor
