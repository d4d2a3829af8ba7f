"""A recording run again makes the plans that were made; a bug in the scheduler shows again."""

import os
import random

import pytest

from quire.config.config import (
    CacheSection,
    DeviceSection,
    EngineConfig,
    LoadSection,
    ModelSection,
    ObserveSection,
    ParallelSection,
    SamplingSection,
    SchedulerSection,
)
from quire.core.limits.grammars import GrammarLimit
from quire.core.params import SamplingParams
from quire.core.types import Request, Stop
from quire.engine import bundle, recorder
from quire.engine.loop import Engine
from quire.engine.pulse import Beat
from quire.engine.recorder import Recorder, Ring
from quire.engine.replay import Replay
from quire.executors.fake import Executor
from tests.pure.core.made import FakeGrammars, bound
from tests.pure.core.workload import Setup

EOS = 5
WHOLE = 1 << 22


def config(setup):
    """As far as a replay looks at it."""
    model = dict.fromkeys(("name", "model_type", "tokenizer", "tokenizer_mode", "dtype"), "")
    switches = ("skip_tokenizer_init", "trust_remote_code", "disable_sliding_window")
    return EngineConfig(
        model=ModelSection(
            **{**model, "name": "/home/me/secret-model"},
            **dict.fromkeys(switches, False),
            seed=0,
            vocab=500,
            revision=None,
            tokenizer_revision=None,
            served_names=("secret",),
            chat_template="secret",
            max_logprobs=0,
            logprobs_mode="raw_logprobs",
            logits_processors=(),
        ),
        cache=CacheSection(
            block_size=setup.block_size,
            num_blocks=setup.blocks,
            num_host_blocks=0,
            prefix_caching=setup.prefix_caching,
            dtype="",
            layers=(),
            groups=(),
            block_bytes=0,
        ),
        scheduler=SchedulerSection(
            max_num_batched_tokens=setup.budget,
            max_num_seqs=setup.slots,
            max_model_len=10_000,
            chunked_prefill=True,
            max_num_partial_prefills=0,
            max_long_partial_prefills=0,
            long_prefill_token_threshold=0,
            inter_token_target_s=0.0,
            policy="fcfs",
            preemption_mode="recompute",
            steps_in_flight=setup.depth,
        ),
        load=LoadSection(format="auto", download_dir="/secret", hf_token="secret", progress=False),
        device=DeviceSection(kind="cpu", attention_backend="auto", threads=1),
        parallel=ParallelSection(tensor=1),
        sampling=SamplingSection(defaults={}, eos_ids=(EOS,)),
        observe=ObserveSection(log_stats=False, log_level=None),
    )


class Flight:
    """An engine at work, its recorder, and what becomes of the recording."""

    def __init__(self, setup, tmp_path, *, size=WHOLE, **how):
        self.setup, self.folder = setup, tmp_path
        self.fd = os.memfd_create("ring")
        scheduler, _, _ = setup.build()
        self.engine = Engine(scheduler, Executor(self.next_token), steps_in_flight=setup.depth)
        self.recorder = Recorder(Ring(self.fd, size), lambda: self.engine.available, **how)
        self.engine.show(self.recorder)

    def next_token(self, tokens):
        return (sum(tokens) * 31 + len(tokens)) % 50

    def fly(self, seed, requests=60):
        """Some hundred steps with all that may happen."""
        rng, todo = random.Random(seed), list(made(seed, requests, self.setup.grammars))
        alive = []
        while todo or not self.engine.empty:
            for request in todo[: rng.randrange(3)]:
                self.engine.add(request)
                alive.append(request)
                todo.remove(request)
            if alive and rng.random() < 0.05:
                self.engine.abort(alive.pop(rng.randrange(len(alive))).id)
            if alive and rng.random() < 0.05:
                self.engine.abort_sequence(rng.choice(alive).id, 0)
            if self.setup.grammars is not None:
                self.setup.grammars.tick()
            self.step()

    def step(self):
        for update in self.engine.step():
            if update.finish is not None:
                self.engine.release(update.request_id)

    def recording(self):
        taken = recorder.read(self.fd)
        path = bundle.write(
            self.folder, taken, config(self.setup), why="a test", beat=Beat(), stacks=""
        )
        return bundle.read(path)

    def replayed(self, setup=None):
        return Replay(self.recording(), (setup or self.setup).again).run()


class Again(Setup):
    """Makes schedulers for replays, too."""

    def again(self, config, grammars):
        kept, self.grammars = self.grammars, None
        scheduler, _, _ = self.build()
        scheduler._limits.append(GrammarLimit(grammars, 10_000))
        self.grammars = kept
        return scheduler


def made(seed, count, grammars):
    """Requests whose prompts begin alike, some with n, some that are held, some bound."""
    rng = random.Random(seed)
    shared = [tuple(rng.randrange(6, 400) for _ in range(40)) for _ in range(3)]
    for i in range(count):
        prompt = rng.choice(shared)[: rng.randrange(0, 40)]
        prompt += tuple(rng.randrange(6, 400) for _ in range(rng.randrange(1, 30)))
        constraint = bound(3, 1) if grammars is not None and rng.random() < 0.2 else None
        yield Request(
            f"user-{i}",
            prompt,
            Stop(rng.randrange(1, 25), eos_ids=frozenset([EOS])),
            SamplingParams(prompt_logprobs=1 if rng.random() < 0.1 else None),
            n=rng.choice([1, 1, 1, 3]),
            salt=rng.choice([b"", b"mine"]),
            read_prefix_cache=rng.random() < 0.9,
            hold=rng.random() < 0.1,
            constraint=constraint,
        )


SETUPS = {
    "roomy": {},
    "tight": {"blocks": 60, "budget": 40, "seats": 9, "slots": 9},
    "two in flight": {"blocks": 60, "budget": 40, "seats": 9, "slots": 9, "depth": 2},
    "no prefix cache": {"blocks": 80, "budget": 40, "prefix_caching": False},
    "fair": {"blocks": 70, "budget": 50, "fair": True, "short_first": True, "depth": 2},
    "grammars": {"blocks": 90, "depth": 2},
}


def setup_of(name):
    grammars = FakeGrammars() if name == "grammars" else None
    return Again(**SETUPS[name], grammars=grammars)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SETUPS)
def test_a_recording_makes_the_same_plans_again(tmp_path, name, seed):
    flight = Flight(setup_of(name), tmp_path)
    flight.fly(seed)
    found = flight.replayed()
    assert found.differences == []
    assert found.steps > 20


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["tight", "two in flight", "no prefix cache"])
def test_a_recording_that_begins_in_the_middle_is_of_use(tmp_path, name, seed):
    """Who was preempted, and what the cache knew, is not in it; all else is."""
    flight = Flight(setup_of(name), tmp_path, size=30_000)
    flight.fly(seed)
    found = flight.replayed()
    assert found.steps > 20
    assert [one for one in found.differences if "raises" in one.what] == []
