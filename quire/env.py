"""Environment variables: reads all that quire uses, typed. No other file reads os.environ.

They are for debugging, and for settings that are needed before options exist. Settings that change
results or speed in production are options. VLLM_* variables: quire.config.vllm_environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Env:
    """The values of all variables. Field docstrings are the help of `quire env`."""

    check: bool
    """QUIRE_CHECK=1: check the invariants of block pool and cache after every step."""
    log_level: str
    """QUIRE_LOGGING_LEVEL (or VLLM_LOGGING_LEVEL): DEBUG, INFO, WARNING, ERROR."""
    trace_function: bool
    """QUIRE_TRACE_FUNCTION=1 (or VLLM_TRACE_FUNCTION): write every function call to a file."""
    api_key: str | None
    """QUIRE_API_KEY (or VLLM_API_KEY): keys of the server, with commas, if --api-key gives none."""
    use_modelscope: bool
    """QUIRE_USE_MODELSCOPE (or VLLM_USE_MODELSCOPE): fetch models from ModelScope."""
    cluster_secret: str | None
    """QUIRE_CLUSTER_SECRET: what the machines of one deployment share, if --cluster-secret-file
    names no file."""
    cache_dir: Path
    """QUIRE_CACHE: where compiled kernels are kept. Default ~/.cache/quire."""
    bytecode_cache: bool
    """QUIRE_BYTECODE_CACHE=0: never keep Python bytecode in QUIRE_CACHE. Default: where torch has
    none and Python would write none (PYTHONDONTWRITEBYTECODE, read-only packages)."""
    triton_cache: Path | None
    """TRITON_CACHE_DIR: Triton's own; if set, compiled GPU kernels are kept there instead."""
    cpu_isa: str
    """QUIRE_CPU_ISA: what the C++ code is built for: native (this CPU; the default), avx512, avx2,
    sse2; with none the PyTorch references run, and PIL resizes images."""
    visible_gpus: tuple[str, ...] | None
    """CUDA_VISIBLE_DEVICES: the GPUs of this process, with commas. Unset: all."""
    num_threads: int | None
    """OMP_NUM_THREADS: CPU threads of the kernels, of a list ("4,2") the first number. Unset: every
    core this process may run on."""


QUIRE_VARIABLES = frozenset(
    {
        *("QUIRE_API_KEY", "QUIRE_BYTECODE_CACHE", "QUIRE_CACHE", "QUIRE_CHECK"),
        *("QUIRE_CLUSTER_SECRET", "QUIRE_CPU_ISA", "QUIRE_HOST_IP", "QUIRE_LOGGING_LEVEL"),
        *("QUIRE_TRACE_FUNCTION", "QUIRE_USE_MODELSCOPE"),
    }
)
"""Every variable of quire's own that is read here."""
_KUBERNETES = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""Variables that Kubernetes makes for a service, which may be called quire."""
SECRETS = ("api_key", "cluster_secret")
"""Fields that are shown without their values."""


def _flag(*names: str, default: bool = False) -> bool:
    for name in names:
        if name in os.environ:
            return os.environ[name].strip().lower() in ("1", "true", "yes", "on")
    return default


def _text(*names: str) -> str | None:
    """The value of the first variable that is set and not empty."""
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def read() -> Env:
    """Read the environment now. Called by main() and LLM(), never at import."""
    threads = (_text("OMP_NUM_THREADS") or "").partition(",")[0].strip()
    triton = _text("TRITON_CACHE_DIR")
    gpus = _text("CUDA_VISIBLE_DEVICES")
    return Env(
        check=_flag("QUIRE_CHECK"),
        log_level=(_text("QUIRE_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL") or "INFO").upper(),
        trace_function=_flag("QUIRE_TRACE_FUNCTION", "VLLM_TRACE_FUNCTION"),
        api_key=_text("QUIRE_API_KEY", "VLLM_API_KEY"),
        use_modelscope=_flag("QUIRE_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE"),
        cluster_secret=_text("QUIRE_CLUSTER_SECRET"),
        cache_dir=Path(_text("QUIRE_CACHE") or Path.home() / ".cache" / "quire"),
        bytecode_cache=_flag("QUIRE_BYTECODE_CACHE", default=True),
        triton_cache=Path(triton) if triton else None,
        cpu_isa=(_text("QUIRE_CPU_ISA") or "native").strip().lower(),
        visible_gpus=None if gpus is None else tuple(gpus.split(",")),
        num_threads=int(threads) if threads.isdigit() else None,
    )


def vllm_variables() -> Mapping[str, str]:
    """The VLLM_* variables that are set."""
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}


def unknown_quire_variables() -> Mapping[str, str]:
    """The QUIRE_* variables that are set and that nothing reads."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("QUIRE_") and name not in QUIRE_VARIABLES
        if not _KUBERNETES.fullmatch(name)
    }


def client_api_key() -> str | None:
    """OPENAI_API_KEY: the key that client commands send if none is given."""
    return _text("OPENAI_API_KEY")


def describe() -> list[tuple[str, str]]:
    """(field, current value) of every variable, for `quire env`."""
    now = read()
    found = [(f.name, getattr(now, f.name)) for f in fields(Env)]
    return [(name, "(set)" if name in SECRETS and v else str(v)) for name, v in found]


def child_environment(**changes: str) -> dict[str, str]:
    """The environment of a child process: this one's, with changes."""
    return {**os.environ, **changes}


COLLECTIVE_VARIABLES = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Variables of each rank: NVLink multicast stays off, and threads of torch do not look for signals
in the file in which ranks met: it is gone, and a group is destroyed only when they have looked."""
WATCHED_RANK_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Variables of each rank that an engine watches: torch does not end the program of an engine whose
rank was lost."""
NETWORK_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables that name the network interface of collectives."""


def rank_environment(threads: int, interface: str | None = None) -> dict[str, str]:
    """The environment of a rank's process, with so many CPU threads. It lacks the cluster secret.

    interface: of the network, for collectives of several machines, if none is set.
    """
    networks = {} if interface is None else dict.fromkeys(NETWORK_VARIABLES, interface)
    found = {
        **networks,
        **child_environment(
            OMP_NUM_THREADS=str(threads), **COLLECTIVE_VARIABLES, **WATCHED_RANK_VARIABLES
        ),
    }
    found.pop("QUIRE_CLUSTER_SECRET", None)
    return found


def replace_environment(variables: Mapping[str, str]) -> None:
    """Give this process, which started before its environment was known, these variables alone."""
    os.environ.clear()
    os.environ.update(variables)


def set_collective_variables(interface: str | None = None, *, watched: bool) -> None:
    """Set the variables of ranks in this process, before torch.distributed reads them.

    interface: as for rank_environment(). watched: by an engine, which finds lost ranks.
    """
    os.environ.update(COLLECTIVE_VARIABLES)
    if watched:
        os.environ.update(WATCHED_RANK_VARIABLES)
    if interface is not None:
        for name in NETWORK_VARIABLES:
            os.environ.setdefault(name, interface)


COPIED_VARIABLES = ("NCCL_*", "GLOO_*", "UCX_*", "HF_*", "HUGGING_FACE_*", "QUIRE_*", "VLLM_*")
"""Variables that ranks on other nodes get as defaults."""
OWN_VARIABLES = ("*_HOST_IP", "*_PORT", "*_API_KEY", "*_SECRET", "*_CACHE", "*_CACHE_ROOT")
"""Those of them that each node sets for itself, and secrets that ranks do not need."""


def copied_variables(more: Iterable[str] = ()) -> dict[str, str]:
    """The variables for ranks on other nodes. more: further names, or PREFIX*."""
    wanted = (*COPIED_VARIABLES, "PYTHONHASHSEED", *more)
    return {
        name: value
        for name, value in os.environ.items()
        if _matches(name, more) or (_matches(name, wanted) and not _matches(name, OWN_VARIABLES))
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, one) for one in patterns)


def set_node_variables(variables: Mapping[str, str], gpus: Sequence[str]) -> list[str]:
    """Set the variables that this process does not have, and its GPUs (none: as they are).

    Returns the names of which this process keeps another value.
    """
    kept = [name for name in variables if os.environ.get(name, variables[name]) != variables[name]]
    os.environ.update({**variables, **os.environ})
    if gpus:
        set_visible_gpus(gpus)
    return kept


def set_visible_gpus(gpus: Sequence[str]) -> None:
    """Set the GPUs of this process, before it has opened the CUDA driver."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def disable_ray_usage_statistics() -> None:
    """Turn them off in this process, before it imports Ray."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def host_address() -> str | None:
    """QUIRE_HOST_IP (or VLLM_HOST_IP): the address at which other machines reach this one."""
    return _text("QUIRE_HOST_IP", "VLLM_HOST_IP")


def network_variables() -> dict[str, str]:
    """The variables that choose the network interfaces of collectives, if they are set."""
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def launcher_rank() -> tuple[int, int, int] | None:
    """RANK, LOCAL_RANK and WORLD_SIZE, as torchrun sets them; None: they are not set."""
    found = [_text(name) or "" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    if not all(one.isdigit() for one in found):
        return None
    rank, local, size = map(int, found)
    return rank, local, size


def sandbox_environment() -> dict[str, str]:
    """The environment of a child that handles untrusted input: what Python needs, no secrets."""
    kept = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "PATH", "VIRTUAL_ENV", "SYSTEMROOT")
    return {name: value for name, value in os.environ.items() if name.startswith(kept)}
