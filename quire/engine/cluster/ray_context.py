"""Ray context: the cluster and placement group of the Ray actor in which an engine is started."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from quire.config.options import Options
from quire.engine.startup.early_start import uses_ray


def with_ray_context(options: Options) -> Options:
    """Return the options with the address and the placement group of the actor that this process
    is, if it is one, and they are not given."""
    ray: Any = sys.modules.get("ray")
    if not uses_ray(options) or ray is None or not ray.is_initialized():
        return options
    section, group = options.ray, ray.util.get_current_placement_group()
    if section.ray_address is None:
        section = replace(section, ray_address=ray.get_runtime_context().gcs_address)
    if section.ray_placement_group is None and group is not None:
        section = replace(section, ray_placement_group=group.id.hex())
    return replace(options, ray=section)
