"""Constrained rows give the same tokens in any engine, every text is whole, others are unchanged.

A real tiny model over grammars in plain Python. What real backends make of real forms is tested
with them; here it is when masks are made, when tokens are settled, and whose they are.
"""

import random

import pytest
import torch

from quire.core.types import ThinkingBudget
from quire.platform import cpu
from quire.sampling.steps import grammar_masks
from tests.cpu.engine_of import engine_of, request, run
from tests.cpu.made_grammars import BLANK, DIGITS, END, OPEN, Grammars, bound_to, whole
from tests.cpu.same_bits import needs_same_bits

pytestmark = [needs_same_bits, pytest.mark.sampled(3)]
PROMPT = range(30, 60)
MIND, ENOUGH = (70, 71), (72, 73, 74)
"""Markers around reasoning."""


def bound(name, kind, max_tokens, prompt=PROMPT, **more):
    constraint = None if kind is None else bound_to(kind)
    return request(name, prompt, max_tokens, constraint=constraint, eos=[END], **more)


RANDOM = {"temperature": 0.9, "top_p": 0.95}


def workload(seed=0):
    """Constrained and free rows, greedy and random, with all that may be combined with a constraint."""
    rng = random.Random(seed)
    heads = [[rng.randrange(14, 97) for _ in range(rng.randrange(1, 70))] for _ in range(3)]
    kinds = [
        ("lists", {}),
        (None, {}),
        ("lists", RANDOM | {"n": 3}),
        ("digits", {"min_tokens": 6}),
        ("lists", {"logprobs": 2, "frequency_penalty": 0.9}),
        (None, RANDOM | {"n": 2, "thinking": ThinkingBudget(5, ENOUGH)}),
        ("spaced", {"logit_bias": {BLANK: 30.0}}),
        ("digits", RANDOM | {"n": 2, "repetition_penalty": 1.4, "presence_penalty": 0.4}),
        (None, {"repetition_penalty": 1.3}),
        ("lists", RANDOM | {"logprobs": 0, "allowed_token_ids": list(range(60))}),
        (None, RANDOM | {"logprobs": 1}),
        ("lists", {"min_tokens": 8, "logit_bias": {OPEN: 4.0}, "bad_words": ["x"]}),
    ]
    found = []
    for i, (kind, more) in enumerate(kinds):
        prompt = rng.choice(heads) + rng.choice(heads)[: rng.randrange(40)]
        one = bound(str(i), kind, rng.randrange(8, 40), prompt, seed=100 * i, **more)
        if one.params.bad_words:
            one.params.bad_words_token_ids = [[20], [21, 22]]
        found.append(one)
    return found


def made(**settings):
    return engine_of(grammars=Grammars(), **settings)


def told(updates):
    """(id, index) -> tokens, how it ended, logprobs."""
    out = {}
    for u in updates:
        tokens, ends, logprobs = out.setdefault((u.request_id, u.index), ([], [], []))
        tokens.extend(u.token_ids)
        ends.extend([(u.finish, u.stop_reason, u.error)] if u.finish else [])
        logprobs.extend((p.ids, p.values) for p in u.logprobs or [])
    return out


def alone(requests):
    out = {}
    for one in requests:
        out |= told(run(made(prefix=False, budget=4000, eager=True), [one])[1])
    return out


@pytest.fixture(scope="module")
def want():
    return alone(workload())


def test_every_text_is_whole_and_ends_for_its_reason(want):
    asked = {one.id: one for one in workload()}
    reasons = set()
    for (name, _), (tokens, ends, _) in want.items():
        one = asked[name]
        assert [error for _, _, error in ends] == [None]
        reasons.add(ends[0][0])
        if one.constraint is not None:
            text = tokens[:-1] if tokens[-1] == END else tokens
            assert whole(one.constraint.form, text), (name, tokens)
    assert reasons == {"stop", "length"}


SETTINGS = {
    "together": dict(),
    "eager": dict(eager=True),
    "staggered": dict(stagger=3),
    "small chunks": dict(budget=7),
    "block of 8": dict(block_size=8, num_blocks=800),
    "no prefix cache": dict(prefix=False),
    "whole prompts": dict(chunked=False),
    "two seats": dict(seqs=2),
    "little memory": dict(num_blocks=30, expect_preemption=True),
    "little memory, host tier": dict(num_blocks=30, host_blocks=60, expect_preemption=True),
    "overlap": dict(depth=2),
    "overlap, staggered": dict(depth=2, stagger=2),
    "three in flight": dict(depth=3),
    "overlap, small chunks, little memory": dict(depth=2, budget=9, num_blocks=30, stagger=1),
    "overlap, host tier": dict(depth=2, num_blocks=30, host_blocks=60, expect_preemption=True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_delivered_outputs_do_not_depend_on(want, name):
    settings = dict(SETTINGS[name])
    stagger = settings.pop("stagger", 0)
    expected = settings.pop("expect_preemption", False)
    engine = made(**settings)
    _, updates = run(engine, workload(), stagger=stagger)
    assert told(updates) == want
    if expected:
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("threads", [0, 1000], ids=["in a thread", "at once"])
def test_how_masks_are_filled_changes_nothing(want, monkeypatch, threads):
    monkeypatch.setattr(grammar_masks, "THREAD_MIN_ROWS", threads)
    monkeypatch.setattr(cpu, "available_cores", lambda: 1000)  # a core to spare
    assert told(run(made(depth=2), workload())[1]) == want


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_hit_changes_nothing(want, depth):
    engine = made(depth=depth)
    for one in workload():
        engine.add(one)
    while not engine.idle:
        engine.step()
    _, updates = run(engine, workload())
    assert told(updates) == want
    assert max(u.cached_tokens for u in updates) > 16


@pytest.mark.parametrize("depth", [1, 2])
def test_free_rows_are_the_same_to_the_bit_without_constrained_rows(depth):
    def free():
        return [one for one in workload() if one.constraint is None and one.thinking is None]

    _, plain = run(engine_of(depth=depth), free())
    names = {one.id for one in free()}
    _, mixed = run(made(depth=depth), workload())
    mixed = {key: value for key, value in told(mixed).items() if key[0] in names}
    assert mixed == told(plain)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["lists", "digits", "spaced"])
def test_the_text_is_whole_at_every_max_tokens(kind, depth):
    least = 2 if kind == "lists" else 1
    more = {"logit_bias": {OPEN: 5.0, BLANK: 30.0}}
    work = [bound(str(n), kind, n, **more) for n in range(least, 30)]
    work += [bound(f"random {n}", kind, n, seed=n, **RANDOM) for n in range(least, 30)]
    _, updates = run(made(depth=depth, seqs=64, num_blocks=600), work)
    ends = {u.request_id: u.finish for u in updates if u.finish}
    for (name, _), (tokens, _, _) in told(updates).items():
        if tokens[-1] == END:
            assert ends[name] == "stop"
            tokens.pop()
        assert whole(kind, tokens), (name, tokens)
        assert len(tokens) <= int(name.split()[-1])
    assert "stop" in ends.values()
    assert kind == "digits" or "length" in ends.values()


def test_the_end_of_the_text_ends_the_sequence_despite_min_tokens_and_ignore_eos():
    ask = {"logit_bias": dict.fromkeys(DIGITS, 50.0), "min_tokens": 9}
    ignoring = request("b", PROMPT, 9, constraint=bound_to("spaced"), **ask)
    _, updates = run(made(), [bound("a", "spaced", 9, **ask), ignoring])
    for tokens, ends, _ in told(updates).values():
        assert len(tokens) == 1
        assert ends == [("stop", None, None)]
    assert all(u.last_token_is_text for u in updates)  # the last token is text


def test_an_end_token_ends_the_sequence_though_eos_is_ignored():
    more = {"logit_bias": {END: 50.0}}
    _, updates = run(made(), [request("a", PROMPT, 9, constraint=bound_to("digits"), **more)])
    ((tokens, ends, _),) = told(updates).values()
    assert tokens[-1] == END
    assert len(tokens) == 2
    assert ends == [("stop", None, None)]


@pytest.mark.parametrize("depth", [1, 2])
def test_min_tokens_holds_as_far_as_the_grammar_goes(depth):
    more = {"logit_bias": {END: 50.0}, "min_tokens": 5}
    _, updates = run(made(depth=depth), [bound("a", "digits", 9, **more)])
    ((tokens, ends, _),) = told(updates).values()
    assert whole("digits", tokens[:-1])
    assert (len(tokens), tokens[-1]) == (6, END)
    assert ends == [("stop", None, None)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_that_can_only_be_empty_is_an_end_token_despite_min_tokens(depth):
    _, updates = run(made(depth=depth), [bound("a", "nothing", 9, min_tokens=4)])
    assert told(updates)["a", 0][:2] == ([END], [("stop", None, None)])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("why", ["allowed", "bias", "bad words"])
def test_a_row_without_allowed_tokens_ends_alone_with_the_reason(depth, why):
    more = {
        "allowed": {"allowed_token_ids": [40, 41, 42]},
        "bias": {"logit_bias": dict.fromkeys([OPEN], -100.0)},
        "bad words": {"bad_words": ["x"]},
    }[why]
    bad = bound("bad", "lists", 12, **more)
    if why == "bad words":
        bad.params.bad_words_token_ids = [[OPEN]]
    good = [bound("good", "lists", 12), bound("free", None, 12)]
    want = alone(good)
    engine = made(depth=depth)
    _, updates = run(engine, [bad, *good])
    out = told(updates)
    if why == "bias":  # a bias is a wish, not a ban
        assert out["bad", 0][1][0][0] != "error"
        return
    reason, _, error = out["bad", 0][1][0]
    assert reason == "error"
    assert "no token is allowed" in error
    assert "structured output" in error
    assert {u.fault for u in updates if u.error} == {"request"}
    assert {key: value for key, value in out.items() if key[0] != "bad"} == want


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_whose_guide_refuses_or_fails_ends_alone(depth):
    grammars = Grammars()
    engine = engine_of(grammars=grammars, depth=depth)
    for name in ("refuses", "fails", "good"):
        engine.add(bound(name, "lists", 20, prompt=range(30, 50)))
    updates, step = [], 0
    while not engine.idle:
        updates += engine.step()
        step += 1
        if step == 4:
            grammars.guides[0].accept = lambda token: False
            grammars.guides[1].fault = "out of fuel"
    out = told(updates)
    assert {u.request_id: u.fault for u in updates if u.error} == {
        "refuses": "engine",
        "fails": "request",
    }
    assert "does not allow token" in out["refuses", 0][1][0][2]
    assert out["fails", 0][1] == [("error", None, "out of fuel")]
    assert out["good", 0] == alone([bound("good", "lists", 20, prompt=range(30, 50))])["good", 0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_token_is_taken_in_once_and_in_order(depth):
    grammars = Grammars()
    engine = engine_of(grammars=grammars, depth=depth, num_blocks=60)
    work = [bound(str(i), "lists", 25, range(30 + i, 60)) for i in range(5)]
    out = told(run(engine, work)[1])
    assert engine.stats().preemptions == 0
    assert len(grammars.guides) == 5
    assert [g.taken for g in grammars.guides] == [out[str(i), 0][0] for i in range(5)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_that_is_ended_from_outside_changes_no_other(depth):
    work = [bound(str(i), "lists", 25, range(30 + i, 60)) for i in range(4)]
    want = alone(work)
    engine = made(depth=depth, seqs=4)
    for one in work:
        engine.add(one)
    updates, step = [], 0
    while not engine.idle:
        updates += engine.step()
        step += 1
        if step == 6:
            engine.abort_sequence("1", 0)  # as a stop string would
            updates += engine.abort("2")
            engine.add(bound("late", "digits", 9))  # takes a slot with a step in flight
    engine.drain()
    out = told(updates)
    assert {key: out[key] for key in (("0", 0), ("3", 0))} == {
        key: want[key] for key in (("0", 0), ("3", 0))
    }
    assert out["late", 0] == alone([bound("late", "digits", 9)])["late", 0]
    assert engine.stats().held_blocks == 0


def test_logits_of_bfloat16_are_masked_too():
    work = [bound("a", "lists", 20), bound("b", "lists", 20, logprobs=2), bound("c", None, 9)]
    out = told(run(engine_of(grammars=Grammars(), dtype=torch.bfloat16), work)[1])
    assert whole("lists", out["a", 0][0])
    assert out["a", 0][0] == out["b", 0][0]


def test_raw_logprobs_are_those_of_the_model():
    free = told(run(made(), [bound("a", None, 1, logprobs=1)])[1])["a", 0]
    held = told(run(made(), [bound("a", "lists", 2, logprobs=1)])[1])["a", 0]
    assert held[0][0] == OPEN
    assert held[2][0][0][1] == free[0][0]  # the best of the vocabulary is still listed first
    assert held[2][0][1][1] == free[2][0][1][1]


# -- thinking ---------------------------------------------------------------------------------------


def thoughts(tokens, begin=None):
    """The lengths of the reasoning parts of a text."""
    found, inside, start, at = [], begin is None, 0, 0
    while at < len(tokens):
        mark = ENOUGH if inside else begin
        if mark and tuple(tokens[at : at + len(mark)]) == mark:
            if inside:
                found.append(at - start)
            inside, at = not inside and begin is not None, at + len(mark)
            start = at
            continue
        at += 1
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [0, 1, 2, 7])
@pytest.mark.parametrize("how", [{}, RANDOM, {"logprobs": 1}], ids=["greedy", "random", "logprobs"])
def test_reasoning_ends_with_its_budget(budget, depth, how):
    one = bound("a", None, 25, thinking=ThinkingBudget(budget, ENOUGH), seed=3, **how)
    free = bound("b", None, 25, seed=3, **how)
    out = told(run(made(depth=depth), [one, free])[1])
    tokens, plain = out["a", 0][0], out["b", 0][0]
    assert tokens[:budget] == plain[:budget]
    assert tuple(tokens[budget : budget + 3]) == ENOUGH
    assert thoughts(tokens) == [budget]
    assert len(tokens) == len(plain) == 25


def test_reasoning_that_ended_before_is_unchanged():
    early = {"logit_bias": {}}
    free = told(run(made(), [bound("b", None, 25, **early)])[1])["b", 0][0]
    mark = tuple(free[4:6])
    asked = ThinkingBudget(9, mark)
    out = told(run(made(depth=2), [bound("a", None, 25, thinking=asked)])[1])["a", 0][0]
    assert out == free


def test_an_end_mark_that_the_model_began_is_made_whole():
    free = told(run(made(), [bound("b", None, 25)])[1])["b", 0][0]
    mark = (free[3], 90, 91)
    out = told(run(made(depth=2), [bound("a", None, 25, thinking=ThinkingBudget(4, mark))])[1])[
        "a", 0
    ]
    assert out[0][:6] == [*free[:4], 90, 91]


@pytest.mark.parametrize("depth", [1, 2])
def test_reasoning_after_begin_markers_shares_one_budget(depth):
    free = told(run(made(), [bound("b", None, 40)])[1])["b", 0][0]
    begin = tuple(free[2:4])
    asked = ThinkingBudget(6, ENOUGH, begin)
    out = told(run(made(depth=depth), [bound("a", None, 40, thinking=asked)])[1])["a", 0][0]
    assert out[:10] == free[:10]
    assert tuple(out[10:13]) == ENOUGH
    lengths = thoughts(out, begin)
    assert lengths[0] == 6
    assert sum(lengths) == 6


@pytest.mark.parametrize(
    "name", ["little memory", "little memory, host tier", "overlap, host tier"]
)
def test_a_budget_outlives_preemption(name):
    settings = dict(SETTINGS[name])
    settings.pop("expect_preemption")
    settings["num_blocks"] = 12
    work = [
        bound(
            str(i),
            None,
            30,
            range(20 + i, 60),
            thinking=ThinkingBudget(8 + i, ENOUGH),
            seed=i,
            **RANDOM,
        )
        for i in range(6)
    ]
    engine = made(**settings)
    out = told(run(engine, work)[1])
    assert engine.stats().preemptions > 0
    assert out == alone(work)
    assert [thoughts(out[str(i), 0][0]) for i in range(6)] == [[8 + i] for i in range(6)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_forbids_the_end_of_reasoning_wins(depth):
    one = bound("a", "lists", 20, thinking=ThinkingBudget(3, ENOUGH))
    out = told(run(made(depth=depth), [one])[1])["a", 0]
    assert out == alone([bound("a", "lists", 20)])["a", 0]
