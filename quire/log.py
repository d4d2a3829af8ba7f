"""Logging set-up, called by main() or LLM(), never at import. Modules use logging.getLogger."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"


def setup(level: str = "INFO") -> None:
    """Send quire's records to stderr at `level`. Leaves the root logger and a user's set-up be."""
    logger = logging.getLogger("quire")
    logger.setLevel(level)
    if logger.handlers or logging.getLogger().handlers:
        return  # the user has configured logging: their word counts
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%m-%d %H:%M:%S"))
    logger.addHandler(handler)
