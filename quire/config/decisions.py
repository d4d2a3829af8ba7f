"""Decision log: records the reason for each choice that resolve() makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config.engine_config import Decision


@dataclass
class DecisionLog:
    """Collects the decisions of one resolve()."""

    decisions: list[Decision]

    def record(self, field: str, value: Any, reason: str) -> Any:
        """Record a choice and return its value."""
        self.decisions.append(Decision(field, value, reason))
        return value
