"""Placement on several engines: hits of their caches, evenness and cost, without any engine.

    python bench/placement.py [--engines 4] [--chats 400] [--turns 6] [--cached 0.33]

Chats of several turns arrive in random order, some share a system prompt. An engine is a cache of
the least recently used chunks, which holds `--cached` of all prompts; it computes 20,000 prompt
tokens a second and holds a sequence for 2 s. Printed: tokens hit over those that one cache of the size of all
would hit (ideal), for placement by cost, in turns, and by chat at random; processor time of a placement, in microseconds.
"""

import argparse
import json
import random
import time

from quire.core.params import SamplingParams
from quire.core.scheduler_stats import EngineLoad
from quire.core.types import Request, StopConditions
from quire.engine.client.placement import CHUNK_TOKENS, Placement, _SentPrompts, chunk_keys

RATE, HOLD_S = 20_000, 2.0


def trace(rng, chats, turns):
    """Requests in the order of arrival: (chat, tokens)."""
    systems = [[rng.randrange(50_000) for _ in range(rng.randrange(200, 2000))] for _ in range(8)]
    texts = [list(rng.choice(systems)) for _ in range(chats)]
    left, found = [turns] * chats, []
    while any(left):
        chat = rng.choices(range(chats), left)[0]
        left[chat] -= 1
        texts[chat] += [rng.randrange(50_000) for _ in range(rng.randrange(50, 400))]
        found.append((chat, tuple(texts[chat])))
    return found


def run(requests, engines, tokens, how, gap_s):
    """Return (hit tokens, most over mean computed tokens, microseconds of a placement)."""
    placement = Placement(engines, tokens)
    caches = [_SentPrompts(tokens // CHUNK_TOKENS) for _ in range(engines)]
    work, ends = [0.0] * engines, [[] for _ in range(engines)]
    hits, computed, spent, now = 0, [0] * engines, 0.0, 0.0
    for number, (chat, prompt) in enumerate(requests):
        now += gap_s
        request = Request(str(number), prompt, StopConditions(9), SamplingParams(max_tokens=9))
        for engine in range(engines):
            work[engine] = max(0.0, work[engine] - gap_s * RATE)
            ends[engine] = [end for end in ends[engine] if end > now]
            placement.report(engine, EngineLoad(round(work[engine]), len(ends[engine])))
        began = time.thread_time()
        if how == "cost":
            sent = placement.place([request], range(engines))
            placement.end(sent)
            at = sent.engine
        else:
            at = number % engines if how == "turns" else hash((chat, "x")) % engines
        spent += time.thread_time() - began
        keys = [chunk_keys(request)]
        hit = caches[at].num_cached(keys)
        caches[at].add(keys)
        hits += hit
        computed[at] += len(prompt) - hit
        work[at] += len(prompt) - hit
        ends[at].append(now + HOLD_S)
    mean = sum(computed) / engines
    return hits, max(computed) / mean, spent / len(requests) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--chats", type=int, default=400)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--cached", type=float, default=0.33, help="of all prompts, by one engine")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="between two requests")
    a = parser.parse_args()
    requests = trace(random.Random(0), a.chats, a.turns)
    whole = _SentPrompts(1 << 40)
    for number, (_, prompt) in enumerate(requests):
        whole.add([chunk_keys(Request(str(number), prompt, StopConditions(1)))])
    tokens = round(len(whole._keys) * CHUNK_TOKENS * a.cached)
    ideal, _, _ = run(requests, 1, tokens * a.engines, "turns", a.gap_ms / 1e3)
    for how in ("cost", "turns", "chat"):
        hits, uneven, cost = run(requests, a.engines, tokens, how, a.gap_ms / 1e3)
        print(json.dumps({"how": how, "engines": a.engines, "chats": a.chats, "cached": a.cached,
                          "hits of ideal": round(hits / ideal, 3),
                          "most over mean computed": round(uneven, 3),
                          "us a placement": round(cost, 1)}))  # fmt: skip


if __name__ == "__main__":
    main()
