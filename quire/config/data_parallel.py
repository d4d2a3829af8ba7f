"""Data parallelism: which engines of a model are where, by the options of this node.

alone      all engines are on this node
head       some are; the others are on nodes that join this one
node       headless: its engines join a head
external   this server is one of several, which a load balancer of the user's joins; it has one
           engine, or with hybrid balancing several
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.config.options import Options, ParallelOptions
from quire.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Ranks of engines: those that this node starts, and those that its API server uses."""

    local: range
    served: range
    address: str | None = None
    """Host of the head, if there are other nodes."""
    port: int = 0

    @property
    def remote(self) -> range:
        """Ranks of engines that other nodes start for this one: those behind its own."""
        return range(self.local.stop, self.served.stop)

    def local_options(self, options: Options) -> Options:
        """Return the options of the engines of this node."""
        default = ParallelOptions()
        given = replace(options.parallel, **{name: getattr(default, name) for name in NODE_OPTIONS})
        if not given.enable_expert_parallel:  # else these are ranks of one engine
            given = replace(given, data_parallel_size=len(self.local))
        return replace(options, parallel=given)


NODE_OPTIONS = (
    "data_parallel_size_local",
    "data_parallel_start_rank",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_backend",
    "data_parallel_rank",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "headless",
)
"""Options that say what is where; an engine has none of them."""


def engine_layout(options: Options) -> EngineLayout:
    """Return which engines this node has. Raises ConfigError."""
    given = options.parallel
    if given.data_parallel_backend == "ray":
        raise ConfigError(
            "data_parallel_backend='ray' is not supported: start `quire serve --headless` on each "
            "node, or one server in each replica of a Ray Serve deployment"
        )
    if given.enable_expert_parallel:
        check_one_server(options, "an engine with enable_expert_parallel")
        return EngineLayout(range(1), range(1))
    external = given.data_parallel_external_lb or given.data_parallel_rank is not None
    hybrid = given.data_parallel_hybrid_lb or given.data_parallel_start_rank is not None
    if external:
        return _external(given)
    if given.headless:
        return _headless(given)
    if hybrid:
        return _hybrid(given)
    count = given.num_engines
    local = count if given.data_parallel_size_local is None else given.data_parallel_size_local
    _check_count(local, 0, count)
    if local == count:
        return EngineLayout(range(count), range(count))
    address = given.data_parallel_address or DEFAULT_ADDRESS
    return EngineLayout(range(local), range(count), address, given.data_parallel_rpc_port)


def check_one_server(options: Options, what: str) -> None:
    """Raise ConfigError for options of a server on several nodes. what: the subject of its text."""
    default = ParallelOptions()
    for name in NODE_OPTIONS:
        value = getattr(options.parallel, name)
        if value != getattr(default, name):
            raise ConfigError(
                f"{name}={value!r} is for `quire serve` with engines on several nodes; {what} has "
                "all devices on this machine"
            )


def _check_count(local: int, first: int, count: int) -> None:
    if first + local > count or not local:
        raise ConfigError(
            f"data_parallel_size_local={local} engines from rank {first} on are more than "
            f"data_parallel_size={count}: all nodes need the same data_parallel_size"
        )


def _external(given: ParallelOptions) -> EngineLayout:
    rank = given.data_parallel_rank
    rank = given.data_parallel_start_rank if rank is None else rank
    if rank is None:
        raise ConfigError("data_parallel_external_lb needs data_parallel_rank: that of this server")
    if given.headless or given.data_parallel_hybrid_lb:
        raise ConfigError(
            "data_parallel_rank and data_parallel_external_lb are for a server with one engine: "
            "leave out headless and data_parallel_hybrid_lb"
        )
    if given.data_parallel_size_local not in (None, 1):
        raise ConfigError(
            f"data_parallel_size_local={given.data_parallel_size_local} with "
            "data_parallel_external_lb: a server has one engine; use data_parallel_hybrid_lb"
        )
    _check_count(1, rank, given.data_parallel_size)
    return EngineLayout(range(rank, rank + 1), range(rank, rank + 1))


def _hybrid(given: ParallelOptions) -> EngineLayout:
    first, local = given.data_parallel_start_rank or 0, given.data_parallel_size_local
    if local is None:
        raise ConfigError(
            "data_parallel_hybrid_lb (or data_parallel_start_rank without headless) needs "
            "data_parallel_size_local: the number of engines of this server"
        )
    _check_count(local, first, given.data_parallel_size)
    return EngineLayout(range(first, first + local), range(first, first + local))


def _headless(given: ParallelOptions) -> EngineLayout:
    if given.data_parallel_hybrid_lb:
        raise ConfigError(
            "headless cannot be combined with data_parallel_hybrid_lb, where each node has an API "
            "server"
        )
    first = given.data_parallel_start_rank
    if given.data_parallel_address is None or not first:
        raise ConfigError(
            "headless needs data_parallel_address, that of the head, and data_parallel_start_rank, "
            "the rank of the first engine of this node, from 1 on"
        )
    local = given.data_parallel_size_local or given.data_parallel_size - first
    _check_count(local, first, given.data_parallel_size)
    return EngineLayout(
        range(first, first + local),
        range(0),
        given.data_parallel_address,
        given.data_parallel_rpc_port,
    )
