"""Adapters as a user meets them: an engine with LoRA beside one without. One JSON line a result.

    python bench/lora.py MODEL [--load-format dummy] [--rank 16] [--repeat 3] [--kw JSON]
                         [--cases 1x0,1x1,8x1,32x1,8x8,32x8,64x32,32h8,mixed512,1r64,first]
                         [--slots 32] [--host 64]

A case is ROWSxADAPTERS; ROWShADAPTERS: half of the rows are of the base; ROWSrRANK: one adapter of
another rank; mixed512: 512 requests, one adapter. Its ratio is its tokens a second over those of
the engine without LoRA, in turn in one process; the best of each is taken. `first`: milliseconds
until the first token of a prompt whose adapter is in a slot, in host memory only, on disk only, and
those in which the last is read.
Adapters are random, on all seven linear layers of a block; each is as large as a trained one.
"""

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams

CASES = "1x0,32x0,1x1,8x1,32x1,8x8,32x8,64x32,32h8,mixed512,1r64,first"


def shapes(config):
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    q, kv = heads * size, config.get("num_key_value_heads", heads) * size
    return {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }  # fmt: skip


def write_adapter(folder, config, rank, seed, dtype=torch.bfloat16):
    """Write a PEFT folder; the numbers of a layer are those of the one before, moved by one."""
    folder.mkdir(parents=True)
    gen, tensors = torch.Generator().manual_seed(seed), {}
    made = {
        name: (
            (torch.randn(rank, inputs, generator=gen) / inputs**0.5).to(dtype),
            (torch.randn(outputs, rank, generator=gen) / 64).to(dtype),
        )
        for name, (outputs, inputs) in shapes(config).items()
    }
    for layer in range(config["num_hidden_layers"]):
        for name, (a, b) in made.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = a.roll(layer, 1)
            tensors[f"{stem}.lora_B.weight"] = b.roll(layer, 0)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in shapes(config)]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


class Adapters:
    """Writes each adapter when it is first used."""

    def __init__(self, folder, config):
        self._folder, self._config, self._requests = folder, config, {}

    def get(self, rank, number):
        if (rank, number) not in self._requests:
            folder = self._folder / f"r{rank}-{number}"
            write_adapter(folder, self._config, rank, number)
            request = LoRARequest(folder.name, len(self._requests) + 1, str(folder))
            self._requests[rank, number] = request
        return self._requests[rank, number]


def work(case, rng, vocab, tokens):
    """Return prompts, output lengths, the number of adapters, their rank and the rows of the base."""
    if case == "mixed512":
        prompts = [
            [rng.randrange(10, vocab) for _ in range(rng.randint(64, 1024))] for _ in range(512)
        ]
        return prompts, [rng.randint(64, 512) for _ in prompts], 1, None, 0
    rows, kind, number = re.fullmatch(r"(\d+)([xhr])(\d+)", case).groups()
    prompts = [[rng.randrange(10, vocab) for _ in range(128)] for _ in range(int(rows))]
    rank = int(number) if kind == "r" else None
    adapters = 1 if kind == "r" else int(number)
    return prompts, [tokens] * len(prompts), adapters, rank, len(prompts) // 2 * (kind == "h")


def rate(llm, prompts, outputs, requests):
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in outputs]
    began = time.perf_counter()
    done = llm.generate(
        [{"prompt_token_ids": p} for p in prompts], params, lora_request=requests, use_tqdm=False
    )
    seconds = time.perf_counter() - began
    assert [len(one.outputs[0].token_ids) for one in done] == outputs
    return sum(outputs) / seconds


def compare(case, plain, llm, adapters, a):
    best = [0.0, 0.0]
    for turn in range(a.repeat + 1):
        rng = random.Random(f"{case}-{turn}")
        prompts, outputs, count, rank, base = work(case, rng, a.vocab, a.tokens)
        some = [adapters.get(rank or a.rank, n) for n in range(count)]
        requests = [
            some[row % count] if count and row >= base else None for row in range(len(prompts))
        ]
        if turn:  # the first warms both up
            best[0] = max(best[0], rate(plain, prompts, outputs, None))
            best[1] = max(best[1], rate(llm, prompts, outputs, requests))
        else:
            short = [min(n, 16) for n in outputs]
            rate(plain, prompts, short, None)
            rate(llm, prompts, short, requests)
    return {"plain tok/s": round(best[0], 1), "tok/s": round(best[1], 1),
            "ratio": round(best[1] / best[0], 3)}  # fmt: skip


def first_tokens(llm, adapters, a):
    """Use more adapters than slots, and more than host copies, in turn."""
    times = {"slot ms": [], "host ms": [], "disk ms": [], "read ms": []}
    store, rng = llm.llm_engine.adapters._store, random.Random(0)

    def first(number):
        prompt = [rng.randrange(10, a.vocab) for _ in range(16)]
        began = time.perf_counter()
        rate(llm, [prompt], [1], [adapters.get(a.rank, number)])
        return (time.perf_counter() - began) * 1e3

    for number in range(a.host + a.slots):  # all are written, registered and read once
        first(number)
    for turn in range(8):
        newest = a.host + a.slots - 1 - turn % a.slots
        times["slot ms"].append(first(newest))
    turns = min(8, a.host - a.slots, a.slots)
    for turn in range(turns):  # in host memory, but later ones have taken the slots
        times["host ms"].append(first(a.host - 1 - turn))
    for turn in range(turns):
        before = store.stats().load_seconds
        times["disk ms"].append(first(turn))
        times["read ms"].append((store.stats().load_seconds - before) * 1e3)
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=100000)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--kw", default="{}", help="options of both engines")
    parser.add_argument("--slots", type=int, default=32, help="adapters on the GPU")
    parser.add_argument("--host", type=int, default=64, help="adapters in host memory")
    a = parser.parse_args()
    given = {"load_format": a.load_format, "max_model_len": 2048} | json.loads(a.kw)
    config = json.loads((Path(a.model) / "config.json").read_text())
    cases = a.cases.split(",")
    most = max([a.rank, *(int(c.split("r")[1]) for c in cases if re.fullmatch(r"\d+r\d+", c))])
    if cases == ["first"]:
        plain = None
    else:
        plain = LLM(a.model, **{"gpu_memory_utilization": 0.4} | given)
    llm = LLM(a.model, enable_lora=True, max_loras=a.slots, max_cpu_loras=a.host,
              max_lora_rank=most, **{"gpu_memory_utilization": 0.9} | given)  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="quire-lora-") as folder:
        adapters = Adapters(Path(folder), config)
        for case in cases:
            found = (
                first_tokens(llm, adapters, a)
                if case == "first"
                else compare(case, plain, llm, adapters, a)
            )
            print(
                json.dumps({"model": Path(a.model).name, "case": case, "rank": a.rank, **found}),
                flush=True,
            )


if __name__ == "__main__":
    main()
