"""Why a setting is what it is. resolve() collects one reason for each choice it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config.engine_config import Decision


@dataclass
class DecisionLog:
    """Collects the Whys of one resolve()."""

    decisions: list[Decision]

    def record(self, field: str, value: Any, reason: str) -> Any:
        """Note a choice; returns the value."""
        self.decisions.append(Decision(field, value, reason))
        return value
