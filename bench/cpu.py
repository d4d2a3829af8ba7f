"""Runs the CPU workloads on quire and transformers in turn. Prints JSON lines, then medians.

usage: python bench/cpu.py MODELS_DIR [--rounds 3] [--engines quire,transformers] [--shapes ...]
                           [--processor]

make_models.py writes MODELS_DIR. Weights are random bf16, greedy, ignore_eos: every engine does
the same work. Each engine runs in a process of its own, one after the other, `rounds` times.
--processor: seconds of the processor instead; with OMP_NUM_THREADS=1 that means something on a
busy machine.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
CASES = {
    "qwen3-0.6b": "cpu_decode1,cpu_prefill,cpu_batch8,cpu_batch32",
    "qwen3-tiny": "tiny_decode1,tiny_batch32",
    "mamba2-370m": "cpu_decode1,cpu_prefill,cpu_batch8",
    "qwen3-next-0.5b": "cpu_decode1,cpu_prefill,cpu_batch8",
}
VOCAB = {"qwen3-0.6b": 100000, "qwen3-tiny": 4000, "mamba2-370m": 50000, "qwen3-next-0.5b": 50000}


def transformers_rounds(folder, cases, vocab, clock):
    """Run the cases with transformers' generate, in left-padded batches (of equal lengths)."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from tests import torchvision_wheel

    torchvision_wheel.install()
    import random

    import torch
    import transformers
    from offline import case_specs

    t0 = time.time()
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    base = dict(engine="transformers", version=transformers.__version__, model=folder.name)
    print(json.dumps(dict(base, case="startup", init_s=round(time.time() - t0, 2))), flush=True)
    for name in cases:
        for rep in range(2):
            prompts, outs = case_specs(random.Random(f"{name}-{rep}"), vocab)[name]
            if rep == 0:
                prompts, outs = prompts[:1], [min(outs[0], 4)]
            ids = torch.tensor(prompts)
            t0 = clock()
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=outs[0],
                    min_new_tokens=outs[0],
                    do_sample=False,
                    pad_token_id=0,
                )
            dt = clock() - t0
            n_out, n_in = out.numel() - ids.numel(), ids.numel()
            assert n_out == sum(outs)
            if rep:
                print(
                    json.dumps(
                        dict(
                            base,
                            case=name,
                            s=round(dt, 3),
                            in_tok=n_in,
                            out_tok=n_out,
                            out_tok_s=round(n_out / dt, 1),
                            total_tok_s=round((n_in + n_out) / dt, 1),
                        )
                    ),
                    flush=True,
                )


def run(engine, folder, cases, vocab, processor):
    """Run one engine in its own process. Returns its JSON lines."""
    if engine == "transformers":
        command = [sys.executable, __file__, str(folder), "--child", cases, "--vocab", str(vocab)]
    else:
        command = [
            sys.executable,
            str(HERE / "offline.py"),
            "--engine",
            engine,
            "--model",
            str(folder),
            "--cases",
            cases,
            "--repeat",
            "1",
            "--vocab",
            str(vocab),
        ]
    command += ["--processor"] * processor
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("models", type=pathlib.Path)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--engines", default="quire,transformers")
    ap.add_argument("--shapes", default=",".join(CASES))
    ap.add_argument("--processor", action="store_true")
    ap.add_argument("--child")
    ap.add_argument("--vocab", type=int)
    a = ap.parse_args()
    if a.child:
        clock = time.process_time if a.processor else time.time
        transformers_rounds(a.models, a.child.split(","), a.vocab, clock)
        return
    found: dict[tuple, list[float]] = {}
    for shape in a.shapes.split(","):
        for _ in range(a.rounds):
            for engine in a.engines.split(","):
                for line in run(engine, a.models / shape, CASES[shape], VOCAB[shape], a.processor):
                    print(json.dumps(line), flush=True)
                    key = (
                        "total_tok_s"
                        if line["case"] == "cpu_prefill"
                        else "init_s"
                        if line["case"] == "startup"
                        else "out_tok_s"
                    )
                    found.setdefault((shape, line["case"], key, engine), []).append(line[key])
    for (shape, case, key, engine), values in found.items():
        print(
            f"{shape:12} {case:14} {key:12} {engine:14} median {statistics.median(values):10.2f}   {sorted(values)}"
        )


if __name__ == "__main__":
    main()
