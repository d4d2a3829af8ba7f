"""Milliseconds of a step that verifies drafts, over those of a step without. One line a case.

    python bench/gpu_verify.py --model /tmp/quire-models/llama-8b [--rows 1,8,32] [--drafts 0,1,3,7]
        [--context 300,8000] [--apart] [--variants JSON]

--variants: attention of steps with drafts in other forms, each an object with "pack" (rows of a
program) or fields of SplitPlan; {} is the form in use.

Each of the rows is a sequence with blocks of its own. Steps are enqueued one behind the other, from
graphs, so the host is hidden. Weights are random; nothing is accepted, which changes no step.
"""

import argparse
import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from quire import LLM, SamplingParams
from quire.core.types import StopConditions
from quire.engine.startup.kernel_enumeration import decode_batch
from quire.kernels.gpu.attention import paged_attention_drafts, paged_attention_drafts_fused
from quire.kernels.gpu.attention.split_plan import plan_decode
from quire.kernels.gpu.linear import small_m_plans
from quire.runner.slots import BlockTableUpdate
from quire.sampling.slot_join import SlotJoin


def change_attention(variant):
    """Return patches for steps with drafts: of the rows of a program, and of the plan's fields."""
    pack = variant.get("pack")
    fields = {key: value for key, value in variant.items() if key != "pack"}
    modules = paged_attention_drafts, paged_attention_drafts_fused
    patches = [mock.patch.object(one, "pack_rows", return_value=pack) for one in modules if pack]

    def plan(*args):
        found = plan_decode(*args)
        if not fields:
            return found
        bound = args[-1].max_context
        splits = max(
            1, min(found.max_splits, -(-bound // fields.get("min_chunk", found.min_chunk)))
        )
        return found._replace(**fields, splits=splits)

    return patches + [mock.patch.object(one, "plan_decode", plan) for one in modules]


GREEDY = SamplingParams(temperature=0.0)


def folder_of(name):
    found = Path(os.environ.get("MODELS", "/tmp/quire-models")) / name
    return str(found) if found.exists() else name


def prepare(runner, rows, context, block_size, blocks):
    """Let `rows` slots hold sequences of this context, each in its own blocks if there are enough."""
    width = -(-context // block_size) + 1
    updates = []
    for slot in range(rows):
        own = [(slot * width + i) % blocks for i in range(width)]
        updates.append(BlockTableUpdate(0, slot, 0, own))
        runner.sampler.join(
            SlotJoin(slot, "x", 0, GREEDY, 0, [0], 1, 2, StopConditions(max_tokens=9))
        )
    runner.worker.write_tables(updates)


def batch_of(rows, drafts, context):
    """Return a step of so many sequences, each with drafts, and with this context at its end."""
    each = 1 + drafts
    slots = np.repeat(np.arange(rows, dtype=np.int32), each)
    contexts = np.tile(np.arange(context - drafts, context + 1, dtype=np.int32), rows)
    behind = np.tile(np.array([7] * drafts + [-1], dtype=np.int32), rows)
    return replace(
        decode_batch(len(slots), context),
        rows=np.repeat(np.arange(rows), each).tolist(),
        slots=slots,
        token_slots=slots,
        positions=contexts - 1,
        contexts=contexts,
        sampled_rows=np.repeat(np.arange(rows), each).tolist(),
        sampled_slots=tuple(slots.tolist()),
        next_drafts=behind.tolist() if drafts else (),
    )


@torch.inference_mode()
def step_ms(runner, batch, count):
    """Return the least of several measurements of so many steps."""
    found = []
    with runner.worker.execution_context():
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            runner.worker.compute(batch, ()).wait()
            begin.record()
            pending = [runner.worker.compute(batch, ()) for _ in range(3)]
            for _ in range(count - 3):
                pending.pop(0).wait()
                pending.append(runner.worker.compute(batch, ()))
            end.record()
            for one in pending:
                one.wait()
            found.append(begin.elapsed_time(end) / count)
    return min(found)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--drafts", default="0,1,3,7")
    parser.add_argument("--context", default="300,8000")
    parser.add_argument("--kw", default="{}", help="options of the engine, as JSON")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--apart", action="store_true", help="norms and rotations apart, as before")
    parser.add_argument("--variants", type=json.loads, default=[])
    given = parser.parse_args()
    numbers = {
        name: [int(one) for one in getattr(given, name).split(",")]
        for name in ("rows", "drafts", "context")
    }
    options = {"max_model_len": max(numbers["context"]) + 64, **json.loads(given.kw)}
    if given.apart:
        mock.patch.object(small_m_plans, "find_bands", return_value=None).start()
        mock.patch.object(paged_attention_drafts_fused, "supports", return_value=False).start()
    llm = LLM(folder_of(given.model), load_format="dummy", **options)
    runner = llm.llm_engine.engine._executor.runner
    for variant in given.variants or [{}]:
        with ExitStack() as changed:
            for patch in change_attention(variant):
                changed.enter_context(patch)
            if variant:
                runner.worker._graphs.clear()
                runner.worker.capture_graphs(runner.worker._graph_bytes)
            measure(given, numbers, llm.llm_engine.config, runner, variant)


def measure(given, numbers, config, runner, variant):
    for context in numbers["context"]:
        for rows in numbers["rows"]:
            cache = config.cache
            prepare(runner, rows, context, cache.block_size, cache.num_blocks)
            found = {
                drafts: step_ms(runner, batch_of(rows, drafts, context), given.steps)
                for drafts in numbers["drafts"]
                if rows * (1 + drafts) <= 512
            }
            plain = found.get(0, float("nan"))
            line = {
                "model": given.model,
                **variant,
                "apart": given.apart,
                "rows": rows,
                "context": context,
            }
            for drafts, ms in found.items():
                line[f"drafts {drafts}"] = [round(ms, 3), round(ms / plain, 3)]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
