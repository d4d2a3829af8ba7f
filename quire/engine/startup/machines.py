"""Machines of an engine: those that join it, or those on which Ray has placed ranks."""

from __future__ import annotations

from typing import Protocol

from quire.config.engine_config import EngineConfig
from quire.config.options import Options
from quire.engine.cluster.ray_nodes import place_ranks
from quire.engine.startup.early_start import uses_ray
from quire.engine.startup.head_setup import JoiningMachines, JoinPort
from quire.executors.node_head import NodeHead


class Machines(Protocol):
    """The machines of an engine, while it starts and lives."""

    options: Options
    """With their number."""

    def gather(self, config: EngineConfig) -> NodeHead | None:
        """Wait for the others; None: there are none. Raises ConfigError.

        The caller must close what is returned.
        """
        ...

    def close(self) -> None:
        """Free what they hold. Harmless when called again."""
        ...


def find_machines(options: Options, port: JoinPort | None) -> Machines:
    """Return the machines that the options mean. Ray has placed them when this returns.

    port: where others join; None: this process listens, if there are any.
    Raises ConfigError.
    """
    return place_ranks(options) if uses_ray(options) else JoiningMachines(options, port)
