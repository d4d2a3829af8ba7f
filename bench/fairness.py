"""What one key's load, or one long prompt, costs everybody else. JSON lines.

    python bench/fairness.py keys [--rate 2] [--times 100] [--seconds 20] [--limit 4]
    python bench/fairness.py long [--tokens 30000] [--streams 16] [--context 200] [--out 400]
                                  [--shorts 0] [--seconds 20]

Both: [--model FOLDER] [--options JSON]. Without a folder an engine of the embedded model's shape with
a longer context and made-up weights. No HTTP: the engine in this process, whose steps are made one
after the other; a request's time begins when it is due, also if a step is under way then.

keys: one key asks `rate` times a second, at random; another as often, or `times` as often (prompts of
256 tokens, 16 out, never the same). Cases: the first alone; both at one load; the other at `times`
the load with as many tokens a minute as the first uses; with --limit requests at a time; without
limits; and both as one tenant, which is first come, first served. `grows` is p95 of the first key's time to first token over that of "both".
Each line also says how good the prediction was that each request got when it came in: predicted over
what it was, at the 10th, 50th and 90th percentile, and the share that was within half and double.

long: `streams` sequences decode, each `context` tokens in; where one has said `out`, it is asked for
again (its prompt is cached), so steps stay as they are. Then a prompt of `tokens` tokens comes, and
`shorts` of 256 every second. Seconds between two tokens of a stream, alone and beside; the time to
first token of the long prompt alone, and beside; of the short ones.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import tempfile
import time
from pathlib import Path

from quire import embedded
from quire.config.options import Options
from quire.core.admission.admission_control import AdmissionControl
from quire.core.params import SamplingParams
from quire.core.tenant_limits import TenantLimits
from quire.core.types import Request, StopConditions
from quire.engine.build import build_engine
from quire.errors import Overloaded

PROMPT, OUT, SHORT = 256, 16, 256
WARM_S = 3.0


class Driver:
    """An engine, requests that come when they are due, and when each said what."""

    def __init__(self, model, options):
        self.engine = build_engine(
            Options.from_flat({"model": model, **options}), server=True
        ).engine
        limits = self.engine._scheduler._limits
        self.door = next(one for one in limits if isinstance(one, AdmissionControl))
        self.draw = random.Random(1)
        self.made = 0
        self.clear()

    def clear(self):
        self.due = []  # (when, number, request)
        self.sent, self.first, self.last, self.gaps = {}, {}, {}, []
        self.predicted, self.refused, self.done = {}, {}, {}
        self.endless = {}  # name -> prompt and tokens of what is asked for when it ends

    def ask(self, at, name, tokens, out, *, again=None, **fields):
        """tokens: of a prompt that was never seen, or the prompt itself. again: tokens to ask for
        when it has ended."""
        self.made += 1
        prompt = tokens
        if isinstance(tokens, int):
            prompt = tuple(self.draw.randrange(10, 4000) for _ in range(tokens))
        if again:
            self.endless[f"{name}-{self.made}"] = prompt, again
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
        made = Request(
            f"{name}-{self.made}", prompt, StopConditions(out), params, arrived_at=at, **fields
        )
        heapq.heappush(self.due, (at, self.made, made))
        return made.id

    def run(self, until):
        """Steps until `until()` is true; time passes as it does."""
        while not until():
            now = time.monotonic()
            while self.due and self.due[0][0] <= now:
                self._send(heapq.heappop(self.due)[2])
            if self.engine.idle:
                time.sleep(0.0005)
                continue
            self._take(self.engine.step(), time.monotonic())

    def _send(self, request):
        kind = request.id.rpartition("-")[0]
        predicted = self.door.predicted_ttft_s(
            request.tenant, request.tenant_limits.weight, len(request.prompt)
        )
        late = time.monotonic() - request.arrived_at
        try:
            self.engine.check_batch([request])
            self.engine.add(request)
        except Overloaded:
            self.refused[kind] = self.refused.get(kind, 0) + 1
            return
        self.sent[request.id] = request.arrived_at
        if predicted is not None:
            self.predicted[request.id] = predicted + late

    def _take(self, updates, now):
        for update in updates:
            name = update.request_id
            if update.token_ids:
                if name in self.last:
                    self.gaps.append((now, name, now - self.last[name]))
                else:
                    self.first[name] = now - self.sent.get(name, now)
                self.last[name] = now
            if update.finish is not None:
                kind = name.rpartition("-")[0]
                self.done[kind] = self.done.get(kind, 0) + 1
                if name in self.endless:
                    prompt, out = self.endless.pop(name)
                    self.ask(now, kind, prompt, out, again=out)

    def empty(self):
        """End everything."""
        for name in list(self.sent):
            self.engine.abort(name)
        self.clear()
        while not self.engine.empty:
            self.engine.step()


def at(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def ms(values, share):
    found = at(values, share)
    return None if found is None else round(found * 1e3, 2)


def say(**fields):
    print(json.dumps(fields), flush=True)


# -- keys ----------------------------------------------------------------------------------------


def load(driver, a, name, rate, **fields):
    """Requests of one key for the whole case, from now on."""
    began, whole = time.monotonic(), WARM_S + a.seconds
    for _ in range(int(rate * whole)):
        driver.ask(began + driver.draw.uniform(0, whole), name, PROMPT, OUT, **fields)


def case(driver, a, name, loads):
    """The time to first token of the first key beside these loads."""
    for kind, rate, fields in loads:
        load(driver, a, kind, rate, **fields)
    began = time.monotonic()
    driver.run(lambda: time.monotonic() - began > WARM_S + a.seconds)
    mine = {
        one: driver.first.get(one, time.monotonic() - at)
        for one, at in driver.sent.items()
        if one.startswith("first-") and at - began > WARM_S and time.monotonic() - at > 1.0
    }
    ratios = [
        driver.predicted[one] / driver.first[one] for one in driver.first if one in driver.predicted
    ]
    told = dict(
        bench="fairness keys",
        case=name,
        requests=len(mine),
        ttft_p50_ms=ms(mine.values(), 0.5),
        ttft_p95_ms=ms(mine.values(), 0.95),
        first_refused=driver.refused.get("first", 0),
        other_done=driver.done.get("other", 0),
        other_refused=driver.refused.get("other", 0),
        other_ttft_p50_ms=ms([v for k, v in driver.first.items() if k.startswith("other-")], 0.5),
        predicted_over_true=[round(at(ratios, q), 2) for q in (0.1, 0.5, 0.9)] if ratios else None,
        within_double=round(sum(0.5 <= r <= 2 for r in ratios) / max(len(ratios), 1), 2),
    )
    driver.empty()
    return told


def keys(driver, a):
    one, other = {"tenant": b"one"}, {"tenant": b"other"}
    few = {**other, "terms": TenantLimits(max_requests=a.limit)}
    same = {"tenant": b"one"}
    allowed = TenantLimits(tokens_per_minute=int(a.rate * (PROMPT + OUT) * 60))
    metered = {"tenant": b"metered", "terms": allowed}
    cases = {
        "warm": [("first", a.rate, one), ("other", a.rate * a.times, few)],
        "alone": [("first", a.rate, one)],
        "both": [("first", a.rate, one), ("other", a.rate, other)],
        "drain": [("other", a.rate * a.times, metered)],  # its first minute's worth
        "other x times, tokens a minute": [
            ("first", a.rate, one),
            ("other", a.rate * a.times, metered),
        ],
        "other x times, limited": [("first", a.rate, one), ("other", a.rate * a.times, few)],
        "other x times, no limit": [("first", a.rate, one), ("other", a.rate * a.times, other)],
        "other x times, one tenant": [("first", a.rate, one), ("other", a.rate * a.times, same)],
    }
    base = None
    for name, loads in cases.items():
        told = case(driver, a, name, loads)
        if name in ("warm", "drain"):
            continue
        base = told["ttft_p95_ms"] if name == "both" else base
        grows = round(told["ttft_p95_ms"] / base, 2) if base and told["ttft_p95_ms"] else None
        say(**told, grows=grows, rate=a.rate, times=a.times, limit=a.limit)


# -- a long prompt -------------------------------------------------------------------------------


def long(driver, a):
    now = time.monotonic
    began = now()
    alone_long = None
    if a.alone:
        name = driver.ask(began, "long", a.tokens, 1)
        driver.run(lambda: name in driver.first)
        alone_long = driver.first[name]
        driver.empty()
    for i in range(a.streams):  # not all end in one step
        out = a.out * (i + 1) // a.streams
        driver.ask(now(), "stream", a.context, out, again=a.out)
    driver.run(lambda: len(driver.first) == a.streams)
    began = now()
    driver.run(lambda: now() - began > a.seconds / 2)
    driver.gaps.clear()
    began = now()
    driver.run(lambda: now() - began > a.seconds)
    alone = [gap for _, _, gap in driver.gaps]
    driver.gaps.clear()
    began = now()
    name = driver.ask(began, "long", a.tokens, 1)
    for i in range(int(a.most * a.shorts)):
        driver.ask(began + 1 + i / a.shorts, "short", SHORT, 1)
    driver.run(lambda: name in driver.first or now() - began > a.most)
    beside = [gap for _, one, gap in driver.gaps if one.startswith("stream")]
    shorts = [v for k, v in driver.first.items() if k.startswith("short")]
    seen = [s for s in driver.engine._scheduler.sequences() if s.request.id == name]
    say(
        bench="fairness long",
        tokens=a.tokens,
        streams=a.streams,
        context=a.context,
        out=a.out,
        shorts=a.shorts,
        alone_p50_ms=ms(alone, 0.5),
        alone_p99_ms=ms(alone, 0.99),
        beside_p50_ms=ms(beside, 0.5),
        beside_p99_ms=ms(beside, 0.99),
        beside_max_ms=ms(beside, 1.0),
        p99_grows=round(at(beside, 0.99) / at(alone, 0.99), 2),
        long_ttft_alone_s=alone_long and round(alone_long, 2),
        long_ttft_beside_s=round(driver.first[name], 2) if name in driver.first else None,
        long_computed=a.tokens if name in driver.first else seen[0].computed,
        short_ttft_ms=[ms(shorts, q) for q in (0.5, 0.95, 1.0)],
    )
    driver.empty()


def made_model(folder, max_len):
    """The embedded model's shape, for longer texts."""
    config = json.loads((embedded.path() / "config.json").read_text())
    config["max_position_embeddings"] = max_len
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("keys", "long"))
    parser.add_argument("--model")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--times", type=float, default=100.0)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument(
        "--out", type=int, default=400, help="tokens of a stream until it is renewed"
    )
    parser.add_argument("--shorts", type=float, default=0.0, help="short prompts a second")
    parser.add_argument("--alone", action="store_true", help="also the long prompt alone, first")
    parser.add_argument("--most", type=float, default=300.0, help="seconds beside, at most")
    a = parser.parse_args()
    a.max_len = max(a.tokens, 32_000) + 1000
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "load_format": "dummy",
            "max_model_len": a.max_len,
            "skip_tokenizer_init": True,
            **({} if a.model else {"kv_cache_memory_bytes": "2GiB"}),
            **a.options,
        }
        driver = Driver(a.model or made_model(folder, a.max_len), options)
        try:
            (keys if a.what == "keys" else long)(driver, a)
        finally:
            driver.engine.shutdown()


if __name__ == "__main__":
    main()
