"""Program: finds kernels that a step of some size needs and the enumeration does not have.

usage: python kernel_coverage.py CONFIG_JSON OPTIONS_JSON ROUNDS

Triton compiles for a GPU without having one, so this runs anywhere, in a process of its own: the
other tests run Triton in its interpreter. Prints one JSON line.
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
from quire.core.types import Pooling
from quire.engine.startup import kernel_enumeration as enumeration
from quire.engine.startup.kernel_builder import build_task
from quire.engine.startup.model_setup import describe_model
from quire.engine.startup.plain_config import plain_config
from quire.kernels.framework.meta_device import on_meta_device, trace_kernels
from quire.kernels.gpu.runtime.target import GpuTarget
from quire.pooling.pooling_rows import ResultKind
from quire.runner.parts.encoder import EncoderPart, EncoderSource
from quire.runner.parts.unattended_tokens import UnattendedTokensPart
from quire.runner.worker_calls import with_two_layers_per_kind

H200 = GpuTarget((9, 0), 132)


def described(hf, options):
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(hf))
    options = Options.from_flat(
        {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True,
         "device": "cuda", **options}
    )  # fmt: skip
    found = describe_model(options, env.read())
    facts = DeviceFacts(
        kind="cuda", total_bytes=140 << 30, free_bytes=139 << 30, threads=2,
        capability=H200.capability,
    )  # fmt: skip
    config, _, _ = resolve(options, found.facts, facts, server=False)
    plain, flat = plain_config(config, options)
    return found, build_task(plain, flat, found.config, folder, H200.capability, 132).config


def every_step(scheduler):
    """Every number of decoding rows; every number of tokens as one prompt and as many."""
    rows, tokens, longest = (
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        scheduler.max_model_len - 2,
    )
    for count in range(1, rows + 1):
        yield enumeration.decode_batch(count, 1)
        yield enumeration.decode_batch(count, longest)
    for count in range(1, min(tokens, longest) + 1):
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


def every_source(config):
    """Every number of source tokens, as one source."""
    for count in range(1, config.encoder.max_batched_tokens + 1):
        blocks = [0] * -(-count // config.cache.block_size)
        yield EncoderPart((EncoderSource((0,) * count, blocks),))


def pooled_kinds(config):
    if config.pooling is None:
        return []
    return [ResultKind.of(Pooling(task)) for task in config.pooling.tasks]


def main():
    hf, options, rounds = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    found, config = described(hf, options)
    known = []
    enumeration.enumerate_kernels(found, config, H200, known.append)
    later = []
    draw = random.Random(1)
    with on_meta_device(H200), trace_kernels(later.append):
        runner = enumeration.meta_runner(found, config)
        with torch.inference_mode(), with_two_layers_per_kind(runner.model):
            for kind in pooled_kinds(config):
                for batch in every_step(config.scheduler):
                    if not (batch.decode_only or batch.max_prior_context):
                        part = enumeration.pooled_rows(batch, kind)
                        plain = enumeration.without_samples(batch)
                        runner.worker.compute(plain, [part])
                        if config.pooling.late_interaction is not None:
                            some = UnattendedTokensPart([1] * len(batch.rows))
                            runner.worker.compute(plain, [some, part])
            for part in every_source(config) if config.encoder else ():
                runner.worker.compute(enumeration.prompt_batch(0, [2], 0), [part])
            for params in enumeration.SAMPLING_KINDS if config.generates else ():
                enumeration._join(runner.sampler, params)
                for batch in every_step(config.scheduler) if params is enumeration.GREEDY else ():
                    runner.worker.compute(batch, ())
                for _ in range(rounds):
                    runner.worker.compute(some_step(draw, config.scheduler), ())
    missing = [one for one in later if one not in set(known)]
    print(json.dumps({"known": len(known), "later": len(later), "missing": missing}, default=str))


if __name__ == "__main__":
    main()
