"""Engine link: what a head and the nodes of its engines must agree on, before weights are read.

A node joins with its versions and options. Where they differ from the head's, the node is refused
with the first difference. What was resolved from them is compared when its engines are ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from quire.config.data_parallel import NODE_OPTIONS
from quire.config.engine_config import EngineConfig
from quire.config.options import Options, option_specs
from quire.distributed.cluster_secret import ClusterSecret
from quire.engine.client.zmq_transport import configure_tcp
from quire.engine.messages import PROTOCOL_VERSION
from quire.engine.startup.plain_config import to_plain
from quire.executors.node_messages import first_difference, node_versions

BEAT_INTERVAL_S = 0.5
OWN_OPTIONS = frozenset(
    (
        *NODE_OPTIONS,
        *("cluster_secret_file", "model", "tokenizer", "hf_config_path", "download_dir"),
        *("hf_token", "device"),
    )
)
"""Options that each node has for itself: what they resolve to is compared."""
OWN_SECTIONS = frozenset(("observe", "recovery", "health"))
OWN_CONFIG = (
    *("cache.num_blocks", "cache.num_host_blocks", "parallel.engines", "model.name"),
    *("model.tokenizer", "device.", "load.", "observe.", "health.", "recovery."),
)
"""Beginnings of what may differ in the configs of two nodes."""


def engine_versions() -> dict[str, str]:
    """Return what all nodes must have the same of."""
    return {**node_versions(), "protocol of engines": str(PROTOCOL_VERSION)}


def shared_options(options: Options) -> dict[str, Any]:
    """Return the options that all nodes must have the same of, as plain data."""
    specs = option_specs()
    shared = {
        name: value
        for name, value in options.non_default().items()
        if name not in OWN_OPTIONS and specs[name].section not in OWN_SECTIONS
    }
    plain: dict[str, Any] = msgspec.to_builtins(shared, enc_hook=to_plain)
    return plain


def difference(node: dict[str, Any], head: dict[str, Any]) -> str | None:
    """Name the first key with another value on a node than on the head."""
    return first_difference("the node", head, node, "")


def config_difference(node: EngineConfig, head: EngineConfig) -> str | None:
    """Name the first difference between two configs, but for what may differ."""
    theirs, own = (dict(_flat(msgspec.to_builtins(one, enc_hook=to_plain))) for one in (node, head))
    return difference(theirs, own)


def _flat(plain: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(plain, dict):
        for name, value in plain.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    elif path == "device.kind" or not path.startswith(OWN_CONFIG):
        yield path, plain


def configure_link(
    socket: zmq.Socket[bytes], address: str, secret: ClusterSecret | None, *, server: bool
) -> None:
    """Set options of one end of a link, before it is bound or connected."""
    configure_tcp(socket, address)
    socket.setsockopt(zmq.LINGER, 1000)
    if secret is not None:
        (secret.secure_server if server else secret.secure_client)(socket)
