"""Workloads that nobody tuned: 40 of them drawn by a seed, each beside the limit of the GPU.

    python bench/sweep.py MODEL [--count 40] [--engine quire] [--seconds 300] [--kw JSON]

Lengths, outputs, shared parts, numbers of requests and sampling are those of `drawn` in offline.py.
The limit is a sum that no engine can pass: products of prompts at the matrix units' rate; then of
outputs at it, or the weights' bytes for each step of the longest output if that is more; then the
bytes of the keys that outputs read, a shared part once a step. One JSON line a workload with the
share of the limit that was reached, then the ten least.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from offline import drawn

OFFLINE = Path(__file__).resolve().parent / "offline.py"
RATE, BANDWIDTH = 790e12, 4.28e12  # of an H200: bf16 FLOP/s, bytes/s


class Shape:
    """What a token costs by the config of a dense model."""

    def __init__(self, config):
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        pairs = config.get("num_key_value_heads", heads)
        attention = 2 * hidden * size * (heads + pairs)
        self.linear = layers * (attention + 3 * hidden * config["intermediate_size"])
        self.head = hidden * config["vocab_size"]
        self.kv_bytes = layers * 2 * pairs * size * 2
        self.scores = layers * 4 * heads * size  # FLOPs of a query and a key


def limit_s(shape, prompts, outputs, shared):
    """Seconds below which the work cannot be done."""
    own = sum(len(p) - shared for p in prompts)
    pairs = sum((len(p) + shared) * (len(p) - shared) / 2 for p in prompts) + shared**2 / 2
    prefill = 2 * shape.linear * (own + shared) + shape.scores * pairs
    matrices = shape.linear + shape.head
    work = 2 * matrices * sum(outputs) / RATE
    steps = max(outputs)
    keys = sum(n * (len(p) - shared + n / 2) for p, n in zip(prompts, outputs, strict=True))
    keys += steps * shared
    decode = max(work, 2 * matrices * steps / BANDWIDTH) + keys * shape.kv_bytes / BANDWIDTH
    return prefill / RATE + decode


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--engine", default="quire")
    parser.add_argument("--seconds", type=float, default=300, help="no workload ends later")
    parser.add_argument("--kw", default='{"max_model_len": 18432}')
    a = parser.parse_args()
    shape = Shape(json.loads((Path(a.model) / "config.json").read_text()))
    cases = ",".join(f"sweep{number}" for number in range(a.count))
    command = [sys.executable, str(OFFLINE), "--engine", a.engine, "--model", a.model,
               "--cases", cases, "--repeat", "1", "--kw", a.kw]  # fmt: skip
    end, found = time.monotonic() + a.seconds, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout:
            line = json.loads(text) if text.startswith("{") else {"case": "startup"}
            if line["case"] != "startup":
                number = int(line["case"].removeprefix("sweep"))
                prompts, outputs, what = drawn(number, 1, 100000)
                line["limit_s"] = round(limit_s(shape, prompts, outputs, what["shared"]), 3)
                line["share"] = round(line["limit_s"] / line["s"], 3)
                found.append(line)
            print(json.dumps(line), flush=True)
            if time.monotonic() > end:
                process.kill()
    worst = sorted(found, key=lambda line: line["share"])[:10]
    print(json.dumps({"worst": [[line["case"], line["share"]] for line in worst],
                      "of": len(found)}))  # fmt: skip


if __name__ == "__main__":
    main()
