"""Processes: the state of one, as the kernel reports it."""

from __future__ import annotations

from pathlib import Path


def process_state(pid: int) -> str | None:
    """The kernel's letter for a process's state: T stopped, t traced, X gone; None: unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X" if Path("/proc/self/stat").exists() else None
    except OSError:
        return None
    return text.rpartition(")")[2].split()[0]
