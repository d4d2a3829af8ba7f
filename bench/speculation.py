"""Measures speculative decoding beside the same engine without drafts, in turn in one process.

    python bench/speculation.py pace [MODEL] [--rows 1,8,64] [--acceptance 0,0.3,0.6,0.9]
    python bench/speculation.py switch [MODEL]
    python bench/speculation.py host
    python bench/speculation.py texts [MODEL]

MODEL: a folder or "embedded"; folders of make_models.py have no weights: add --load-format dummy.
On a GPU such a model is made one whose next token depends on the last one alone (its layers add
nothing, and take as long): else nearly equal logits would part the texts, and drafts with them.

pace: tokens per second with drafts over without, of rows that decode side by side; as many wait
    for each --turn, so that all rows are busy. The drafter knows the answers, and each draft is
    right with a probability. In place of a number, `ngram` and `suffix` are these drafters on
    sampled text, and `edit-ngram` and `edit-suffix` on an edit: the answer, of which one token in
    100 is another, stands before the prompt, as far as the drafter sees. A round is one run of each
    kind; the ratio is that of the quickest runs, `median` that of the pairs. One engine runs all,
    and forgets before each line what drafts cost and how many were accepted.
    --cpu-time: by seconds of the processor, also where the engine measures steps: for a machine
    that has other work. Set OMP_NUM_THREADS=1 then, as threads that wait take time too.
switch: acceptance is 1, then 0: drafts of each step after the change.
host: microseconds of the drafters of the core for a token, and for a proposal.
texts: share of greedy texts in bfloat16 that differ with drafts, and between two batch sizes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from types import SimpleNamespace

from quire.config.engine_config import SpeculationSection
from quire.core.drafters.base import HostDrafter
from quire.core.scheduling.draft_costs import DraftCosts
from quire.core.scheduling.draft_trials import DraftTrials
from quire.core.scheduling.drafting import FIRST_MEAN
from quire.core.scheduling.limits.max_seqs import MaxSeqsLimit
from quire.core.types import Request, StopConditions
from quire.engine.startup.scheduler_setup import HOST_DRAFTERS

PROMPT = 32


class KnownDrafter(HostDrafter):
    """Proposes what the model is known to generate; each token is right with a probability."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], rate: float) -> None:
        self.answers = answers
        self.set_rate(rate)

    def set_rate(self, rate: float) -> None:
        draw = random.Random(5).random
        self.drafts = {
            prompt: [token if draw() < rate else (token + 1) % 4000 for token in answer]
            for prompt, answer in self.answers.items()
        }

    def propose(self, seq, known, most):
        at = known - seq.prompt_len
        return self.drafts.get(seq.request.prompt, [])[at : at + most]

    def remove(self, seq):
        pass


class EditDrafter(HostDrafter):
    """A drafter of the core that reads a text before each prompt: the answer with other tokens."""

    def __init__(self, drafter: HostDrafter, answers: dict[tuple[int, ...], list[int]]) -> None:
        draw = random.Random(7)
        self.drafter, self.views = drafter, {}
        self.texts = {
            prompt: [token if draw.randrange(100) else draw.randrange(4000) for token in answer]
            for prompt, answer in answers.items()
        }

    def propose(self, seq, known, most):
        text, view = self.texts.get(seq.request.prompt), self.views.get(seq)
        if text is None:
            return ()
        if view is None:
            view = self.views[seq] = type("Seq", (), {})()
            view.request, view.tokens = seq.request, [*text]
            view.prompt_len = len(text) + seq.prompt_len
        view.tokens += seq.tokens[len(view.tokens) - len(text) : known]
        return self.drafter.propose(view, len(text) + known, most)

    def remove(self, seq):
        view = self.views.pop(seq, None)
        if view is not None:
            self.drafter.remove(view)


class Bench:
    """Requests of so many rows side by side, and what an engine generates without drafts."""

    def __init__(self, args: argparse.Namespace, llm, rows: int, tokens: int, sampled: bool):
        from quire import SamplingParams

        self.params = lambda drafts, count: SamplingParams(
            temperature=1.0 if sampled else 0.0,
            seed=1 if sampled else None,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            speculative=drafts,
        )
        self.llm = llm
        for limit in self.scheduler._budgets.all:
            if isinstance(limit, MaxSeqsLimit):
                limit.max_seqs = rows  # the engine has seats for the most rows of all lines
        draw = random.Random(rows)
        vocab = self.llm.llm_engine.config.model.vocab
        self.prompts = [
            [draw.randrange(20, vocab) for _ in range(PROMPT)] for _ in range(rows * args.turns)
        ]
        self.lengths = [tokens] * len(self.prompts)  # else different ones, as on a server
        if rows > 1 and args.turns > 1:
            self.lengths = [draw.randrange(tokens // 2, 3 * tokens // 2) for _ in self.prompts]
        self.clock = time.process_time if args.cpu_time else time.perf_counter
        if args.cpu_time:
            self.llm.llm_engine.engine._time_accounting._clock = self.clock
        self.answers: dict[tuple[int, ...], list[int]] = {}
        for one, out in zip(self.prompts, self.run(drafts=False)[1]):
            self.answers[tuple(one)] = out

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine._scheduler

    def draft_with(self, drafter: HostDrafter) -> None:
        """Draft with this one, as an engine that was just started."""
        drafting = self.scheduler._drafting
        drafting._sources = (drafter,)
        drafting._costs, drafting._trials = DraftCosts(), DraftTrials()
        drafting._means[:] = [FIRST_MEAN] * len(drafting._means)
        drafting._tenant_means.clear()

    def run(self, *, drafts: bool) -> tuple[float, list[list[int]]]:
        prompts = [{"prompt_token_ids": one} for one in self.prompts]
        params = [self.params(drafts, count) for count in self.lengths]
        began = self.clock()
        outs = self.llm.generate(prompts, params, use_tqdm=False)
        took = self.clock() - began
        return took, [list(one.outputs[0].token_ids) for one in outs]


def make_predictable(llm) -> None:
    """Let layers add nothing, and the head give each token one that follows it."""
    import torch

    model = llm.llm_engine.engine._executor.runner.model
    with torch.inference_mode():
        for layer in model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table, head = model.embed_tokens.weight, model.lm_head.weight
        if head.data_ptr() != table.data_ptr():
            order = torch.Generator().manual_seed(1)
            head[torch.randperm(len(table), generator=order).to(table.device)] = table


def build_engine(args: argparse.Namespace, rows: int):
    from quire import LLM

    llm = LLM(
        args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=rows,
        enable_prefix_caching=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": args.drafts},
    )
    if args.load_format == "dummy" and llm.llm_engine.config.device.kind == "cuda":
        make_predictable(llm)
    return llm


def drafter_of(kind: str, drafts: int, answers: dict[tuple[int, ...], list[int]]) -> HostDrafter:
    name = kind.removeprefix("edit-")
    if name not in HOST_DRAFTERS.names():
        return KnownDrafter(answers, float(kind))
    section = SpeculationSection(method=name, max_drafts=drafts, lookup_min=2, suffix_requests=0)
    made = HOST_DRAFTERS.load(name).build(section)
    return made if name == kind else EditDrafter(made, answers)


def measure_pace(args: argparse.Namespace) -> None:
    all_rows = [*map(int, args.rows.split(","))]
    llm = build_engine(args, max(all_rows))
    for rows in all_rows:
        benches: dict[bool, Bench] = {}
        for kind in args.acceptance.split(","):
            sampled = kind in HOST_DRAFTERS.names()
            if sampled not in benches:
                benches[sampled] = Bench(args, llm, rows, args.tokens, sampled)
            bench = benches[sampled]
            bench.draft_with(drafter_of(kind, args.drafts, bench.answers))
            before = bench.scheduler.draft_counts
            bench.run(drafts=False)
            pairs = []
            for i in range(args.rounds):
                order = (False, True) if i % 2 else (True, False)
                times = {drafts: bench.run(drafts=drafts) for drafts in order}
                same = times[True][1] == times[False][1]
                pairs.append((times[False][0], times[True][0], same))
            off, on = (min(pair[i] for pair in pairs) for i in (0, 1))
            total, tokens = bench.scheduler.draft_counts, sum(bench.lengths)
            drafted = total.tokens - before.tokens
            emit(
                case="pace",
                model=args.model,
                drafts=kind,
                rows=rows,
                off_tok_s=tokens / off,
                on_tok_s=tokens / on,
                ratio=off / on,
                median=statistics.median(one[0] / one[1] for one in pairs),
                first=pairs[0][0] / pairs[0][1],
                drafted=drafted / (tokens * args.rounds),
                accepted=(sum(total.accepted) - sum(before.accepted)) / max(drafted, 1),
                same=all(one[2] for one in pairs),
            )


def measure_switch(args: argparse.Namespace) -> None:
    args.turns = 1
    bench = Bench(args, build_engine(args, 1), 1, args.tokens, sampled=False)
    known = KnownDrafter(bench.answers, 1.0)
    bench.draft_with(known)
    right, wrong = known.drafts, KnownDrafter(bench.answers, 0.0).drafts
    bench.run(drafts=True)
    engine, drafts = bench.llm.llm_engine.engine, []
    submit = engine._executor.submit

    def watch(plan):
        if len(drafts) < args.tokens and plan.rows:
            length = len(plan.rows[0].seq.tokens) - PROMPT
            known.drafts = right if length < args.tokens // 2 else wrong
            drafts.append((length, plan.num_drafts))
        return submit(plan)

    engine._executor.submit = watch
    bench.run(drafts=True)
    before = [n for length, n in drafts if length < args.tokens // 2]
    after = [n for length, n in drafts if length >= args.tokens // 2]
    emit(case="switch", model=args.model, before=statistics.fmean(before[-20:]), after=after[:80])


def measure_host(args: argparse.Namespace) -> None:
    """Each text is random, repeats, or does so in part; k drafts are proposed behind each token."""
    for method in ("ngram", "suffix"):
        for text in ("random", "repeating", "mixed"):
            calls, tokens = zip(*[host_time(method, text) for _ in range(args.rounds)])
            us = {"us_per_token": min(tokens), "us_per_proposal": min(calls)}
            emit(case="host", method=method, text=text, **us)


def host_time(method: str, text: str, rows: int = 16, prompt: int = 2000, tokens: int = 500):
    drafter = HOST_DRAFTERS.load(method).build(SpeculationSection(method=method, max_drafts=8))
    draw, made = random.Random(3), []
    for i in range(rows):
        words = [[draw.randrange(30_000) for _ in range(40)] for _ in range(12)]
        if text == "random":
            ids = [draw.randrange(30_000) for _ in range(prompt + tokens)]
        elif text == "repeating":
            ids = words[0] * ((prompt + tokens) // 40 + 1)
        else:
            ids = [t for _ in range((prompt + tokens) // 40 + 1) for t in draw.choice(words)]
        request = Request(str(i), tuple(ids[:prompt]), StopConditions(tokens))
        made.append(
            SimpleNamespace(request=request, tokens=ids[: prompt + tokens], prompt_len=prompt)
        )
    seqs = [type("Seq", (), vars(one))() for one in made]
    for seq in seqs:
        for known in range(8):
            drafter.propose(seq, prompt - 8 + known, 8)
    calls, began = 0, time.thread_time()
    for seq in seqs:
        known = prompt
        while known < prompt + tokens:
            drafts = drafter.propose(seq, known, 8)
            calls += 1
            known += 1  # and those that are accepted
            while drafts and known < prompt + tokens and drafts[0] == seq.tokens[known - 1]:
                drafts, known = drafts[1:], known + 1
    took = time.thread_time() - began
    for seq in seqs:
        drafter.remove(seq)
    return 1e6 * took / calls, 1e6 * took / (rows * tokens)


def measure_texts(args: argparse.Namespace) -> None:
    rows, args.turns = max(map(int, args.rows.split(","))), 1
    bench = Bench(args, build_engine(args, rows), rows, args.tokens, sampled=False)
    bench.scheduler._drafting._adaptive = False
    bench.draft_with(KnownDrafter(bench.answers, 0.8))
    with_drafts = bench.run(drafts=True)[1]
    prompts, alone = bench.prompts, []
    for one in prompts:
        bench.prompts, bench.lengths = [one], [args.tokens]
        alone += bench.run(drafts=False)[1]
    together = list(bench.answers.values())
    differ = lambda these: sum(a != b for a, b in zip(these, together)) / rows  # noqa: E731
    emit(
        case="texts",
        model=args.model,
        dtype=args.dtype,
        texts=rows,
        tokens=args.tokens,
        with_drafts=differ(with_drafts),
        alone=differ(alone),
    )


def emit(**values: object) -> None:
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps(rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=("pace", "switch", "host", "texts"))
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--acceptance", default="0,0.3,0.6,0.9")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--load-format", default="auto")
    args = parser.parse_args()
    globals()[f"measure_{args.case}"](args)


if __name__ == "__main__":
    main()
