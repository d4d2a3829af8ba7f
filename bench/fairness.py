"""Measures what the load of one API key, or a long prompt, costs other requests. JSON lines.

    python bench/fairness.py keys [--rate 2] [--times 100] [--seconds 20] [--limit 4]
    python bench/fairness.py long [--tokens 1500] [--streams 1,4,16] [--prompts 1] [--seconds 5]

Both: [--model FOLDER] [--options JSON]. Without a folder the engine has the embedded model's shape,
a longer context and random weights. No HTTP: the engine is in this process, and its steps run one
after the other; a request's time begins when it is due, also during a step.

keys: one key sends `rate` requests a second, at random times; another as many, or `times` as many
(prompts of 256 tokens, 16 out, no prefix hits). Cases: the first alone; both at one load; the other
at `times` the load with as many tokens a minute as the first uses; with --limit requests at a time;
without limits; and both as one tenant, which is first come, first served. `grows` is p95 of the
first key's time to first token over that of "both". Each line also has the quality of the TTFT
predictions: predicted over measured, at the 10th, 50th and 90th percentile, and the share within
half and double.

long: `streams` sequences decode, each `context` tokens in; one that ends is sent again (its prompt
is cached), so steps stay as they are. Then --prompts of `tokens` tokens come. `prompt` is their
throughput over that alone; `streams_keep` the tokens per second of the streams over those before;
`total` the sum of the two over the same sum without a target. Goals: at least 0.33, 0.5 and 0.85.
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

PROMPT, OUT = 256, 16
WARM_S = 3.0


class Driver:
    """Runs an engine, adds requests when they are due, and records the times of their tokens."""

    def __init__(self, model, options):
        self.engine = build_engine(
            Options.from_flat({"model": model, **options}), server=True
        ).engine
        parts = self.engine._scheduler.admissions
        self.admission = next(one for one in parts if isinstance(one, AdmissionControl))
        self.draw = random.Random(1)
        self.num_sent = 0
        self.clear()

    def clear(self):
        self.due = []  # (when, number, request)
        self.sent, self.first, self.last, self.gaps = {}, {}, {}, []
        self.predicted, self.refused, self.done = {}, {}, {}
        self.endless = {}  # name -> prompt and tokens of the request that follows when it ends

    def send(self, at, name, tokens, out, *, again=None, **fields):
        """tokens: of a prompt, or the prompt itself. again: output tokens of the next request."""
        self.num_sent += 1
        prompt = tokens
        if isinstance(tokens, int):
            prompt = tuple(self.draw.randrange(10, 4000) for _ in range(tokens))
        if again:
            self.endless[f"{name}-{self.num_sent}"] = prompt, again
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
        request = Request(
            f"{name}-{self.num_sent}", prompt, StopConditions(out), params, arrived_at=at, **fields
        )
        heapq.heappush(self.due, (at, self.num_sent, request))
        return request.id

    def run(self, until):
        """Run steps until `until()` is true."""
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
        predicted = self.admission.predicted_ttft_s(
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
                    self.send(now, kind, prompt, out, again=out)

    def empty(self):
        """Abort all requests."""
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


def report(**fields):
    print(json.dumps(fields), flush=True)


# -- keys ----------------------------------------------------------------------------------------


def load(driver, a, name, rate, **fields):
    """Schedule the requests of one key for the whole case, from now on."""
    began, whole = time.monotonic(), WARM_S + a.seconds
    for _ in range(int(rate * whole)):
        driver.send(began + driver.draw.uniform(0, whole), name, PROMPT, OUT, **fields)


def case(driver, a, name, loads):
    """Measure the time to first token of the first key under these loads."""
    for kind, rate, fields in loads:
        load(driver, a, kind, rate, **fields)
    began = time.monotonic()
    driver.run(lambda: time.monotonic() - began > WARM_S + a.seconds)
    first_key = {
        one: driver.first.get(one, time.monotonic() - at)
        for one, at in driver.sent.items()
        if one.startswith("first-") and at - began > WARM_S and time.monotonic() - at > 1.0
    }
    ratios = [
        driver.predicted[one] / driver.first[one] for one in driver.first if one in driver.predicted
    ]
    figures = dict(
        bench="fairness keys",
        case=name,
        requests=len(first_key),
        ttft_p50_ms=ms(first_key.values(), 0.5),
        ttft_p95_ms=ms(first_key.values(), 0.95),
        first_refused=driver.refused.get("first", 0),
        other_done=driver.done.get("other", 0),
        other_refused=driver.refused.get("other", 0),
        other_ttft_p50_ms=ms([v for k, v in driver.first.items() if k.startswith("other-")], 0.5),
        predicted_over_true=[round(at(ratios, q), 2) for q in (0.1, 0.5, 0.9)] if ratios else None,
        within_double=round(sum(0.5 <= r <= 2 for r in ratios) / max(len(ratios), 1), 2),
    )
    driver.empty()
    return figures


def keys(driver, a):
    one, other = {"tenant": b"one"}, {"tenant": b"other"}
    limited = {**other, "tenant_limits": TenantLimits(max_requests=a.limit)}
    same = {"tenant": b"one"}
    allowed = TenantLimits(tokens_per_minute=int(a.rate * (PROMPT + OUT) * 60))
    metered = {"tenant": b"metered", "tenant_limits": allowed}
    cases = {
        "warm": [("first", a.rate, one), ("other", a.rate * a.times, limited)],
        "alone": [("first", a.rate, one)],
        "both": [("first", a.rate, one), ("other", a.rate, other)],
        "drain": [("other", a.rate * a.times, metered)],  # empty the token bucket
        "other x times, tokens a minute": [
            ("first", a.rate, one),
            ("other", a.rate * a.times, metered),
        ],
        "other x times, limited": [("first", a.rate, one), ("other", a.rate * a.times, limited)],
        "other x times, no limit": [("first", a.rate, one), ("other", a.rate * a.times, other)],
        "other x times, one tenant": [("first", a.rate, one), ("other", a.rate * a.times, same)],
    }
    base = None
    for name, loads in cases.items():
        figures = case(driver, a, name, loads)
        if name in ("warm", "drain"):
            continue
        base = figures["ttft_p95_ms"] if name == "both" else base
        grows = round(figures["ttft_p95_ms"] / base, 2) if base and figures["ttft_p95_ms"] else None
        report(**figures, grows=grows, rate=a.rate, times=a.times, limit=a.limit)


# -- a long prompt -------------------------------------------------------------------------------


def long_alone(driver, a):
    """Return the seconds that the prompts take alone."""
    now = time.monotonic
    for _ in range(2):  # the first run is warm-up
        began = now()
        names = [driver.send(began, "long", a.tokens, 1) for _ in range(a.prompts)]
        driver.run(lambda names=names: all(name in driver.first for name in names))
        seconds_taken = now() - began
        driver.empty()
    return seconds_taken


def long_beside(driver, a, streams):
    """Return gaps between the streams' tokens before and during the prompts, and both seconds."""
    now = time.monotonic
    for i in range(streams):  # so that they do not all end in one step
        out = max(a.out * (i + 1) // streams, 2)
        driver.send(now(), "stream", a.context, out, again=a.out)
    driver.run(lambda: len(driver.first) >= streams)
    began = now()
    driver.run(lambda: now() - began > 2.0)
    driver.gaps.clear()
    began = now()
    driver.run(lambda: now() - began > a.seconds)
    alone = [gap for _, _, gap in driver.gaps], now() - began
    driver.gaps.clear()
    began = now()
    names = [driver.send(began, "long", a.tokens, 1) for _ in range(a.prompts)]
    driver.run(lambda: all(name in driver.first for name in names) or now() - began > a.most)
    beside = [gap for _, one, gap in driver.gaps if one.startswith("stream")], now() - began
    done = all(name in driver.first for name in names)
    driver.empty()
    return alone, beside, done


def long(driver, unpaced, a):
    alone_s = long_alone(driver, a)
    for streams in map(int, a.streams.split(",")):
        shares = []
        for one in (unpaced, driver):
            (gaps, seconds), (beside, beside_s), done = long_beside(one, a, streams)
            kept_rate = len(beside) / beside_s / (len(gaps) / seconds)
            shares.append((alone_s / beside_s if done else 0.0, kept_rate))
        prompt, kept_rate = shares[1]
        report(
            bench="fairness long",
            tokens=a.tokens,
            prompts=a.prompts,
            streams=streams,
            context=a.context,
            prompt=round(prompt, 2),
            streams_keep=round(kept_rate, 2),
            total=round(sum(shares[1]) / sum(shares[0]), 2),
            ttft_alone_s=round(alone_s, 2),
            ttft_beside_s=round(beside_s, 2) if done else None,
            alone_p50_ms=ms(gaps, 0.5),
            beside_p50_ms=ms(beside, 0.5),
            beside_p99_ms=ms(beside, 0.99),
            beside_max_ms=ms(beside, 1.0),
        )


def made_model(folder, max_len):
    """Write a model of the embedded model's shape with a longer context."""
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
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=1, help="long prompts at once")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--out", type=int, default=400, help="tokens of a stream until its next")
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
        model = a.model or made_model(folder, a.max_len)
        driver = Driver(model, options)
        try:
            if a.what == "keys":
                keys(driver, a)
                return
            unpaced = Driver(model, {**options, "inter_token_target_ms": 0})
            try:
                long(driver, unpaced, a)
            finally:
                unpaced.engine.shutdown()
        finally:
            driver.engine.shutdown()


if __name__ == "__main__":
    main()
