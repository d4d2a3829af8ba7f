"""The device half of an engine: KV tensors, attention backend, sampler and runner around a model.

Not here: which device, how much memory (quire.engine.build decides, and is the only caller).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from quire.attention.base import Backend
from quire.attention.select import Needs, backends, select
from quire.config.config import EngineConfig
from quire.executors.base import Executor
from quire.executors.inline import Executor as Inline
from quire.models.base import LanguageModel
from quire.runner.graphs import Graphs
from quire.runner.memory import kv_tensors
from quire.runner.runner import Runner
from quire.runner.slots import Slots
from quire.sampling.processors import LogitsProcessor
from quire.sampling.sampler import Sampler

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_half(
    model: LanguageModel, config: EngineConfig, processors: Sequence[LogitsProcessor] = ()
) -> Executor:
    """KV tensors, attention backend, sampler and runner around a model."""
    cache, scheduler = config.cache, config.scheduler
    dtype = DTYPES[cache.dtype]
    tensors, host = (
        kv_tensors(
            cache.layers,
            cache.groups,
            num_blocks=num_blocks,
            block_size=cache.block_size,
            dtype=dtype,
        )
        for num_blocks in (cache.num_blocks, cache.num_host_blocks)
    )
    backend = _backend(config, tensors)
    width = -(-scheduler.max_model_len // cache.block_size)
    runner = Runner(
        model,
        backend,
        Sampler(
            config.model.vocab,
            scheduler.max_num_seqs,
            torch.device("cpu"),
            logprobs_mode=config.model.logprobs_mode,
            processors=processors,
        ),
        Slots(
            scheduler.max_num_seqs,
            width,
            len(cache.groups),
        ),
        cache=tensors,
        host_cache=host,
        block_size=cache.block_size,
        logprobs_mode=config.model.logprobs_mode,
        graphs=Graphs(
            model,
            backend,
            max_rows=scheduler.max_num_seqs,
            width=width,
            groups=len(cache.groups),
        )
        if not config.device.enforce_eager
        else None,
    )
    return Inline(runner, overlap=scheduler.steps_in_flight > 1)


def _backend(config: EngineConfig, tensors: list[torch.Tensor]) -> Backend:
    layers = config.cache.layers
    wanted = config.device.attention_backend
    needs = Needs(
        device=config.device.kind,
        dtype=DTYPES[config.model.dtype],
        head_dim=max(layer.head_dim for layer in layers),
        window=any(layer.window for layer in layers),
    )
    choice = select(None if wanted == "auto" else wanted, needs)
    log.debug("attention backend: %s", "; ".join(choice.reasons))
    made: Backend = backends().load(choice.name).Backend(tensors)
    return made
