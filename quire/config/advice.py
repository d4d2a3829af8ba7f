"""Advice about parallelism: what several devices gain for a model, and what would gain more.

Pure. Times are of a GPU of about 3 TB/s whose peers are connected by NVLink, fitted to decode steps
of one row of models of 0.6 and 8 billion parameters. They compare ways, and predict no figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quire.config.facts import ITEMSIZE, ModelFacts
from quire.config.memory.memory_plan import EngineShape, MemoryPlan, plan_memory
from quire.errors import ConfigError

BYTES_PER_S = 2.7e12
"""Weights that a step reads in a second."""
LAYER_S, SHARDED_LAYER_S = 21e-6, 27e-6
"""Seconds of a layer beside its bytes: on one rank, and with the sums of several."""
WORTH = 1.2
"""Of tensor parallelism: it answers one request faster by this factor."""
SIZES = (1, 2, 4, 8, 16, 32, 64)


def advise(model: ModelFacts, plan: MemoryPlan, engines: int = 1) -> list[str]:
    """Return lines for a person. engines: independent ones, with the whole model each."""
    shape = plan.shape
    if shape.device == "cpu":
        return []
    lines = list(_advise_size(model, plan))
    if shape.tensor > 1:
        lines += _advise_tensor(model, plan, fits_one=_fits(model, plan, 1))
    if shape.stages > 1 and _fits(model, plan, 1):
        lines.append(
            "the model fits one device: pipeline stages answer no request faster; "
            f"data_parallel_size={shape.stages} serves more of them"
        )
    if engines > 1 and not _fits(model, plan, shape.tensor * shape.stages):
        lines.append(f"each of the {engines} engines needs the whole model on its own devices")
    return lines


def _advise_size(model: ModelFacts, plan: MemoryPlan) -> Iterator[str]:
    """Name the number of devices on which a model fits that does not fit these."""
    ranks = plan.shape.tensor * plan.shape.stages
    if plan.max_fitting_len >= plan.shape.max_model_len:
        return
    more = next((n for n in SIZES if n > ranks and _fits(model, plan, n)), None)
    if more is not None:
        length = plan.shape.max_model_len
        yield (
            f"a sequence of max_model_len={length} fits {more} such devices: "
            f"tensor_parallel_size={more}"
        )


def _advise_tensor(model: ModelFacts, plan: MemoryPlan, *, fits_one: bool) -> Iterator[str]:
    tensor = plan.shape.tensor
    ratio = decode_s(model, plan.shape, 1) / decode_s(model, plan.shape, tensor)
    if fits_one and ratio < WORTH:
        yield (
            f"tensor_parallel_size={tensor} answers one request about {ratio:.1f} times as fast as "
            f"one device: the model is small. data_parallel_size={tensor} has about {tensor} times "
            "the tokens per second of one"
        )
    elif fits_one:
        yield (
            f"the model fits one device. tensor_parallel_size={tensor} answers one request about "
            f"{ratio:.1f} times as fast; data_parallel_size={tensor} has more tokens per second"
        )
    heads = max((layer.kv_heads for layer in model.layers), default=tensor)
    spread = plan.shape.context
    copies = tensor // heads // spread
    if copies > 1:
        kind = "latent attention has one" if model.layers[0].latent else f"the model has {heads}"
        yield (
            f"each token's keys and values are cached on {copies} of the {tensor} ranks ({kind} KV "
            f"head{'s' * (heads > 1)}); decode_context_parallel_size={copies * spread} caches them "
            "once, for more or longer contexts, and pipeline_parallel_size divides them too"
        )


def decode_s(model: ModelFacts, shape: EngineShape, tensor: int) -> float:
    """Return the seconds of a decode step of one row, on so many ranks that share each layer."""
    one = replace(shape, tensor=1, context=1, stage_layers=(), stage=0, data=1)
    size = plan_memory(model, one, device_bytes=0, allowed_bytes=0).weight_bytes
    size -= model.vocab * model.embedding * ITEMSIZE[shape.dtype]  # a row of it is read
    if model.experts:
        bank = 3 * model.hidden * model.expert_mlp * ITEMSIZE[shape.dtype] * len(model.layers)
        size -= min(bank * (model.experts - model.top_k), size * 9 // 10)
    depth = max(1, len(model.layers))
    return max(size, 0) / tensor / BYTES_PER_S + depth * (
        LAYER_S if tensor == 1 else SHARDED_LAYER_S
    )


def _fits(model: ModelFacts, plan: MemoryPlan, tensor: int) -> bool:
    """Whether so many tensor-parallel ranks have the memory for one sequence of max_model_len."""
    shape = replace(plan.shape, tensor=tensor, context=1, stage_layers=(), stage=0, data=1)
    try:
        found = plan_memory(
            model, shape, device_bytes=plan.device_bytes, allowed_bytes=plan.allowed_bytes
        )
    except ConfigError:  # its heads cannot be divided so
        return False
    return found.max_fitting_len >= shape.max_model_len
