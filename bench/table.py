"""The table of docs/performance.md: every model and case of offline.py on one GPU, with the goals.

Run it after every change of a kernel: a line that is slower than the most so far is named at the end,
and the exit status is their number.

usage: python bench/table.py MODELS [--rows llama-8b,qwen3-0.6b,qwen3-30b-a3b,llama-8b:fp8]
                             [--repeat 2] [--commit HASH] [--seconds 540]

make_models.py writes MODELS. Each row of models runs in its own process, after one that measures
the card's limits (copy, matrix-vector and matrix products). JSON lines go to stdout, with commit,
machine and command; the table for people to stderr. --seconds: no new model is begun later than
this.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent

# (model, case) -> metric, the peer (vLLM 0.25.1 on such a card), the goal, the most so far
GOALS = {
    ("llama-8b", "decode1"): ("out_tok_s", 203, 245, 271),
    ("llama-8b", "rows8"): ("out_tok_s", None, None, 1884),
    ("llama-8b", "batch"): ("out_tok_s", 9924, 11500, 11277),
    ("llama-8b", "prefill"): ("total_tok_s", 40309, 45000, 42843),
    ("qwen3-0.6b", "decode1"): ("out_tok_s", 559, 1200, 1711),
    ("qwen3-0.6b", "rows8"): ("out_tok_s", None, None, 9376),
    ("qwen3-0.6b", "batch"): ("out_tok_s", 24114, 34000, 37438),
    ("qwen3-0.6b", "prefill"): ("total_tok_s", 312009, 400000, 386132),
    ("qwen3-30b-a3b", "decode1"): ("out_tok_s", 241, 420, 421),
    ("qwen3-30b-a3b", "batch"): ("out_tok_s", 7419, 12000, 13875),
    ("qwen3-30b-a3b", "prefill"): ("total_tok_s", 62317, 80000, 77506),
    ("llama-8b:fp8", "decode1"): ("out_tok_s", 284, 400, 418),
    ("llama-8b:fp8", "batch"): ("out_tok_s", 13454, 15500, 16352),
    ("llama-8b:fp8", "prefill"): ("total_tok_s", 62752, 72000, 71554),
}
LEAST = 0.96
"""Share of the most so far below which a line is called slower: machines of one kind differ by 4 %."""

CEILING = """
import json, torch
def ms(f, n=20):
    for _ in range(3): f()
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a.record()
    for _ in range(n): f()
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b) / n
x = torch.randn(1 << 31, device="cuda", dtype=torch.bfloat16); y = torch.empty_like(x)
copy = 2 * x.nbytes / ms(lambda: y.copy_(x)) / 1e9
w = x.view(1 << 17, 1 << 14); v = torch.randn(1 << 14, device="cuda", dtype=torch.bfloat16)
gemv = x.nbytes / ms(lambda: torch.mv(w, v)) / 1e9
a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
flops = 2 * 8192**3 / ms(lambda: a @ b) / 1e9
p = torch.cuda.get_device_properties(0)
print(json.dumps(dict(case="ceiling", machine=p.name, torch=torch.__version__, copy_tb_s=round(copy, 2),
                      gemv_tb_s=round(gemv, 2), matmul_tflop_s=round(flops))))
"""


def lines(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
    return [json.loads(one) for one in done.stdout.splitlines() if one.startswith("{")]


def command_of(row, a):
    name, _, quant = row.partition(":")
    kw = {"quantization": quant} if quant else {}
    kw |= json.loads(a.kw)
    return [
        sys.executable,
        str(HERE / "offline.py"),
        "--engine",
        "quire",
        "--model",
        f"{a.models}/{name}",
        "--cases",
        a.cases,
        "--repeat",
        str(a.repeat),
        "--kw",
        json.dumps(kw),
    ]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("models")
    ap.add_argument("--rows", default="llama-8b,qwen3-0.6b,qwen3-30b-a3b,llama-8b:fp8")
    ap.add_argument("--cases", default="decode1,rows8,batch,prefill")
    ap.add_argument("--repeat", type=int, default=1)
    ap.add_argument("--kw", default="{}")
    ap.add_argument("--commit", default="?")
    ap.add_argument("--seconds", type=float, default=540)
    a = ap.parse_args()
    began = time.time()
    base = dict(date=time.strftime("%Y-%m-%d"), commit=a.commit, command=" ".join(sys.argv))
    (ceiling,) = lines([sys.executable, "-c", CEILING])
    base["machine"] = ceiling["machine"]
    print(json.dumps(base | ceiling), flush=True)
    table = []
    for row in a.rows.split(","):
        if time.time() - began > a.seconds:
            print(f"no time left for {row}", file=sys.stderr)
            continue
        for found in lines(command_of(row, a)):
            print(json.dumps(base | found | {"model": row}), flush=True)
            key = (row, found["case"])
            if key in GOALS:
                what, peer, goal, most = GOALS[key]
                got = found[what]
                table.append((*key, got, goal, peer, most, got / most))
            elif found["case"] == "startup":
                table.append((row, "startup", found["init_s"], "", "", "", found["import_s"]))
    print("model case measured goal peer most of_most", file=sys.stderr)
    for one in table:
        cells = (f"{c:.2f}" if isinstance(c, float) else str(c) for c in one)
        print(" ".join(cells), file=sys.stderr)
    slower = [one for one in table if one[1] != "startup" and one[-1] < LEAST]
    for model, case, *_, share in slower:
        print(f"SLOWER: {model} {case}: {share:.2f} of the most so far", file=sys.stderr)
    return len(slower)


if __name__ == "__main__":
    sys.exit(main())
