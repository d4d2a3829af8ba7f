"""quire plan MODEL: prints the memory a model needs. Reads config.json and tensor headers.

The engine sizes its cache with the same numbers, and `quire explain` shows them too. --gpu-memory
plans for a GPU of this size, and needs none. Exit status 1: the model does not fit.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quire import env
from quire.cli import in_flags
from quire.config.adapters import is_on
from quire.config.advice import advise
from quire.config.architectures import check_served
from quire.config.command_line.option_parser import OptionParser, add_options, options_from
from quire.config.decisions import DecisionLog
from quire.config.engine_config import SpeculationSection
from quire.config.facts import (
    DeviceFacts,
    ModelFacts,
    count_weights_in_headers,
    read_hf_config,
    read_model_facts,
)
from quire.config.memory.memory_plan import (
    MemoryPlan,
    drafter_bytes,
    gib,
    plan_memory,
    require_memory,
)
from quire.config.memory.state_layout import state_rows
from quire.config.memory.weight_facts import WeightFacts
from quire.config.model_identity import media_family
from quire.config.options import Options
from quire.config.pooling import ModelUse, choose_model_use
from quire.config.pooling_facts import read_pooling_facts
from quire.config.quant.gguf import with_stored_types
from quire.config.resolve import resolve_memory_plan
from quire.config.speculation import find_drafter, resolve_speculation, with_verifier
from quire.config.vllm_environment import apply_environment
from quire.engine.startup.device_facts import device_facts
from quire.errors import NoRoom, WeightError
from quire.platform import cuda
from quire.weights.files import TensorHeader, read_headers, resolve_model_folder

log = logging.getLogger(__name__)

WHOLE_PROMPTS = "prompts are computed whole, and nothing is cached"


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    options = apply_environment(options_from(args))
    options = with_verifier(options, _folder(options, options.model.model))
    model, source = model_facts(options)
    plan = build_plan(options, model, server=not args.offline)
    engines = 1 if plan.shape.data > 1 else options.parallel.data_parallel_size
    ranks, advice = plan_ranks(options, plan, model), advise(model, plan, engines)
    drafts = plan_drafts(options, plan, model)
    try:
        require_memory(plan)
        problem = None
    except NoRoom as error:
        problem = in_flags(str(error))
    name = options.model.model
    if args.json:
        found = as_json(name, plan, ranks, source, problem)
        found |= {"data_parallel_size": engines * plan.shape.data, "advice": advice}
        found["speculation"] = {"method": drafts.method, "max_drafts": drafts.max_drafts}
        found["devices"] = engines * plan.shape.ranks
        print(json.dumps(found, indent=2))
    else:
        print_plan(name, plan, ranks, source)
        if drafts.method != "none":
            print(f"drafts by {drafts.method}, at most {drafts.max_drafts} of a row in a step")
            print_drafter(plan, model)
        if engines > 1:
            print(f"{engines} engines need {engines * plan.shape.ranks} devices")
        for line in advice:
            print(in_flags(line))
        if problem is not None:
            print(problem, file=sys.stderr)
    return 1 if problem else 0


def _parser() -> OptionParser:
    parser = OptionParser(prog="quire plan", usage="%(prog)s MODEL [options]", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model_tag", metavar="MODEL", help="folder or hub name")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--offline", action="store_true", help="plan for LLM(), not for a server")
    add_options(parser)
    return parser


def print_drafter(plan: MemoryPlan, model: ModelFacts) -> None:
    """Print what a drafter with weights takes of the memory."""
    memory = None if model.drafter is None else model.drafter.memory
    if memory is None:
        return
    weights, step = drafter_bytes(memory, plan.shape)
    layers = f"{len(memory.layers)} of the layers with KV" if memory.layers else "no KV"
    print(f"  of the memory its weights take {gib(weights)}, a step {gib(step)}; it has {layers}")


def plan_drafts(options: Options, plan: MemoryPlan, model: ModelFacts) -> SpeculationSection:
    """Return how drafts are made. Raises ConfigError."""
    use = choose_model_use(options.pooling, model.pooling, options.model.model)
    return resolve_speculation(
        options.speculation, model, plan.shape, DecisionLog([]), generates=use.runner != "pooling"
    )


class RankPlan(NamedTuple):
    """What differs between the ranks of an engine, in bytes."""

    rank: int
    stage: int
    weight_bytes: int
    state_bytes: int  # of those
    block_bytes: int
    token_bytes: int


def build_plan(options: Options, model: ModelFacts, *, server: bool = True) -> MemoryPlan:
    """Return the plan of the rank with the least memory left."""
    device, why = planned_device(options), DecisionLog([])
    return resolve_memory_plan(options, model, device, server=server, why=why)


def plan_ranks(options: Options, plan: MemoryPlan, model: ModelFacts) -> list[RankPlan]:
    """Return the sizes of each rank: counted for several ranks of plain weights, else by the plan's
    arithmetic."""
    shape, weights, found = plan.shape, None, []
    if shape.ranks > 1:  # which imports torch, unlike all else here
        from quire.engine.startup.rank_sizes import count_rank_weights

        hf, folder, use = _read_config(options)
        weights = count_rank_weights(options, shape, hf, folder, use.head, len(use.labels))
    beside = model.rotary * shape.max_model_len * 4 + model.pooling.dense_bytes
    for rank in range(shape.ranks):
        stage = rank // shape.tensor % shape.stages
        own = plan_memory(model, replace(shape, stage=stage), device_bytes=0, allowed_bytes=0)
        size = own.weight_bytes
        if weights is not None:
            size = weights[rank] + beside + own.adapter_bytes + own.encoder_cache_bytes
            size += own.state_bytes
        sizes = own.state_bytes, own.block_bytes, own.token_bytes
        found.append(RankPlan(rank, stage, size, *sizes))
    return found


def planned_device(options: Options) -> DeviceFacts:
    """Return GPUs of gpu_memory if given, as many as there are ranks; else this machine."""
    size = options.cache.gpu_memory
    if size is None or options.device.device == "cpu":
        return device_facts(options, env.read())
    section = options.parallel
    count = section.tensor_parallel_size * section.pipeline_parallel_size
    count *= section.data_parallel_size
    return DeviceFacts(kind=cuda.name, total_bytes=size, free_bytes=size, count=count)


def _read_config(options: Options) -> tuple[dict[str, Any], Path, ModelUse]:
    """Return the parsed config.json, its folder, and what the model is used for."""
    section = options.model
    folder = _folder(options, section.model)
    config_folder = _folder(options, section.hf_config_path or section.model)
    hf = read_hf_config(config_folder, section.hf_overrides, section.config_format)
    if config_folder != folder:
        hf = with_stored_types(hf, folder)
    pooling = read_pooling_facts(folder, hf, generates=options.pooling.wants_text)
    return hf, config_folder, choose_model_use(options.pooling, pooling, section.model)


def model_facts(options: Options) -> tuple[ModelFacts, str]:
    """Return facts from the small files, and the source of the weight sizes."""
    model_options = options.model
    folder = _folder(options, model_options.model)
    hf, config_folder, use = _read_config(options)
    check_served(hf["model_type"])
    pooling = read_pooling_facts(folder, hf, generates=options.pooling.wants_text)
    weights, source = weight_facts(options, folder, hf, head=use.has_logits)
    facts = read_model_facts(
        folder,
        hf=hf,
        name=model_options.model,
        overrides=model_options.hf_overrides,
        generation_config=model_options.generation_config,
        weights=weights,
        pooling=pooling,
    )
    if is_on(options.lora):  # which imports torch, unlike all else here
        from quire.engine.startup.adapter_numbers import plan_adapter_numbers

        numbers = plan_adapter_numbers(options, hf, config_folder, use.head, len(use.labels))
        facts = replace(facts, adapters=numbers)
    if media_family(hf) is not None:  # so too
        from quire.engine.startup.encoder_facts import with_media_encoder

        facts = with_media_encoder(facts, options, hf, config_folder)
    drafter = find_drafter(
        options.speculation, partial(_find, options), name=model_options.model, hf=hf
    )
    if drafter is not None:  # so too
        from quire.engine.startup.drafter_setup import plan_drafter

        drafter = plan_drafter(options, drafter, hf, config_folder)
    return replace(facts, drafter=drafter), source


def _folder(options: Options, name: str) -> Path:
    return _find(options, name, options.model.revision)


def _find(options: Options, name: str, revision: str | None) -> Path:
    return resolve_model_folder(
        name,
        revision=revision,
        token=options.model.hf_token,
        download_dir=options.load.download_dir,
        env=env.read(),
        want="config",
    )


def weight_facts(
    options: Options, folder: Path, hf: Mapping[str, Any], *, head: bool = True
) -> tuple[WeightFacts | None, str]:
    """Count from the headers of local files, else of the hub's; None: only config.json is left.

    head: whether the output head is loaded.
    """
    if options.load.load_format in ("dummy", "pt"):
        return None, "config.json (estimated)"
    try:
        headers = read_headers(folder, options.load.load_format)
        return count_weights_in_headers(headers, hf, head=head), "tensor headers"
    except WeightError as error:
        log.debug("no tensor headers in %s: %s", folder, error)
    if not Path(options.model.model).exists():
        found = _hub_headers(options)
        if found:
            return count_weights_in_headers(found, hf, head=head), "tensor headers on the hub"
    return None, "config.json (estimated)"


def _hub_headers(options: Options) -> Mapping[str, TensorHeader]:
    """Fetch shapes by ranged requests of a few kilobytes. Empty if the hub does not answer."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE or env.read().use_modelscope:
        return {}
    try:
        found = HfApi(token=options.model.hf_token).get_safetensors_metadata(
            options.model.model, revision=options.model.revision
        )
    except (OSError, ValueError, errors.HfHubHTTPError, errors.SafetensorsParsingError) as error:
        log.warning("the hub gave no tensor headers (%s); estimating from config.json", error)
        return {}
    except errors.NotASafetensorsRepoError:
        return {}
    return {
        name: TensorHeader(tensor.dtype, tuple(tensor.shape), Path(file_name))
        for file_name, file in found.files_metadata.items()
        for name, tensor in file.tensors.items()
    }


def format_rows(plan: MemoryPlan, source: str) -> list[tuple[str, str]]:
    """Format the table, per rank."""
    shape = plan.shape
    fixed = [
        ("memory allowed", gib(plan.allowed_bytes)),
        ("weights", f"{gib(plan.weight_bytes)}, {plan.weight_bits:.2f} bits per weight ({source})"),
        *([("adapters, of those", gib(plan.adapter_bytes))] if plan.adapter_bytes else []),
        *(
            [("encoder cache, of those", _encoder_cache_row(plan))]
            if plan.encoder_cache_bytes
            else []
        ),
        *([("recurrent states, of those", _states_row(plan))] if plan.states else []),
        ("activations", f"{gib(plan.activation_bytes)} ({shape.max_num_batched_tokens} tokens)"),
        *([("context, libraries", gib(plan.overhead_bytes))] if plan.overhead_bytes else []),
    ]
    if not plan.groups:
        return [
            ("dtype", shape.dtype),
            *fixed,
            ("KV memory", f"none: {'the states are all' if plan.states else WHOLE_PROMPTS}"),
            ("max_model_len", f"{shape.max_model_len} tokens"),
            ("one step", f"{plan.concurrency:.2f} sequences of max_model_len"),
        ]
    windows = sum(layer.window is not None for layer in plan.layers)
    kinds = f"{len(plan.layers)} layers" + (f", {windows} with a window" if windows else "")
    return [
        ("dtype, KV dtype", f"{shape.dtype}, {shape.cache_dtype}"),
        *fixed,
        ("KV memory", f"{gib(max(plan.kv_available_bytes, 0))} ({plan.num_blocks} blocks)"),
        ("KV per token", f"{plan.token_bytes / 1024:.1f} KiB ({kinds})"),
        *([("host memory for KV", _host_row(plan))] if plan.num_host_blocks else []),
        ("max_model_len", f"{shape.max_model_len} tokens need {gib(plan.max_len_kv_bytes)} of KV"),
        ("longest context", f"{plan.max_fitting_len} tokens"),
        ("concurrency", f"{plan.concurrency:.2f} sequences of max_model_len"),
    ]


def _encoder_cache_row(plan: MemoryPlan) -> str:
    return f"{gib(plan.encoder_cache_bytes)} ({plan.shape.encoder_cache_rows} embeddings)"


def _states_row(plan: MemoryPlan) -> str:
    shape = plan.shape
    rows = state_rows(shape.max_num_seqs, shape.state_checkpoints + shape.draft_states)
    each = gib(plan.state_bytes // rows)
    return (
        f"{gib(plan.state_bytes)} ({shape.max_num_seqs} sequences, {shape.state_checkpoints} "
        f"checkpoints, {shape.draft_states} after drafts and one for padding, of {each})"
    )


def _host_row(plan: MemoryPlan) -> str:
    free = plan.free_bytes if plan.shape.device == "cpu" else plan.host_free_bytes
    known = "" if free is None else f", {gib(free)} free"
    return f"{gib(plan.host_bytes)} ({plan.num_host_blocks} blocks){known}"


def print_plan(name: str, plan: MemoryPlan, ranks: Sequence[RankPlan], source: str) -> None:
    from rich.console import Console
    from rich.table import Table

    count = len(ranks)
    table = Table(title=f"{name}, {'one device' if count == 1 else f'each of {count} devices'}")
    table.add_column("what", style="bold")
    table.add_column("how much")
    for row in format_rows(plan, source):
        table.add_row(*row)
    for one in ranks if count > 1 else ():
        stage = f"stage {one.stage}, " if plan.shape.stages > 1 else ""
        size = f"{stage}weights {gib(one.weight_bytes)}, {one.token_bytes / 1024:.1f} KiB a token"
        table.add_row(f"rank {one.rank}", size)
    Console().print(table)


def as_json(
    name: str,
    plan: MemoryPlan,
    ranks: Sequence[RankPlan],
    source: str,
    problem: str | None,
) -> dict[str, Any]:
    shape = plan.shape
    one = {
        "allowed_bytes": plan.allowed_bytes,
        "weight_bytes": plan.weight_bytes,
        "weight_bits": round(plan.weight_bits, 4),
        "adapter_bytes": plan.adapter_bytes,
        "encoder_cache_bytes": plan.encoder_cache_bytes,
        "state_bytes": plan.state_bytes,
        "activation_bytes": plan.activation_bytes,
        "overhead_bytes": plan.overhead_bytes,
        "kv_room_bytes": plan.kv_available_bytes if plan.groups else 0,
        "kv_bytes_per_token": plan.token_bytes,
        "block_size": shape.block_size,
        "num_blocks": plan.num_blocks,
        "num_host_blocks": plan.num_host_blocks,
        "host_bytes": plan.host_bytes,
        "need_bytes": plan.max_len_kv_bytes,
        "longest_context": plan.max_fitting_len,
        "concurrency": round(plan.concurrency, 4),
    }
    return {
        "model": name,
        "dtype": shape.dtype,
        "kv_cache_dtype": shape.cache_dtype,
        "max_model_len": shape.max_model_len,
        "max_num_batched_tokens": shape.max_num_batched_tokens,
        "max_num_seqs": shape.max_num_seqs,
        "state_checkpoints": shape.state_checkpoints,
        "draft_states": shape.draft_states,
        "tensor_parallel_size": shape.tensor,
        "decode_context_parallel_size": shape.context,
        "weights_from": source,
        "fits": problem is None,
        "problem": problem,
        "pipeline_parallel_size": shape.stages,
        "ranks": [{**one, **_rank_json(rank)} for rank in ranks],
    }


def _rank_json(rank: RankPlan) -> dict[str, Any]:
    found = rank._asdict()
    found["kv_bytes_per_token"] = found.pop("token_bytes")
    return found
