"""Where a step's time goes: host work per step by part, GPU busy share, kernels by time.

usage: python bench/host.py --model DIR [--rows 1,32,256,1024] [--prefill 4096] [--kernels 12]
[--batch 1 --rounds 2] [--kw '{"tensor_parallel_size": 2}']

For each number of rows: decode steps of that many sequences, first timed without profiling, then
some under torch's profiler (device activity only). "busy" is the share of the profiled time in
which a kernel or copy ran; "host" is host time other than waiting for results. On several ranks of
one pipeline stage the parts are of the engine's process: "encode" and "send" make the message to the
others, "ranks" is the wait for them. --batch (one rank) runs a share of offline.py's batch and prints
the share of time of steps that were submitted after the step before them was done ("late": only in
these may the GPU have been idle). Weights are random.
"""

import argparse
import json
import random
import re
import time

import torch
from offline import case_specs

from quire import LLM, SamplingParams
from quire.core.params import RequestOutputKind
from quire.executors import multiproc
from quire.runner.gpu import cuda_worker

PARTS = ("plan", "build", "encode", "send", "launch", "wait", "ranks", "apply")
WAITS = ("wait", "ranks")


class PartTimer:
    """Seconds of each part of the engine's step."""

    def __init__(self, engine):
        self.seconds = dict.fromkeys(PARTS, 0.0)
        executor, scheduler = engine.executor, engine._scheduler
        ranks = isinstance(executor, multiproc.Executor)
        own = executor._local if ranks else executor
        timed = [(scheduler, "plan"), (scheduler, "apply"), (own.runner, "launch")]
        timed += [(one, "build") for one in (executor._inputs if ranks else [own._inputs])]
        if ranks:
            timed += [(executor, "_message_of", "encode"), (executor.group, "send"),
                      (executor.group, "wait", "ranks")]  # fmt: skip
        for owner, name, *part in timed:
            setattr(owner, name, self._timed(part[0] if part else name, getattr(owner, name)))
        self._wait = cuda_worker.PendingStep.wait
        cuda_worker.PendingStep.wait = self._timed("wait", self._wait)

    def _timed(self, name, function):
        seconds = self.seconds

        def timed(*args):
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                seconds[name] += time.perf_counter() - start

        return timed

    def take(self):
        found = dict(self.seconds)
        for name in self.seconds:
            self.seconds[name] = 0.0
        return found


def add(llm, rng, rows, prompt, tokens, name):
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    vocab = llm.llm_engine.config.model.vocab
    for i in range(rows):
        ids = [rng.randrange(10, vocab) for _ in range(prompt)]
        llm.llm_engine.add_request(f"{name}-{i}", {"prompt_token_ids": ids}, params)


def steps(llm, count):
    for _ in range(count):
        for output in llm.llm_engine.step():
            reasons = [one.finish_reason for one in output.outputs]
            assert reasons in (["length"], [None]), f"{output.request_id}: {reasons}"


def finish(llm):
    engine = llm.llm_engine
    for name in list(engine._running):
        engine.abort_request(name)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernels(events, wall):
    """Return (busy share, [(name, calls, us)]) of device events."""
    spans, found = [], {}
    for e in events:
        if e.device_type != torch.autograd.DeviceType.CUDA:
            continue
        start, end = e.time_range.start, e.time_range.end
        spans.append((start, end))
        name = re.sub(r"<.*", "", e.name)[:70]
        calls, total = found.get(name, (0, 0.0))
        found[name] = (calls + 1, total + end - start)
    spans.sort()
    busy, covered_until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    whole = spans[-1][1] - spans[0][0] if spans else wall
    ranked = sorted(((n, c, t) for n, (c, t) in found.items()), key=lambda x: -x[2])
    return busy / whole, busy, ranked


def profiled(llm, count):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        steps(llm, count)
        torch.cuda.synchronize()
        wall = (time.perf_counter() - start) * 1e6
    return kernels(profiler.events(), wall)


def show(name, count, busy, total_us, ranked, limit):
    print(f"  {name}: busy {busy:.1%}, {total_us / count / 1e3:.3f} ms of kernels a step")
    for kernel, calls, us in ranked[:limit]:
        print(f"    {us / count:9.1f} us  {calls / count:6.1f} x {us / calls:8.2f}  {kernel}")


def decode(llm, clock, rng, rows, args):
    tokens = args.warm + 3 * args.steps + 40
    add(llm, rng, rows, args.prompt, tokens, f"d{rows}")
    deadline = time.perf_counter() + 20
    engine = llm.llm_engine.engine
    while engine.stats().running < min(rows, llm.llm_engine.config.scheduler.max_num_seqs):
        steps(llm, 1)
        assert time.perf_counter() < deadline, "rows do not all fit"
    steps(llm, args.warm)
    clock.take()
    start = time.perf_counter()
    steps(llm, args.steps)
    wall = time.perf_counter() - start
    parts = clock.take()
    per = {name: round(s / args.steps * 1e6, 1) for name, s in parts.items()}
    rest = wall - sum(parts.values())
    line = dict(
        rows=rows,
        step_us=round(wall / args.steps * 1e6, 1),
        host_us=round((wall - sum(parts[one] for one in WAITS)) / args.steps * 1e6, 1),
        **per,
        other=round(rest / args.steps * 1e6, 1),
        tok_s=round(rows * args.steps / wall, 1),
    )
    if args.kernels:
        busy, total, ranked = profiled(llm, args.profile)
        line["busy"] = round(busy, 4)
    print(json.dumps(line), flush=True)
    if args.kernels:
        show(f"decode of {rows}", args.profile, busy, total, ranked, args.kernels)
    finish(llm)


def prefill(llm, rng, length, args):
    budget = llm.llm_engine.config.scheduler.max_num_batched_tokens
    add(llm, rng, 6 * max(1, budget // length), length, 1, "warm")
    for _ in range(4):
        llm.llm_engine.step()
    busy, total, ranked = profiled(llm, 2)
    print(json.dumps(dict(prefill=length, budget=budget, busy=round(busy, 4))), flush=True)
    show(f"prefill of {budget} tokens", 2, busy, total, ranked, args.kernels or 10)
    finish(llm)


class LateStepRecorder:
    """Records seconds of engine steps by kind, and of those that were submitted late."""

    def __init__(self, engine):
        self.seconds, self.counts = {}, {}
        self.kind, self.is_late, self._before = "none", False, None
        submit = engine._executor.submit

        def timed_submit(plan):
            pending = submit(plan)
            tokens = sum(row.count for row in plan.rows)
            self.kind = "decode" if tokens == len(plan.rows) else "mixed"
            done, self._before = getattr(self._before, "done", None), pending
            self.is_late = done is None or done.query()
            return pending

        engine._executor.submit = timed_submit

    def step(self, seconds):
        for name in (self.kind, "late " + self.kind) if self.is_late else (self.kind,):
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.counts[name] = self.counts.get(name, 0) + 1


def batch(llm, clock, share, recorder, number):
    """Run offline.py's batch, or a share of it. number: selects the prompts."""
    for part in (share / 8, share):
        prompts, outs = case_specs(random.Random(f"batch-{number}"), 100000)["batch"]
        count = int(len(prompts) * part)
        for i, (ids, tokens) in enumerate(zip(prompts[:count], outs)):
            params = SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=tokens,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            llm.llm_engine.add_request(f"b{number}-{part}-{i}", {"prompt_token_ids": ids}, params)
        clock.take()
        recorder.seconds.clear(), recorder.counts.clear()
        before = start = time.perf_counter()
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            now = time.perf_counter()
            recorder.step(now - before)
            before = now
        wall = before - start
    parts = {name: round(seconds, 2) for name, seconds in clock.take().items()}
    shown = {n: [recorder.counts[n], round(s, 2)] for n, s in sorted(recorder.seconds.items())}
    late = sum(s for n, s in recorder.seconds.items() if n.startswith("late")) / wall
    print(
        json.dumps(
            dict(
                batch=count,
                round=number,
                s=round(wall, 2),
                out_tok_s=round(sum(outs[:count]) / wall),
                late=round(late, 4),
                other=round(wall - sum(parts.values()), 2),
                **parts,
                steps=shown,
            )
        ),
        flush=True,
    )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--rows", default="1,32,256,1024")
    ap.add_argument("--prompt", type=int, default=64)
    ap.add_argument("--warm", type=int, default=12)
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--profile", type=int, default=6)
    ap.add_argument("--prefill", type=int, default=0, help="also prompts of this length")
    ap.add_argument("--kernels", type=int, default=0, help="how many kernels to list")
    ap.add_argument("--batch", type=float, default=0, help="share of the batch to run")
    ap.add_argument("--rounds", type=int, default=2, help="how many batches")
    ap.add_argument("--kw", default="{}")
    args = ap.parse_args()
    start = time.perf_counter()
    llm = LLM(args.model, load_format="dummy", use_tqdm_on_load=False, **json.loads(args.kw))
    print(f"ready in {time.perf_counter() - start:.1f} s", flush=True)
    rng = random.Random(0)
    clock = PartTimer(llm.llm_engine.engine)
    for rows in map(int, filter(None, args.rows.split(","))):
        decode(llm, clock, rng, rows, args)
    if args.prefill:
        prefill(llm, rng, args.prefill, args)
    recorder = LateStepRecorder(llm.llm_engine.engine) if args.batch else None
    for number in range(1, args.rounds + 1) if args.batch else ():
        batch(llm, clock, args.batch, recorder, number)


if __name__ == "__main__":
    main()
