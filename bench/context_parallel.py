"""Decode of long contexts on two GPUs, with and without context parallelism. One JSON line a result.

usage: python context_parallel.py --model DIR [--context 60000] [--rows 1,8] [--sizes 1,2] [--kw JSON]

Random weights and distinct prompts, which are cached by a first call; the time of one token is taken
off that of all. Also the tokens that the KV cache has room for.
"""

import argparse
import json
import random
import time

from quire import LLM, SamplingParams

COUNT = 128


def seconds(llm, prompts, count):
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=count)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--context", type=int, default=60000)
    ap.add_argument("--rows", default="1,8")
    ap.add_argument("--sizes", default="1,2", help="of context parallelism")
    ap.add_argument("--tensor", type=int, default=2)
    ap.add_argument("--kw", default="{}")
    a = ap.parse_args()
    rows = [int(n) for n in a.rows.split(",")]
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 30000) for _ in range(a.context)] for _ in range(max(rows))]
    name = a.model.rstrip("/").split("/")[-1]
    for size in map(int, a.sizes.split(",")):
        start = time.perf_counter()
        llm = LLM(
            model=a.model,
            load_format="dummy",
            tensor_parallel_size=a.tensor,
            decode_context_parallel_size=size,
            max_model_len=a.context + 1024,
            max_num_seqs=max(rows),
            **json.loads(a.kw),
        )
        cache = llm.llm_engine.config.cache
        facts = {"model": name, "tensor": a.tensor, "dcp": size}
        start_s = round(time.perf_counter() - start, 1)
        room = cache.num_blocks * cache.block_size
        print(json.dumps(facts | {"kv_tokens": room, "start_s": start_s}), flush=True)
        for n in rows:
            prefill_s = seconds(llm, prompts[:n], 1)
            first = min(seconds(llm, prompts[:n], 1) for _ in range(2))
            whole = min(seconds(llm, prompts[:n], 1 + COUNT) for _ in range(2))
            rate = n * COUNT / (whole - first)
            found = {"rows": n, "context": a.context, "tok_s": round(rate, 1)}
            found |= {"prompt_s": round(prefill_s, 2), "first_s": round(first, 3)}
            print(json.dumps(facts | found), flush=True)
        llm.llm_engine.engine.shutdown()
        del llm


if __name__ == "__main__":
    main()
