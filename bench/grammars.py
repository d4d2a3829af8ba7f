"""Measures what structured output costs plain requests and constrained ones. One JSON line a
result.

usage: python bench/grammars.py flood [--schemas 1000] [--at-once 8] [--rounds 3]
       python bench/grammars.py overhead [--rows 32] [--requests 128] [--tokens 128] [--rounds 5]

flood: 16 streams decode on the embedded model, and the time between two tokens of a stream is
measured at the engine's output. Three runs a round: alone; with other requests, each with its own
schema; with as many plain requests of as many tokens. `over_alone` and `over_plain` compare the
second with the others: the cost of the requests, and of the grammars.

overhead: tokens per second of the same requests with and without a JSON schema, in turns, always so
many rows at once. The length of constrained texts varies, so a first run counts the tokens of each
request, and plain requests have the same lengths: both arms have the same steps. `share` is the
median of each round's quotient, `cpu_share` that of processor time. Two kinds of text: "asked", the
prompt requests the JSON of the constraint, greedily; "rambling", the prompt requests nothing, at
temperature 1, so that the mask rejects every third token, and max_tokens ends the text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psutil

from quire import LLM, SamplingParams
from quire.core.constraint import Constraint
from quire.engine.core.engine_core import EngineCore
from quire.grammar.frontends import validate
from quire.text.input_processor import InputProcessor, PreparedRequest

STREAMS = 16
STREAM = 900
"""Tokens of a stream; when one ends, another begins."""
ANSWER = 128
"""Tokens of a request of the flood, at most."""


FIRST = ("Lena", "Tom", "Ana", "Omar", "Mia", "Jonas", "Sara", "Ivan")
LAST = ("Fischer", "Berg", "Silva", "Haddad", "Novak", "Weber", "Moreau", "Rossi")
WORDS: dict[str, Any] = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 2}},
    "required": ["words"],
}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "product": {"type": "string"},
        "quantity": {"type": "integer"},
        "price": {"type": "number"},
    },
    "required": ["name", "product", "quantity", "price"],
}


def schema(number: int) -> dict[str, Any]:
    """Return a distinct schema of a typical record."""
    names = [f"{word}_{number}" for word in ("name", "size", "kind")]
    return {
        "type": "object",
        "properties": {
            names[0]: {"type": "string", "maxLength": 10},
            names[1]: {"type": "integer", "minimum": 0, "maximum": number + 10},
            names[2]: {"enum": ["a", "b", f"c{number}"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}},
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                "required": ["x"],
            },
        },
        "required": [names[2]],
        "additionalProperties": False,
    }


def constraint_of(number: int) -> Constraint:
    return validate.build_constraint(validate.json_node(schema(number)))


class Workload(NamedTuple):
    """Requests, the schema of one arm, and the number of concurrent rows."""

    prompts: Sequence[str]
    constraint: Constraint
    most: int
    temperature: float
    rows: int


class Run(NamedTuple):
    """Seconds of some requests, and the tokens of each."""

    seconds: float
    cpu: float
    lengths: list[int]


class Bench:
    """An engine driven step by step."""

    def __init__(self) -> None:
        self.llm = LLM(
            "embedded",
            max_model_len=1024,
            max_num_seqs=64,
            num_gpu_blocks_override=2048,  # few, so that all are used before memory is measured
            disable_log_stats=True,
        )
        self.engine: EngineCore = self.llm.llm_engine.engine
        self.inputs: InputProcessor = self.llm.llm_engine.inputs
        self.count = 0
        self.flood_tokens = 0  # tokens of the flood

    def request(
        self, tokens: int, constraint: Constraint | None = None, *, ignore_eos: bool = True
    ) -> PreparedRequest:
        self.count += 1
        params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=ignore_eos, seed=7)
        return self.inputs.process(
            f"Request {self.count} wants a record: ",
            params,
            request_id=f"b{self.count}",
            constraint=constraint,
        )

    def streams(
        self, flood: Iterator[PreparedRequest], at_once: int, least_s: float
    ) -> list[float]:
        """Return gaps between tokens of the streams during the flood, at least `least_s` long."""
        names = [self._begin(self.request(STREAM)) for _ in range(STREAMS)]
        self.flood_tokens = 0
        last = dict.fromkeys(names, 0.0)
        gaps: list[float] = []
        running: set[str] = set()
        over, began = False, time.perf_counter()
        while not over or running or time.perf_counter() - began < least_s:
            while not over and len(running) < at_once:
                more = next(flood, None)
                over = more is None
                if more is not None:
                    running.add(self._begin(more))
            for update in self.engine.step():
                now, name = time.perf_counter(), update.request_id
                if name in last:
                    gaps.append(now - last[name]) if last[name] else None
                    last[name] = now
                    if update.finish is not None:
                        del last[name]
                        last[self._begin(self.request(STREAM))] = 0.0
                    continue
                self.flood_tokens += len(update.token_ids)
                if update.finish is not None:
                    assert update.finish != "error", update.error
                    running.discard(name)
        for name in last:
            self.engine.abort(name)
        self.engine.drain()
        return gaps

    def order(self, number: int) -> str:
        """Return a prompt that requests JSON which the model can write."""
        name = f"{FIRST[number % len(FIRST)]} {LAST[number // len(FIRST) % len(LAST)]}"
        text = f"{name} bought {number % 17 + 2} of the red lamp for {number % 90 + 9} dollars."
        question = f"Extract name, product, quantity and price as JSON: {text}"
        message = [{"role": "user", "content": question}]
        prompt: str = self.llm.get_tokenizer().apply_chat_template(
            message, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        return prompt

    def ramble(self, number: int) -> str:
        """Return a prompt that requests nothing in particular."""
        return f"Request {number} wants a record: "

    def closed_loop(self, workload: Workload, lengths: Sequence[int] | None = None) -> Run:
        """Run the requests, `rows` of them at once. lengths: tokens of each, without a schema."""
        prepared = []
        for number, prompt in enumerate(workload.prompts):
            params = SamplingParams(
                max_tokens=lengths[number] if lengths else workload.most,
                temperature=workload.temperature,
                ignore_eos=True,
                seed=7,
            )
            self.count += 1
            prepared.append(
                self.inputs.process(
                    prompt,
                    params,
                    request_id=f"b{self.count}",
                    constraint=None if lengths else workload.constraint,
                )
            )
        waiting, counts = iter(prepared), dict.fromkeys((one.request.id for one in prepared), 0)
        began, cpu = time.perf_counter(), time.process_time()
        for one in itertools.islice(waiting, workload.rows):
            self._begin(one)
        while not self.engine.empty:
            for update in self.engine.step():
                assert update.finish != "error", update.error
                counts[update.request_id] += len(update.token_ids)
                if update.finish is not None and (more := next(waiting, None)) is not None:
                    self._begin(more)
        spent = time.perf_counter() - began
        return Run(spent, time.process_time() - cpu, list(counts.values()))

    def _begin(self, prepared: PreparedRequest) -> str:
        self.engine.add(prepared.request)
        return prepared.request.id


def p99(gaps: Sequence[float]) -> float:
    return statistics.quantiles(gaps, n=100)[98]


def memory() -> tuple[int, int]:
    """Return the MiB of this process and of its workers."""
    own = psutil.Process()
    workers = sum(one.memory_info().rss for one in own.children())
    return own.memory_info().rss >> 20, workers >> 20


def flood(args: argparse.Namespace) -> None:
    bench = Bench()
    count, at_once = args.schemas, args.at_once
    first = 0
    # warm-up: the first worker, the tables of the vocabulary, and every block of the cache
    bench.streams(iter([bench.request(ANSWER, constraint_of(-1))]), 1, args.least)
    before = memory()
    for number in range(args.rounds):
        results = {}
        tokens = ANSWER
        for kind in ("alone", "schemas", "plain"):
            prepared = [
                bench.request(tokens, constraint_of(first + i) if kind == "schemas" else None)
                for i in range(count if kind != "alone" else 0)
            ]
            began = time.perf_counter()
            gaps = bench.streams(iter(prepared), at_once, args.least)
            seconds = time.perf_counter() - began
            if kind == "schemas":
                tokens = round(bench.flood_tokens / count)
            results[kind] = {
                "p50_ms": round(statistics.median(gaps) * 1e3, 3),
                "p99_ms": round(p99(gaps) * 1e3, 3),
                "max_ms": round(max(gaps) * 1e3, 2),
                "s": round(seconds, 2),
            }
        first += count
        after = memory()
        last = results["schemas"]["p99_ms"]
        print_result(
            case="flood",
            round=number,
            **results,
            over_alone=round(last / results["alone"]["p99_ms"], 3),
            over_plain=round(last / results["plain"]["p99_ms"], 3),
            rss_before_mib=before,
            rss_after_mib=after,
            tokens_each=tokens,
            **bench.engine.snapshot().grammars._asdict(),
        )
    bench.engine.shutdown()


def overhead(args: argparse.Namespace) -> None:
    bench = Bench()
    cases = {
        "asked": ([bench.order(n) for n in range(args.requests)], ORDER, 0.0),
        "rambling": ([bench.ramble(n) for n in range(args.requests)], WORDS, 1.0),
    }
    for name, (prompts, wanted, temperature) in cases.items():
        constraint = validate.build_constraint(validate.json_node(wanted))
        workload = Workload(prompts, constraint, args.tokens, temperature, args.rows)
        bench.closed_loop(workload)  # warm-up
        lengths = bench.closed_loop(workload).lengths
        rounds = [
            (bench.closed_loop(workload, lengths), bench.closed_loop(workload))
            for _ in range(args.rounds)
        ]
        assert all(one.lengths == lengths for pair in rounds for one in pair)
        total = sum(lengths)
        plain, constrained = (statistics.median(one.seconds for one in arm) for arm in zip(*rounds))
        print_result(
            case="overhead",
            text=name,
            rows=args.rows,
            tokens=total,
            plain_tok_s=round(total / plain, 1),
            schema_tok_s=round(total / constrained, 1),
            share=round(statistics.median(a.seconds / b.seconds for a, b in rounds), 3),
            shares=[round(a.seconds / b.seconds, 3) for a, b in rounds],
            cpu_share=round(statistics.median(a.cpu / b.cpu for a, b in rounds), 3),
        )
    bench.engine.shutdown()


def print_result(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    cases = parser.add_subparsers(required=True)
    one = cases.add_parser("flood")
    one.add_argument("--schemas", type=int, default=1000)
    one.add_argument("--at-once", type=int, default=8)
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--least", type=float, default=10.0, help="seconds of a run at least")
    one.set_defaults(run=flood)
    one = cases.add_parser("overhead")
    one.add_argument("--rows", type=int, default=32)
    one.add_argument("--requests", type=int, default=128)
    one.add_argument("--tokens", type=int, default=128)
    one.add_argument("--rounds", type=int, default=5)
    one.set_defaults(run=overhead)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
