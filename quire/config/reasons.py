"""Why a setting is what it is. resolve() collects one reason for each choice it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config.config import Why


@dataclass
class Reasons:
    """Collects the Whys of one resolve()."""

    found: list[Why]

    def add(self, field: str, value: Any, reason: str) -> Any:
        """Note a choice; returns the value."""
        self.found.append(Why(field, value, reason))
        return value
