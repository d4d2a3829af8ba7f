"""Measures the seconds of `import quire`, and from process start to the embedded model's first
token.

usage: python bench/startup.py [--rounds 5]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

FIRST = "from quire import LLM, SamplingParams; out = LLM('embedded').generate('Hello', SamplingParams(max_tokens=1), use_tqdm=False); assert out[0].outputs[0].token_ids"


def seconds(code):
    t0 = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - t0


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=5)
    a = ap.parse_args()
    for name, code in {
        "python": "pass",
        "import quire": "import quire",
        "first token": FIRST,
    }.items():
        runs = [seconds(code) for _ in range(a.rounds)]
        print(
            json.dumps(
                dict(
                    case=name,
                    median_s=round(statistics.median(runs), 3),
                    runs=[round(r, 3) for r in runs],
                )
            )
        )


if __name__ == "__main__":
    main()
