"""Custom logits processors: per request and engine-wide."""

import random

import pytest
import torch

from quire.core.params import SamplingParams
from quire.errors import ConfigError, HookFailed
from quire.sampling.processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    diff_batches,
    load_processors,
)
from quire.sampling.slot_join import SlotJoin
from tests.cpu.sampling.cases import filled, normal, sequence

VOCAB = 60


def run(sampler, slots, steps, start=0, seed=0):
    """Greedy ids of some steps, [steps][rows]."""
    found = []
    for step in range(start, start + steps):
        logits = normal(len(slots), VOCAB, seed=seed + step)
        made = sampler.sample(logits, slots, [step] * len(slots))
        assert made.all_errors == {}
        found.append(made.token_ids.tolist())
    return found


def request(*functions, **more):
    params = SamplingParams(temperature=0.0, logits_processors=list(functions) or None, **more)
    return sequence(params, prompt=[7, 8])


# --- per request ---


def test_functions_see_outputs_and_prompt_and_run_in_order():
    seen = []

    def force(outputs, logits):
        seen.append(list(outputs))
        logits[len(outputs) + 20] = 1e6
        return logits

    def with_prompt(prompt, outputs, logits):
        assert prompt == [7, 8]
        assert logits[len(outputs) + 20] == 1e6
        return logits + 0

    sampler = filled(VOCAB, [request(), request(force, with_prompt)])
    found = run(sampler, [0, 1], 3)
    assert [row[1] for row in found] == [20, 21, 22]
    assert seen == [[], [20], [20, 21]]
    assert [row[0] for row in found] == [
        r[0] for r in run(filled(VOCAB, [request()] * 2), [0, 1], 3)
    ]


def test_after_preemption_functions_see_the_outputs_there_were():
    seen = []

    def look(outputs, logits):
        seen.append(len(outputs))
        return logits

    seq = request(look)
    sampler = filled(VOCAB, [seq])
    seq.tokens += [row[0] for row in run(sampler, [0], 2)]
    sampler.leave(0)
    sampler.join(SlotJoin.from_sequence(seq, 0))
    run(sampler, [0], 2, start=2)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda outputs, logits: 1 / 0, "ZeroDivisionError"),
        (lambda outputs, logits: None, "NoneType"),
        (lambda outputs, logits: logits[:3], "not (3,)"),
    ],
)
def test_a_failing_function_ends_its_row_only(function, words):
    sampler = filled(VOCAB, [request(), request(function), request()])
    logits = normal(3, VOCAB)
    made = sampler.sample(logits.clone(), [0, 1, 2], [0] * 3)
    assert list(made.all_errors) == [1]
    assert words in made.all_errors[1]
    assert made.token_ids[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()


# --- engine-wide ---


class Count(LogitsProcessor):
    """Forces token 10 + (outputs so far) on requests with the extra_args. State per index."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.wants = {}
        self.size = 0

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        self.size = batch_update.batch_size
        for index in batch_update.removed:
            self.wants.pop(index, None)
        for index, params, prompt, outputs in batch_update.added:
            assert prompt == [7, 8]
            self.wants[index] = (params.extra_args["base"], outputs)
        for a, b, way in batch_update.moved:
            if way is MoveDirectionality.SWAP:
                self.wants[a], self.wants[b] = self.wants[b], self.wants[a]
            else:
                assert b not in self.wants
                self.wants[b] = self.wants.pop(a)

    def apply(self, logits):
        assert sorted(self.wants) == list(range(self.size)) == list(range(len(logits)))
        for row, (base, outputs) in self.wants.items():
            logits[row, base + len(outputs)] = 1e6
        return logits


def numbered(base):
    return request(extra_args={"base": base})


def test_engine_wide_processors_follow_rows_that_come_go_and_move():
    (processor,) = load_processors([Count], None, torch.device("cpu"))
    sampler = filled(VOCAB, [numbered(10 * i) for i in range(5)], processors=[processor])
    rng, done = random.Random(0), dict.fromkeys(range(5), 0)
    for _ in range(40):
        slots = rng.sample(range(5), rng.randrange(1, 6))
        # A row that was away rejoins with no outputs: only those that stayed count on.
        ids = sampler.sample(normal(len(slots), VOCAB), slots, [0] * len(slots)).token_ids.tolist()
        assert ids == [10 * slot + done[slot] for slot in slots]
        for slot in slots:
            done[slot] += 1
            if done[slot] == 8:
                sampler.leave(slot)
                sampler.join(SlotJoin.from_sequence(numbered(10 * slot), slot))
                done[slot] = 0


def play(old, update):
    """Apply an update as a processor does: removed, added, moved."""
    at = dict(enumerate(old))
    for index in update.removed:
        del at[index]
    for index, _, prompt, _ in update.added:
        assert index not in at
        at[index] = prompt
    for a, b, way in update.moved:
        if way is MoveDirectionality.SWAP:
            at[a], at[b] = at[b], at[a]
        else:
            assert b not in at
            at[b] = at.pop(a)
    return [at[i] for i in range(len(at))]


class One:
    """A fake sequence: `prompt` is itself, so that updates can be followed."""

    def __init__(self):
        self.params, self.prompt, self.outputs = None, self, []


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_update_turns_any_order_into_any_other(seed):
    rng = random.Random(seed)
    everyone = [One() for _ in range(9)]
    old = rng.sample(everyone, rng.randrange(10))
    new = rng.sample(everyone, rng.randrange(10))
    update = diff_batches(old, new)
    assert isinstance(update, BatchUpdate)
    assert play(old, update) == new
    assert {a[2] for a in update.added} == set(new) - set(old)


class Invariant(LogitsProcessor):
    """Keeps the best 1; remembers what it saw."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.seen = []

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        self.seen.append(logits.clone())
        best = logits.amax(-1, keepdim=True)
        return torch.where(logits < best, -torch.inf, logits)


def test_processors_that_keep_the_best_run_after_temperature_and_not_for_greedy_batches():
    processor = Invariant(None, None, False)
    params = SamplingParams(temperature=0.5)
    sampler = filled(VOCAB, [sequence(params), request()], processors=[processor])
    logits = normal(2, VOCAB)
    made = sampler.sample(logits.clone(), [0, 1], [0, 0])
    assert made.token_ids.tolist() == logits.argmax(-1).tolist()
    assert torch.equal(processor.seen[0][0], logits[0] / 0.5)
    sampler.sample(logits.clone()[1:], [1], [1])
    assert len(processor.seen) == 1


class Adapter(AdapterLogitsProcessor):
    """Bans the last output; fails for requests with the extra_args."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        if not params.extra_args:
            return None
        if params.extra_args.get("fail"):
            return lambda outputs, logits: 1 / 0

        def force(prompt, outputs, logits):
            logits[params.extra_args["base"] + len(outputs)] = 1e6
            return logits

        return force


def test_an_adapter_gives_requests_functions_and_a_failure_ends_only_its_row():
    processors = load_processors([f"{__name__}:Adapter"], None, torch.device("cpu"))
    seqs = [numbered(5), request(), request(extra_args={"fail": True}), numbered(30)]
    sampler = filled(VOCAB, seqs, processors=processors)
    for step in range(3):
        logits = normal(4, VOCAB, seed=step)
        made = sampler.sample(logits.clone(), range(4), [step] * 4)
        assert list(made.all_errors) == [2]
        assert made.token_ids[[0, 3]].tolist() == [5 + step, 30 + step]
        assert made.token_ids[1] == logits[1].argmax()


def test_an_adapter_s_functions_follow_their_requests_through_any_order():
    processors = load_processors([Adapter], None, torch.device("cpu"))
    wants = [0, 10, None, 20, 30]
    seqs = [request() if base is None else numbered(base) for base in wants]
    sampler = filled(VOCAB, seqs, processors=processors)
    rng, done = random.Random(5), [0] * 5
    for step in range(9):
        slots = rng.sample(range(5), 5)
        logits = normal(5, VOCAB, seed=step)
        ids = sampler.sample(logits.clone(), slots, [0] * 5).token_ids.tolist()
        for row, slot in enumerate(slots):
            forced = wants[slot] is not None
            assert ids[row] == (wants[slot] + done[slot] if forced else logits[row].argmax())
            done[slot] += 1


class Broken(Invariant):
    def is_argmax_invariant(self):
        return False

    def apply(self, logits):
        raise RuntimeError("no")


def test_a_processor_that_fails_as_a_whole_fails_the_step():
    sampler = filled(VOCAB, [request()] * 2, processors=[Broken(None, None, False)])
    with pytest.raises(HookFailed, match="RuntimeError: no"):
        sampler.sample(normal(2, VOCAB), [0, 1], [0, 0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no.such:Thing", "no logits processor 'no.such:Thing'"),
        ("random:Nothing", "no logits processor"),
        ("random:randint", "not a class"),
        ("nodots", "module:Class"),
        (int, "has no apply"),
    ],
)
def test_what_is_not_a_processor_is_refused_by_name(name, words):
    with pytest.raises(ConfigError, match=words):
        load_processors([name], None, torch.device("cpu"))
