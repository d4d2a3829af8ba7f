"""Options of ranks on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.option_field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Ranks on a Ray cluster (distributed_executor_backend=ray)."""

    ray_address: str | None = None
    """Address of the cluster, HOST:PORT. None: RAY_ADDRESS, or the cluster of this machine."""
    ray_placement_group: str | None = None
    """Id of an existing placement group (placement_group.id.hex()) with one bundle, {"GPU": 1}, for
    each rank. None: that of the Ray actor in which the engine is started, else a new one."""
    ray_bundle_indices: str | None = None
    """Bundles of the existing group for ranks 0, 1, ..., with commas. None: the first that fit."""
    ray_gpus_per_rank: float = option(1.0, above=0, high=1)
    """GPUs that a rank reserves; less than 1 where engines share GPUs."""
    ray_placement_timeout_seconds: float = option(60.0, above=0)
    """Time in which Ray must place the ranks; then the start fails, with a table of the nodes."""
    ray_env_vars_to_copy: tuple[str, ...] | None = None
    """Further environment variables that ranks on other nodes get, unless their node has its own
    value; NAME, or PREFIX*. NCCL_*, GLOO_*, UCX_*, HF_*, QUIRE_*, VLLM_* and PYTHONHASHSEED are
    copied always."""
