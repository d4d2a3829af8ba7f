"""Drafts change no output: of random requests over all of SamplingParams, with and without drafts.

The drafter has read the answers of the run without, and is right at a chosen rate. Tokens, logprobs
(to the bit), finish and stop reasons and errors are those of each request alone.
"""

import random
from dataclasses import replace

import pytest

from quire.core.types import ForcedTokens, ThinkingBudget, TimeRules
from quire.sampling.processors import AdapterLogitsProcessor
from tests import tiers
from tests.cpu.engine_of import TINY, WINDOWED, engine_of, request, run
from tests.cpu.made_grammars import END, Grammars, bound_to
from tests.cpu.same_bits import needs_same_bits

pytestmark = needs_same_bits
TIMES = TimeRules(first_time=80, no_times=79, end=END, last_first=9)
REQUESTS = tiers.amount(5, 8)  # drawn for one run, besides those of each_feature()


def away_from_repeats(outputs, logits):
    """Depends on all outputs, and changes what is likely."""
    logits[[(7 * token + len(outputs)) % 97 for token in outputs[-3:]]] -= 2.0
    return logits


def fails_late(prompt, outputs, logits):
    if len(outputs) == 6:
        raise ValueError("six are enough")
    return logits


class Shifts(AdapterLogitsProcessor):
    """Engine-wide: prefers the tokens behind the last one, of requests that ask for it."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        if not (params.extra_args or {}).get("shift"):
            return None

        def shift(outputs, logits):
            logits[(sum(outputs) + 1) % 97] += 3.0
            return logits

        return shift


class Widens(AdapterLogitsProcessor):
    """Engine-wide, of random rows only: it keeps the greatest logit."""

    def is_argmax_invariant(self):
        return True

    def new_req_logits_processor(self, params):
        return None if params.greedy else lambda outputs, logits: logits * (1 + len(outputs) % 3)


def random_params(rng, longest):
    """Return keywords of SamplingParams. longest: its max_tokens."""

    def maybe(chance, **values):
        return values if rng.random() < chance else {}

    found = {"temperature": 0.0}
    if rng.random() < 0.6:
        found = {"temperature": rng.choice([0.3, 0.7, 1.0, 1.5]), "n": rng.choice([1, 1, 1, 3])}
        found |= maybe(0.4, top_p=rng.choice([0.3, 0.9]))
        found |= maybe(0.3, top_k=rng.choice([1, 5, 40]))
        found |= maybe(0.3, min_p=rng.choice([0.02, 0.3]))
    found |= maybe(0.3, repetition_penalty=rng.choice([0.7, 1.4]))
    found |= maybe(0.2, frequency_penalty=rng.choice([-0.5, 0.9]))
    found |= maybe(0.2, presence_penalty=rng.choice([-0.5, 0.9]))
    found |= maybe(0.2, logit_bias={rng.randrange(97): rng.choice([-9.0, 2.0]) for _ in range(9)})
    found |= maybe(0.1, allowed_token_ids=[*range(rng.choice([32, 70]))])
    found |= maybe(0.2, bad_words=["x"])
    found |= maybe(0.2, min_tokens=rng.randrange(1, min(longest, 7) + 1))
    found |= maybe(0.3, stop_token_ids=[rng.randrange(97) for _ in range(rng.choice([1, 6]))])
    found |= maybe(0.4, logprobs=rng.choice([0, 1, 5, -1]))
    if "logprobs" not in found:
        found |= maybe(0.1, logprob_token_ids=[3, 90, 41])
    found |= maybe(0.1, prompt_logprobs=1)
    found |= maybe(0.15, logits_processors=[rng.choice([away_from_repeats, fails_late])])
    return found | maybe(0.2, extra_args={"shift": 1})


def random_request(rng, name):
    head = [rng.randrange(14, 97) for _ in range(rng.choice([1, 20, 60]))]
    prompt = head + [rng.randrange(97) for _ in range(rng.randrange(1, 40))]
    constraint = bound_to(rng.choice(["lists", "digits", "spaced"]))
    thinking = ThinkingBudget(rng.randrange(1, 9), (72, 73), rng.choice([None, (70,)]))
    longest = rng.choice([1, 5, 20, 40, 75])
    made = request(
        name,
        prompt,
        longest,
        seed=rng.randrange(2**40),
        eos=[END, *rng.sample(range(97), rng.choice([0, 2]))],
        constraint=constraint if rng.random() < 0.25 else None,
        thinking=thinking if rng.random() < 0.2 else None,
        **random_params(rng, longest),
    )
    if made.params.bad_words:
        words = [[rng.randrange(97) for _ in range(rng.choice([1, 2, 3]))] for _ in range(40)]
        made.params.bad_words_token_ids = words
    if made.constraint is None and rng.random() < 0.15:
        forced = ForcedTokens(
            start=len(prompt),
            first=rng.choice([None, 33]),
            end=len(prompt) + rng.choice([3, 30]),
            last=frozenset({END, 4}),
            banned=(7, 8),
            banned_first=(9,),
            times=TIMES if rng.random() < 0.5 else None,
        )
        made = replace(made, forced=forced)
    return made


def each_feature(rng):
    """Requests of many tokens that depend on the outputs before, each in one way, and others."""
    drawn = {"temperature": 1.0, "seed": rng.randrange(99)}
    kinds = [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.7, **drawn},
        {"bad_words": ["x"], **drawn},
        {"thinking": ThinkingBudget(9, (72, 73)), **drawn},
        {"constraint": bound_to("lists"), **drawn},
        {"constraint": bound_to("digits"), "min_tokens": 25, "logprobs": 2},
        {"logits_processors": [away_from_repeats], **drawn},
        {"logits_processors": [fails_late], **drawn},
        {"top_p": 0.8, "max_tokens": 75, **drawn},
        {"stop_token_ids": [*range(15)], "n": 3, **drawn},
    ]
    prompt = [rng.randrange(14, 97) for _ in range(20)]
    made = [request(f"f{i}", prompt, **{"max_tokens": 30, **one}) for i, one in enumerate(kinds)]
    made[2].params.bad_words_token_ids = [[i, j] for i in range(97) for j in range(i % 2, 97, 2)]
    forced = ForcedTokens(start=len(prompt), end=999, times=TIMES)
    return [*made, replace(request("stamps", prompt, 30, **drawn), forced=forced)]


def delivered(updates):
    """(id, index) -> tokens, how it ended, logprobs, prompt logprobs."""
    out = {}
    for u in updates:
        found = out.setdefault((u.request_id, u.index), ([], [], [], []))
        found[0].extend(u.token_ids)
        end = (u.finish, u.stop_reason, u.error, u.fault, u.last_token_is_text)
        found[1].extend([end] if u.finish else [])
        found[2].extend(u.logprobs or [])
        found[3].extend(u.prompt_logprobs or [])
    return out


def engine(hf=TINY, kinds=(), **settings):
    """kinds: engine-wide processors."""
    processors = [kind(None, None, False) for kind in kinds]
    return engine_of(hf, grammars=Grammars(), processors=processors, **settings)


class Drafts:
    """Proposes what a run without drafts has output, with errors; behind its end anything."""

    def __init__(self, known, rate, most):
        self.known, self.rate, self.most = known, rate, most
        self.proposed = 0

    def __call__(self, seq):
        at = len(seq.tokens) - seq.prompt_len
        rng = random.Random(f"{seq.request.id} {seq.index} {at}")
        answer = self.known[seq.request.id, seq.index][0][at : at + self.most]
        answer += [rng.randrange(97) for _ in range(self.most - len(answer))]
        found = [t if rng.random() < self.rate else rng.randrange(97) for t in answer]
        found = found[: rng.randrange(self.most + 1)]
        self.proposed += len(found)
        return tuple(found)


SETTINGS = {
    "together": dict(),
    "eager": dict(eager=True),
    "small chunks": dict(budget=13),
    "overlap": dict(depth=2),
    "block of 4": dict(block_size=4, num_blocks=800, depth=2),
    "preempted": dict(num_blocks=32, block_size=8, depth=2, preempts=True),
    "preempted, host tier": dict(num_blocks=32, block_size=8, host_blocks=90, preempts=True),
    "windows": dict(hf=WINDOWED, budget=50),
}


def check(seed, name):
    """Run some requests twice with drafts in one engine: then prefixes are hit."""
    rng = random.Random(seed)
    work = [random_request(rng, str(i)) for i in range(REQUESTS)] + each_feature(rng)
    settings = dict(SETTINGS[name])
    preempts = settings.pop("preempts", False)
    common = {"hf": settings.pop("hf", TINY), "kinds": rng.choice([(), (), (Shifts, Widens)])}
    want = {}
    for one in work:
        want |= delivered(run(engine(prefix=False, budget=4000, eager=True, **common), [one])[1])
    drafts = Drafts(want, rng.choice([0.5, 0.8, 1.0]), rng.choice([2, 3, 7]))
    made = engine(**common, drafts=drafts.most, propose=drafts, **settings)
    first = []
    for i, one in enumerate(work):
        made.add(one)
        if i % 4 == 3:
            first += made.step()
    while not made.idle:
        first += made.step()
    _, second = run(made, work, stagger=rng.randrange(3))
    assert delivered(first) == want
    assert delivered(second) == want
    assert not made.stats().failed_steps
    steps = [len(u.token_ids) for u in (*first, *second)]
    return max(steps, default=0), drafts.proposed, made.stats().preemptions > 0 or not preempts


@pytest.mark.slow("an engine for each request alone")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_those_without_drafts(name):
    seeds = range(tiers.amount(1, 60))
    found = [check(f"{name} {seed}", name) for seed in seeds]
    longest, _, preempted = (max(of) for of in zip(*found))
    assert longest > 2, "no drafts were accepted"
    assert sum(proposed for _, proposed, _ in found) > 100
    assert preempted
