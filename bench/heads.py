"""Measures methods with weights beside the same model without drafts, in turn in one process.

    python bench/heads.py MODEL [--method eagle3] [--rows 1,8,32] [--lengths 3] [--load-format dummy]

Heads have random weights, so acceptance is made up: `length` is the mean number of tokens of a step.
Of a method the head's shape follows the model's: EAGLE heads have a layer of its width, EAGLE-3 one
with 32,000 tokens, Medusa as many heads as drafts; `draft_model` is the model itself. A round is one
run of each kind; `ratio` is that of the quickest runs. Each is measured with all drafts in every
step, and with `adaptive`, where the engine chooses their number. `step_ms` is the time from step to
step with drafts, of which the host waits `wait_ms` for the device (a GPU). --kernels: microseconds of the
device in each kernel, for a step. MODEL: a folder or "embedded"; folders of make_models.py have no weights: --load-format dummy.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT = 32
KEEP = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
)


def head_config(model: dict[str, Any], method: str, drafts: int) -> dict[str, Any]:
    """The config.json of a head for a model with this one."""
    own = {key: model[key] for key in KEEP if key in model} | {"num_hidden_layers": 1}
    if method == "eagle":
        return own | {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"}
    if method == "medusa":
        return {"medusa_num_heads": drafts, "medusa_num_layers": 1, "model_type": "medusa"}
    vocab = min(32_000, own["vocab_size"] // 2)
    return own | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": vocab}


def build(args: argparse.Namespace, rows: int, speculative: dict[str, Any] | None) -> Any:
    from quire import LLM

    more = {"kv_cache_memory_bytes": args.kv_cache} if args.kv_cache else {}
    return LLM(
        args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        max_model_len=PROMPT + args.tokens + 16,
        max_num_seqs=max(rows, 8),
        enable_prefix_caching=False,
        speculative_config=speculative,
        **more,
    )


def run(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[Any]]:
    from quire import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    return time.perf_counter() - began, [one.outputs[0].spec_decode_metrics for one in outs]


class Watch:
    """Times of an engine's steps: from result to result, and of these the wait for the device."""

    def __init__(self, llm: Any) -> None:
        self.engine, self.steps, self.waits = llm.llm_engine.engine, [], []
        apply_oldest = self.engine._apply_oldest
        last = 0.0

        def watched() -> Any:
            nonlocal last
            plan, pending = self.engine._in_flight[0]
            began = time.perf_counter()
            done = getattr(pending, "done", None)  # of a GPU
            if done is not None:
                done.synchronize()
            waited = time.perf_counter()
            if plan.num_drafts:
                self.steps.append(waited - last)
                self.waits.append(waited - began)
            last = waited
            return apply_oldest()

        self.engine._apply_oldest = watched

    def close(self) -> dict[str, float]:
        del self.engine._apply_oldest
        if not self.steps:
            return {}
        names = ("step_ms", "wait_ms")
        return {
            name: 1e3 * statistics.median(of) for name, of in zip(names, (self.steps, self.waits))
        }


def kernel_times(llm: Any, prompts: list[list[int]], tokens: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        _, figures = run(llm, prompts, tokens)
    steps = max(one.num_spec_steps for one in figures)
    rows = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    for one in rows[:40]:
        us = one.self_device_time_total / steps
        line = {"kernel": one.key[:90], "a_step": round(one.count / steps, 2), "us": round(us, 1)}
        print(json.dumps(line), flush=True)


def measure(args: argparse.Namespace, off: Any, on: Any, rows: int, **said: object) -> None:
    draw, vocab = random.Random(rows), off.llm_engine.config.model.vocab
    prompts = [[draw.randrange(20, vocab) for _ in range(PROMPT)] for _ in range(rows)]
    best, figures = {False: 1e9, True: 1e9}, []
    for one in (off, on, on):
        run(one, prompts, args.tokens)
    for _ in range(args.rounds):
        for drafts, llm in ((False, off), (True, on)):
            took, figures = run(llm, prompts, args.tokens)
            best[drafts] = min(best[drafts], took)
    watch = Watch(on)
    _, figures = run(on, prompts, args.tokens)
    known = [one for one in figures if one is not None]
    steps = sum(one.num_spec_steps for one in known)
    accepted = sum(one.num_accepted_draft_tokens for one in known)
    found = {
        "rows": rows,
        **said,
        "off_tok_s": rows * args.tokens / best[False],
        "on_tok_s": rows * args.tokens / best[True],
        "ratio": best[False] / best[True],
        "tokens_a_step": 1 + accepted / max(steps, 1),
        "steps_with_drafts": steps / (rows * args.tokens),
        **watch.close(),
    }
    print(
        json.dumps({k: round(v, 3) if type(v) is float else v for k, v in found.items()}),
        flush=True,
    )
    if args.kernels and not said["adaptive"]:
        kernel_times(on, prompts, args.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--method", default="eagle3", help="eagle, eagle3, medusa or draft_model")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--lengths", default="3")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--adaptive", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--kv-cache", help="size of each cache, such as 8GiB")
    args = parser.parse_args()
    source = Path(args.model)
    if args.model == "embedded":
        import quire.embedded

        source = Path(quire.embedded.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        model = json.loads((source / "config.json").read_text())
        head = Path(folder) / "head"
        if args.method == "draft_model":
            head = source
        else:
            head.mkdir()
            text = json.dumps(head_config(model, args.method, args.drafts))
            (head / "config.json").write_text(text)
        all_rows = [*map(int, args.rows.split(","))]
        off = build(args, max(all_rows), None)
        said: dict[str, Any] = {"method": args.method, "drafts": args.drafts}
        for length in map(float, args.lengths.split(",")):
            given = {
                "method": args.method,
                "model": str(head),
                "num_speculative_tokens": args.drafts,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": length,
            }
            on = build(args, max(all_rows), given)
            drafting = on.llm_engine.engine._scheduler._drafting
            for adaptive in {"no": (False,), "yes": (True,), "both": (False, True)}[args.adaptive]:
                drafting._adaptive = adaptive
                for rows in all_rows:
                    measure(args, off, on, rows, **said, length=length, adaptive=adaptive)
            del on, drafting


if __name__ == "__main__":
    main()
