"""Engine processes of AsyncLLM and LLM: connections to them, and what LLM needs of several."""

from __future__ import annotations

import itertools

from quire.config.engine_config import EngineConfig
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_pool import EnginePool
from quire.engine.client.zmq_transport import EngineEvents, ZmqTransport
from quire.engine.supervise.engine_group_thread import EngineGroupThread


class PoolConnector:
    """Makes a new pool of connections to the engines each time it is called."""

    def __init__(self, engines: EngineGroupThread, config: EngineConfig) -> None:
        self._engines, self._config = engines, config
        self._numbers = itertools.count()

    def __call__(self) -> EnginePool:
        name, config = f"llm-{next(self._numbers)}", self._config
        events = EngineEvents(self._engines.pipe)
        clients = []
        for index, folder in enumerate(self._engines.folders):
            client = EngineClient(ZmqTransport(folder, name, events, index))
            client.restart_wait_s = config.recovery.wait_s
            clients.append(client)
        return EnginePool(clients, cache_tokens=config.cache.num_blocks * config.cache.block_size)
