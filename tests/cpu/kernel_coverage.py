"""Program: finds kernels that a step of some size needs and the enumeration does not have.

Reads lines of JSON, [config, options, rounds, all sizes or those near multiples of 16], and answers
each with one.

Triton compiles for a GPU without having one, so this runs anywhere, in a process of its own: the
other tests run Triton in its interpreter.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import torch

from quire import env
from quire.config.facts import DeviceFacts
from quire.config.options import Options
from quire.config.resolve import resolve
from quire.core.types import DataParallelTokens, Pooling, RankRows
from quire.engine.startup import kernel_enumeration as enumeration
from quire.engine.startup.kernel_builder import build_task
from quire.engine.startup.model_setup import describe_model
from quire.engine.startup.plain_config import plain_config
from quire.kernels.framework.meta_device import on_meta_device, trace_kernels
from quire.kernels.gpu.runtime.target import GpuTarget
from quire.pooling.pooling_rows import ResultKind
from quire.runner.parts.encoder import EncoderPart, EncoderSource
from quire.runner.parts.unattended_tokens import UnattendedTokensPart
from quire.runner.worker_calls import with_few_layers

H200 = GpuTarget((9, 0), 132)


def described(hf, options):
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(hf))
    speculative = options.get("speculative_config")
    if speculative is not None and "head" in speculative:
        head = Path(tempfile.mkdtemp())
        (head / "config.json").write_text(json.dumps(speculative.pop("head")))
        speculative["model"] = str(head)
    options = Options.from_flat(
        {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True,
         "device": "cuda", **options}
    )  # fmt: skip
    found = describe_model(options, env.read())
    facts = DeviceFacts(
        kind="cuda", total_bytes=140 << 30, free_bytes=139 << 30, threads=2,
        capability=H200.capability, count=8,
    )  # fmt: skip
    config, _, _ = resolve(options, found.facts, facts, server=False)
    plain, flat = plain_config(config, options)
    return found, build_task(plain, flat, found.config, folder, H200.capability, 132).config


def numbers(most, every):
    """1 to most. every: False: those at which a kernel may change, and their neighbours."""
    return [n for n in range(1, most + 1) if every or n < 18 or n % 16 in (15, 0, 1) or n == most]


def every_step(scheduler, every):
    """Every number of decoding rows; every number of tokens as one prompt and as many."""
    rows, tokens, longest = (
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        scheduler.max_model_len - 2,
    )
    for count in numbers(rows, every):
        yield enumeration.decode_batch(count, 1)
        yield enumeration.decode_batch(count, longest)
    for count in numbers(min(tokens, longest), every):
        yield enumeration.prompt_batch(0, [count], 0)
        yield enumeration.prompt_batch(0, [count], longest - count)


def some_step(draw, scheduler):
    """Any step: rows that decode beside prompts of any lengths, with any contexts."""
    longest = scheduler.max_model_len - 2
    decodes = draw.randint(0, scheduler.max_num_seqs)
    left = scheduler.max_num_batched_tokens - decodes
    prompts = []
    while left > 1 and len(prompts) + decodes < scheduler.max_num_seqs and draw.random() < 0.8:
        prompts.append(draw.randint(1, min(left, longest)))
        left -= prompts[-1]
    if not prompts and not decodes:
        prompts = [min(2, longest)]
    prior = draw.randint(0, longest - max(prompts, default=1))
    batch = enumeration.prompt_batch(decodes, prompts, prior)
    return batch if prompts else enumeration.decode_batch(decodes, prior + 1)


def every_source(config, every):
    """Every number of source tokens, as one source."""
    for count in numbers(config.encoder.max_batched_tokens, every):
        blocks = [0] * -(-count // config.cache.block_size)
        yield EncoderPart((EncoderSource((0,) * count, blocks, 0),))


def pooled_kinds(config):
    if config.pooling is None:
        return []
    return [ResultKind.of(Pooling(task)) for task in config.pooling.tasks]


def run_some(runner, config, rounds, every):
    """Run every step, and some others."""
    draw = random.Random(1)

    def run(batch):
        if config.parallel.data > 1:  # beside rows of another rank, or as a graph of equal sizes
            others = draw.randint(0, config.scheduler.max_num_batched_tokens)
            with runner.experts.step((len(batch.token_ids), others)):
                runner.worker.compute(batch, ())
            count = len(batch.rows)
            shared = DataParallelTokens((count, 0), True, (RankRows(count, 0), RankRows(0, 0)))
            shape = runner.worker.padded_shape(shared) if batch.decode_only else None
            if shape is not None:
                with runner.experts.step((count, 0), shape.tokens):
                    runner.worker.compute(batch, (), shape)
            return
        runner.worker.compute(batch, ())
        if batch.decode_only and runner.worker.proposals is not None:
            runner.worker.compute(enumeration.drafted(batch), ())
        if config.adapters is not None:
            load = draw.choice([*enumeration.adapter_loads(runner.model)])
            runner.worker.compute(batch, [enumeration.adapted_rows(batch, load)])

    with torch.inference_mode(), with_few_layers(runner.worker, runner.model):
        for kind in pooled_kinds(config):
            for batch in every_step(config.scheduler, every):
                if not (batch.decode_only or batch.max_prior_context):
                    part = enumeration.pooled_rows(batch, kind)
                    plain = enumeration.without_samples(batch)
                    runner.worker.compute(plain, [part])
                    if config.pooling.late_interaction is not None:
                        some = UnattendedTokensPart([1] * len(batch.rows))
                        runner.worker.compute(plain, [some, part])
        for part in every_source(config, every) if config.encoder else ():
            runner.worker.compute(enumeration.prompt_batch(0, [2], 0), [part])
        kinds = enumeration.SAMPLING_KINDS + enumeration.OTHER_SAMPLING_KINDS
        for params in kinds if config.generates else ():
            enumeration._join(runner.sampler, params)
            if params is enumeration.GREEDY:
                for batch in every_step(config.scheduler, every):
                    run(batch)
            for _ in range(rounds):
                run(some_step(draw, config.scheduler))


def coverage(hf, options, rounds, every):
    found, config = described(hf, options)
    known = []
    enumeration.enumerate_kernels(found, config, H200, known.append)
    later = []
    with on_meta_device(H200), trace_kernels(later.append):
        for rank in range(0, config.parallel.ranks, config.parallel.tensor):
            run_some(enumeration.meta_runner(found, config, rank), config, rounds, every)
    missing = [one for one in later if one not in set(known)]
    names = sorted({one.name for one in known})
    return {"known": len(known), "later": len(later), "missing": missing, "names": names}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(coverage(*json.loads(line)), default=str), flush=True)
