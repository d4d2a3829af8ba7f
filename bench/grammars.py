"""What structured output costs those who did not ask for it, and those who did. One JSON line a result.

usage: python bench/grammars.py flood [--schemas 1000] [--at-once 8] [--rounds 3]
       python bench/grammars.py overhead [--rows 32] [--tokens 128] [--rounds 5]

flood: 16 streams decode all the while, on the embedded model, and the time between two tokens of a
stream is taken where the engine tells them. Three runs a round: alone; while requests come and go
with a schema of their own each; while as many plain ones of as many tokens do. `over_alone` and
`over_plain` compare the second with the others: what the streams notice, and what grammars cost.

overhead: tokens per second of the same requests with and without a JSON schema, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from quire import LLM, SamplingParams
from quire.core.constraint import Constraint
from quire.engine.loop import Engine
from quire.grammar import admit
from quire.text.inputs import InputProcessor, Prepared

STREAMS = 16
STREAM = 900
"""Tokens of a stream; when one ends, another begins."""
ANSWER = 128
"""Tokens of a request of the flood, at most."""


def schema(number: int) -> dict[str, Any]:
    """One of a kind: a record as people ask for."""
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


def bound_to(number: int) -> Constraint:
    return admit.constraint(admit.json_form(schema(number)))


class Bench:
    """An engine driven step by step."""

    def __init__(self) -> None:
        self.llm = LLM(
            "embedded",
            max_model_len=1024,
            max_num_seqs=64,
            num_gpu_blocks_override=2048,  # few, so that all are touched before memory is measured
            disable_log_stats=True,
        )
        self.engine: Engine = self.llm.llm_engine.engine
        self.inputs: InputProcessor = self.llm.llm_engine.inputs
        self.count = 0
        self.said = 0  # tokens of the flood

    def request(
        self, tokens: int, constraint: Constraint | None = None, *, ignore_eos: bool = True
    ) -> Prepared:
        self.count += 1
        params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=ignore_eos, seed=7)
        return self.inputs.request(
            f"Request {self.count} wants a record: ",
            params,
            request_id=f"b{self.count}",
            constraint=constraint,
        )

    def streams(self, flood: Iterator[Prepared], at_once: int, least_s: float) -> list[float]:
        """Gaps between tokens of streams, while the flood comes, and for so long at least."""
        names = [self._begin(self.request(STREAM)) for _ in range(STREAMS)]
        self.said = 0
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
                self.said += len(update.token_ids)
                if update.finish is not None:
                    assert update.finish != "error", update.error
                    running.discard(name)
        for name in last:
            self.engine.abort(name)
        self.engine.settle()
        return gaps

    def _begin(self, prepared: Prepared) -> str:
        self.engine.add(prepared.request)
        return prepared.request.id


def p99(gaps: Sequence[float]) -> float:
    return statistics.quantiles(gaps, n=100)[98]


def memory() -> tuple[int, int]:
    """MiB that this process holds, and its workers."""
    own = psutil.Process()
    workers = sum(one.memory_info().rss for one in own.children())
    return own.memory_info().rss >> 20, workers >> 20


def flood(args: argparse.Namespace) -> None:
    bench = Bench()
    count, at_once = args.schemas, args.at_once
    first = 0
    # The first worker, what is made once for a vocabulary, and every block of the cache
    bench.streams(iter([bench.request(ANSWER, bound_to(-1))]), 1, args.least)
    before = memory()
    for number in range(args.rounds):
        made = {}
        tokens = ANSWER
        for kind in ("alone", "schemas", "plain"):
            prepared = [
                bench.request(tokens, bound_to(first + i) if kind == "schemas" else None)
                for i in range(count if kind != "alone" else 0)
            ]
            began = time.perf_counter()
            gaps = bench.streams(iter(prepared), at_once, args.least)
            seconds = time.perf_counter() - began
            if kind == "schemas":
                tokens = round(bench.said / count)
            made[kind] = {
                "p50_ms": round(statistics.median(gaps) * 1e3, 3),
                "p99_ms": round(p99(gaps) * 1e3, 3),
                "max_ms": round(max(gaps) * 1e3, 2),
                "s": round(seconds, 2),
            }
        first += count
        after = memory()
        last = made["schemas"]["p99_ms"]
        tell(
            case="flood",
            round=number,
            **made,
            over_alone=round(last / made["alone"]["p99_ms"], 3),
            over_plain=round(last / made["plain"]["p99_ms"], 3),
            rss_before_mib=before,
            rss_after_mib=after,
            tokens_each=tokens,
            **bench.engine.snapshot().grammars._asdict(),
        )
    bench.engine.shutdown()


def overhead(args: argparse.Namespace) -> None:
    bench = Bench()
    items = {"type": "array", "items": {"type": "string"}, "minItems": 2}
    wanted = {"type": "object", "properties": {"words": items}, "required": ["words"]}
    constraint = admit.constraint(admit.json_form(wanted))
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(args.rounds + 1):
        for is_bound in (False, True):
            speed = _speed(bench, args, constraint if is_bound else None)
            if number:
                speeds[is_bound].append(speed)
    plain, with_schema = (statistics.median(speeds[one]) for one in (False, True))
    tell(
        case="overhead",
        rows=args.rows,
        tokens=args.tokens,
        plain_tok_s=round(plain, 1),
        schema_tok_s=round(with_schema, 1),
        share=round(with_schema / plain, 3),
    )
    bench.engine.shutdown()


def _speed(bench: Bench, args: argparse.Namespace, constraint: Constraint | None) -> float:
    """Tokens per second."""
    for _ in range(args.rows):
        bench._begin(bench.request(args.tokens, constraint))
    began, tokens = time.perf_counter(), 0
    while not bench.engine.empty:
        for update in bench.engine.step():
            assert update.finish != "error", update.error
            tokens += len(update.token_ids)
    return tokens / (time.perf_counter() - began)


def tell(**found: Any) -> None:
    print(json.dumps(found), flush=True)


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
    one.add_argument("--tokens", type=int, default=128)
    one.add_argument("--rounds", type=int, default=5)
    one.set_defaults(run=overhead)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
