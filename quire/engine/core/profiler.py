"""Torch profile: traces the process for chrome://tracing or Perfetto."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROFILE_FOLDER = "quire_profile"


@dataclass(frozen=True, slots=True)
class TorchProfile:
    """A running profile. stop() ends it."""

    profiler: Any
    path: Path

    @classmethod
    def start(cls, prefix: str | None, settings: Mapping[str, Any]) -> TorchProfile:
        """Start a profile. `settings` are passed to torch.profiler.profile."""
        import torch

        name = f"{prefix or 'trace'}-{os.getpid()}-{time.time_ns()}.json"
        profiler = torch.profiler.profile(**settings)
        profiler.start()
        return cls(profiler, Path(PROFILE_FOLDER) / name)

    def stop(self) -> Path:
        """End the profile and write its trace. Returns the path."""
        self.profiler.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(self.path))
        return self.path
