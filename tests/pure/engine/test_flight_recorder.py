"""A recording run again makes the plans that were made; a bug in the scheduler shows again."""

import gzip
import json
import os
import random
from dataclasses import dataclass, replace

import pytest

from quire.cli.replay import format_steps
from quire.config.engine_config import (
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
from quire.core.params import SamplingParams
from quire.core.scheduling.limits.adapters import AdapterLimit
from quire.core.scheduling.limits.itl_target import InterTokenLatencyLimit
from quire.core.tenant_limits import TenantLimits
from quire.core.types import AdapterRef, Request, SequenceState, StopConditions
from quire.engine.core.engine_core import EngineCore
from quire.engine.core.step_observer import StepObserver
from quire.engine.heartbeat_page import Heartbeat
from quire.engine.recording import flight_recorder, recording_file
from quire.engine.recording.flight_recorder import FlightRecorder, RecordRing, request_digest
from quire.engine.recording.replay import RecordedAdapters, RecordingReplay
from quire.errors import ConfigError
from quire.executors.fake import Executor
from tests import tiers
from tests.pure.core.builders import FakeGrammars, fake_constraint
from tests.pure.core.proposing_executor import ProposingExecutor
from tests.pure.core.workload import Setup, with_media, with_pooling

EOS = 5
WHOLE = 1 << 22


def config(setup):
    """As far as a replay looks at it."""
    model = dict.fromkeys(("name", "model_type", "tokenizer", "tokenizer_mode", "dtype"), "")
    switches = ("skip_tokenizer_init", "trust_remote_code", "disable_sliding_window")
    return EngineConfig(
        model=ModelSection(
            **{**model, "name": "/home/me/of-mine"},
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
            steps_in_flight=setup.depth,
        ),
        load=LoadSection(format="auto", download_dir="/secret", hf_token="secret", progress=False),
        device=DeviceSection(kind="cpu", attention_backend="auto", threads=1, captured_tokens=1024),
        parallel=ParallelSection(tensor=1),
        sampling=SamplingSection(defaults={}, eos_ids=(EOS,)),
        observe=ObserveSection(log_stats=False, log_level=None),
    )


def next_token(tokens):
    return (sum(tokens) * 31 + len(tokens)) % 50


class Flight:
    """An engine at work, its recorder, and what becomes of the recording."""

    def __init__(self, setup, tmp_path, *, size=WHOLE, **how):
        self.setup, self.folder = setup, tmp_path
        self.fd = os.memfd_create("ring")
        scheduler, _, _ = setup.build()
        executor = Executor(self.next_token)
        if setup.model_proposes:
            executor = ProposingExecutor(self.next_token, setup.proposer)
        self.engine = EngineCore(scheduler, executor, steps_in_flight=setup.depth)
        self.recorder = FlightRecorder(
            RecordRing(self.fd, size),
            lambda: self.engine.available_blocks,
            self.engine.extend_keys,
            **how,
        )
        self.engine.set_observers(self.recorder)

    def next_token(self, tokens):
        return next_token(tokens)

    def fly(self, seed, requests=60):
        """Some hundred steps with all that may happen."""
        rng, todo = random.Random(seed), list(made(seed, requests, self.setup.grammars))
        todo = with_pooling(rng, todo, self.setup.pooled)
        if self.setup.adapters:
            names = [None, "a", "b", "c", "d"]
            refs = [one and AdapterRef(one, one.encode()) for one in names]
            todo = [replace(one, adapter=rng.choice(refs)) for one in todo]
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
        taken = flight_recorder.read_ring(self.fd)
        path = recording_file.write_recording(
            self.folder, taken, config(self.setup), why="a test", beat=Heartbeat(), stacks=""
        )
        return recording_file.read_recording(path)

    def replayed(self, setup=None):
        return RecordingReplay(self.recording(), (setup or self.setup).again).run()


@dataclass
class Again(Setup):
    """Makes schedulers for replays, too. pace: seconds that a step should take; 0: none."""

    pace: float = 0.0
    pooled: float = 0.0  # share of requests for pooled results
    adapters: int = 0  # of a step

    def limits(self, order, kv):
        return [
            *super().limits(order, kv),
            *([AdapterLimit(self.adapters, RecordedAdapters())] if self.adapters else []),
            *([InterTokenLatencyLimit(self.pace)] if self.pace else []),
        ]

    def again(self, config, grammars, adapters):
        kept, self.grammars = self.grammars, grammars
        scheduler, _, _ = self.build()
        self.grammars = kept
        return scheduler


def made(seed, count, grammars):
    """Requests with shared prefixes, some with n, some held, some constrained."""
    rng = random.Random(seed)
    shared = [tuple(rng.randrange(6, 400) for _ in range(40)) for _ in range(3)]
    for i in range(count):
        prompt = rng.choice(shared)[: rng.randrange(0, 40)]
        prompt += tuple(rng.randrange(6, 400) for _ in range(rng.randrange(1, 30)))
        constraint = fake_constraint(3, 1) if grammars is not None and rng.random() < 0.2 else None
        yield Request(
            f"user-{i}",
            prompt,
            StopConditions(rng.randrange(1, 25), eos_ids=frozenset([EOS])),
            SamplingParams(prompt_logprobs=1 if rng.random() < 0.1 else None),
            n=rng.choice([1, 1, 1, 3]),
            salt=rng.choice([b"", b"mine"]),
            tenant=rng.choice([b"", b"one", b"two"]),
            tenant_limits=TenantLimits(weight=rng.choice([1.0, 3.0])),
            read_prefix_cache=rng.random() < 0.9,
            hold=rng.random() < 0.1,
            constraint=constraint,
        )


DRAFTS = {"proposer": lambda seq, tokens: guess(tokens), "adaptive": True}
SETUPS = {
    "roomy": {},
    "tight": {"blocks": 60, "budget": 40, "max_rows": 9, "slots": 9},
    "two in flight": {"blocks": 60, "budget": 40, "max_rows": 9, "slots": 9, "depth": 2},
    "host tier": {"blocks": 50, "budget": 60, "slots": 9, "host": 100, "depth": 2},
    "no prefix cache": {"blocks": 80, "budget": 40, "prefix_caching": False},
    "fair": {"blocks": 70, "budget": 50, "fair": True, "short_first": True, "depth": 2},
    "grammars": {"blocks": 90, "depth": 2},
    "drafts": {"blocks": 70, "budget": 40, "max_rows": 9, "slots": 9, "drafts": 3, **DRAFTS},
    "drafts, two in flight": {"blocks": 70, "drafts": 3, "depth": 2, **DRAFTS},
    "drafts of a model": {"blocks": 300, "drafts": 3, "depth": 2, **DRAFTS, "model_proposes": True},
    "drafts of a model, tight": {
        "blocks": 80,
        "drafts": 3,
        "depth": 2,
        **DRAFTS,
        "model_proposes": True,
    },
    "adapters": {"blocks": 60, "budget": 40, "max_rows": 9, "slots": 9, "adapters": 2, "depth": 2},
    "paced": {"pace": 1e-5, "budget": 400, "depth": 2},
    "shared prompts": {"blocks": 90, "budget": 60, "least_shared": 8, "depth": 2},
    "pooled": {"blocks": 60, "budget": 40, "slots": 9, "depth": 2, "pooled": 0.5},
    "no KV": {
        "blocks": 0,
        "windows": (),
        "prefix_caching": False,
        "chunked": False,
        "budget": 90,
        "slots": 9,
        "depth": 2,
        "pooled": 1.0,
    },
}


def guess(tokens):
    """What the executor generates next, three times of four."""
    found, rng = list(tokens), random.Random(len(tokens))
    for _ in range(3):
        found.append(next_token(found) + (rng.random() < 0.25))
    return found[-3:]


def setup_of(name):
    grammars = FakeGrammars() if name == "grammars" else None
    return Again(**SETUPS[name], grammars=grammars)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(tiers.amount(2, 20)))
@pytest.mark.parametrize("name", SETUPS)
def test_a_recording_makes_the_same_plans_again(tmp_path, name, seed):
    flight = Flight(setup_of(name), tmp_path)
    flight.fly(seed)
    found = flight.replayed()
    assert found.differences == []
    assert found.steps > 20


def test_few_prompts_with_a_short_common_beginning_start_at_once_again(tmp_path):
    """Sequences with its tokens but other keys, which a replay cannot find, do not count."""
    flight = Flight(setup_of("shared prompts"), tmp_path)
    flight.fly(11)
    assert flight.replayed().differences == []


def test_prompts_that_wait_for_another_at_the_end_wait_again(tmp_path):
    flight = Flight(setup_of("shared prompts"), tmp_path)
    for i in range(3):
        flight.engine.add(Request(f"{i}", (*range(6, 46), 300 + i), StopConditions(3)))
    flight.step()
    assert [seq.planned for seq in flight.engine._scheduler.sequences()] == [41, 0, 0]
    assert flight.replayed().differences == []


def test_blocks_of_a_sequence_that_had_not_ended_are_found_again(tmp_path):
    """Their keys are known of one that found them, and of one that still waits."""
    flight = Flight(Again(slots=2), tmp_path)
    flight.engine.add(Request("first", (7, 8, 9), StopConditions(60)))
    for _ in range(14):
        flight.step()
    (first,) = flight.engine._scheduler.sequences()
    for i in range(2):
        prompt = (*first.tokens[:12], 300 + i)
        flight.engine.add(Request(f"{i}", prompt, StopConditions(3)))
    flight.step()
    assert [seq.cached for seq in flight.engine._scheduler.sequences()] == [0, 12, 0]
    assert flight.replayed().differences == []


@pytest.mark.parametrize("seed", range(tiers.amount(2, 20)))
@pytest.mark.parametrize(
    "name",
    [
        "tight",
        "two in flight",
        "host tier",
        "no prefix cache",
        "drafts",
        "drafts, two in flight",
        "drafts of a model",
    ],
)
def test_a_recording_that_begins_in_the_middle_is_of_use(tmp_path, name, seed):
    """Preempted sequences and the cache's contents are not in it; all else is."""
    flight = Flight(setup_of(name), tmp_path, size=30_000)
    flight.fly(seed)
    found = flight.replayed()
    assert found.steps > 20
    assert [one for one in found.differences if "raises" in one.what] == []


@pytest.mark.parametrize("seed", range(tiers.amount(2, 16)))
@pytest.mark.parametrize(
    "more",
    [{}, {"drafts": 3, **DRAFTS}, {"drafts": 3, **DRAFTS, "model_proposes": True}],
    ids=["plain", "drafts", "drafts of a model"],
)
def test_with_enough_blocks_a_recording_that_begins_in_the_middle_is_the_same(tmp_path, more, seed):
    flight = Flight(Again(blocks=3000, depth=2, **more), tmp_path, size=30_000)
    flight.fly(seed)
    found = flight.replayed()
    assert "begins in the middle" in found.notes[0]
    assert found.differences == []


def test_a_recording_may_begin_where_a_sequence_with_drafts_ends(tmp_path):
    def next_three(seq, tokens):
        found = list(tokens)
        for _ in range(3):
            found.append(next_token(found))
        return found[-3:]

    flight = Flight(Again(drafts=3, proposer=next_three), tmp_path)
    flight.engine.add(Request("ends", (7, 8, 9), StopConditions(5)))
    flight.engine.add(Request("goes on", (17, 8, 9), StopConditions(40)))
    flight.step()
    ring = flight.recorder._ring

    def in_full_ring(tokens):  # results begin the other half
        ring._length = ring.half_bytes
        return next_token(tokens)

    flight.engine._executor._next_token = in_full_ring
    flight.step()
    assert "ends" not in flight.recorder._active
    flight.step()
    flight.engine._executor._next_token = next_token
    flight.step()
    found = flight.replayed()
    assert found.steps == 4
    assert [one for one in found.differences if "raises" in one.what] == []


# -- bugs -------------------------------------------------------------------------------------


def break_budget(monkeypatch):
    """A step takes a token less than it may, now and then."""
    from quire.core.scheduling.limits.token_budget import TokenBudget

    allow = TokenBudget.allow
    monkeypatch.setattr(
        TokenBudget, "allow", lambda self, seq, want: allow(self, seq, want) - (want > 37)
    )


def break_victims(monkeypatch):
    """The first to come is the first to go."""
    from quire.core.scheduling.order.fifo import Fifo

    monkeypatch.setattr(Fifo, "choose_victim", lambda self, running: next(iter(running)))


def break_release(monkeypatch):
    """Blocks of an ending sequence are missing, if it had many."""
    from quire.core.kv.kv_cache import KVCache

    release = KVCache.release

    def lossy(self, seq, after):
        if len(seq.tables[0]) > 15:
            seq.tables[0].pop()
        release(self, seq, after)

    monkeypatch.setattr(KVCache, "release", lossy)


def break_matching(monkeypatch):
    """A longer prompt than any before is not looked up."""
    from quire.core.kv.kv_cache import KVCache

    match = KVCache.match_prefix
    monkeypatch.setattr(
        KVCache,
        "match_prefix",
        lambda self, seq, **how: None if len(seq.tokens) > 50 else match(self, seq, **how),
    )


BUGS = [break_budget, break_victims, break_matching]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("seed", range(tiers.amount(3, 20)))
def test_a_scheduler_bug_is_reproduced_and_its_fix_is_visible(tmp_path, bug, seed):
    """With the bug all plans are as recorded; without it the first that it changed is named."""
    flight = Flight(setup_of("tight"), tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        bug(patched)
        flight.fly(seed)
        assert flight.replayed().differences == []
    (found, *_) = flight.replayed().differences
    assert found.step > 0


@pytest.mark.parametrize("seed", range(tiers.amount(4, 20)))
def test_a_bug_that_ended_the_engine_ends_the_replay_at_the_same_step(tmp_path, seed):
    flight = Flight(setup_of("tight"), tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        break_release(patched)
        flight.engine._check = True
        with pytest.raises(AssertionError, match="blocks are held"):
            flight.fly(seed)
        (found,) = flight.replayed().differences
        assert found.what.startswith("it raises AssertionError: blocks are held")
        assert found.step == flight.recorder._step
    assert flight.replayed().differences == []


def test_a_step_that_raised_fails_again(tmp_path):
    flight = Flight(setup_of("roomy"), tmp_path)
    flight.engine.add(next(made(1, 1, None)))

    def broken(tokens):
        raise RuntimeError("no device")

    flight.engine._executor._next_token = broken
    flight.engine.step()
    assert [record[0] for record in flight.recording().records][:4] == ["b", "a", "p", "f"]
    assert flight.replayed().differences == []


class Poisoned(Executor):
    """Raises in every step that has this request."""

    def submit(self, plan):
        if any(row.seq.request.id == "user-9" for row in plan.rows):
            raise RuntimeError("no device")
        return super().submit(plan)

    def recover(self):
        self._tokens.clear()


@pytest.mark.parametrize("depth", [1, 2])
def test_failed_steps_and_the_fault_search_are_replayed(tmp_path, depth):
    flight = Flight(Again(blocks=300, depth=depth, fault_isolation=True), tmp_path)
    flight.engine._executor = Poisoned(flight.next_token)
    flight.fly(3)
    recording = flight.recording()
    kinds = [record[0] for record in recording.records]
    assert kinds.count("f") > 1
    assert kinds.count("m") == 1
    found = RecordingReplay(recording, flight.setup.again).run()
    assert found.differences == []
    assert found.steps == flight.recorder._step


def test_a_witness_that_fails_is_switched_off_and_others_go_on(caplog):
    class Bad(StepObserver):
        def on_step_planned(self, plan):
            raise KeyError(plan.step)

    fd = os.memfd_create("ring")
    engine = EngineCore(Again().build()[0], Executor(lambda tokens: 7))
    good = FlightRecorder(
        RecordRing(fd, WHOLE), lambda: engine.available_blocks, engine.extend_keys
    )
    engine.set_observers(Bad(), good)
    engine.add(Request("one", (7, 8), StopConditions(3)))
    while not engine.empty:
        engine.step()
    assert caplog.text.count("Bad is switched off") == 1
    assert [record[0] for record in flight_recorder.read_ring(fd).records].count("l") == 3
    os.close(fd)


# -- what it holds ----------------------------------------------------------------------------


def test_a_recording_holds_no_prompts_paths_or_keys(tmp_path):
    flight = Flight(setup_of("roomy"), tmp_path)
    secret = (401, 402, 403, 404) * 8
    flight.engine.add(Request("client-id", secret, StopConditions(3), salt=b"salty"))
    flight.step()
    flight.recording()
    (path,) = tmp_path.iterdir()
    text = gzip.decompress(path.read_bytes()).decode()
    for word in ("401,402", "client-id", "secret", "/home", "salty"):
        assert word not in text
    assert request_digest("client-id") in text
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_last_steps_are_kept_and_the_first_forgotten(tmp_path):
    flight = Flight(setup_of("roomy"), tmp_path, size=30_000)
    flight.fly(1)
    recording = flight.recording()
    steps = [record[1] for record in recording.records if record[0] == "p"]
    assert steps == list(range(steps[0], flight.recorder._step + 1))
    assert steps[0] > 1
    assert recording.header["submitted"] == steps[-1]


def test_the_table_of_the_last_steps_counts_those_that_wait(tmp_path):
    flight = Flight(Again(slots=2), tmp_path, size=6_000)
    for i in range(30):
        flight.engine.add(Request(f"{i}", (7, 8, 9), StopConditions(4)))
    while not flight.engine.empty:
        flight.step()
    _, *lines = format_steps(flight.recording())
    waiting = [int(line.split()[5]) for line in lines]
    joined = [line.count(" joins") for line in lines]
    assert waiting[0] - waiting[-1] == sum(joined[1:]) > 0


def test_a_folder_keeps_the_latest_files(tmp_path):
    flight = Flight(setup_of("roomy"), tmp_path)
    for _ in range(recording_file.MAX_FILES + 3):
        flight.recording()
    assert len(list(tmp_path.iterdir())) == recording_file.MAX_FILES


def test_a_recorder_keeps_the_order_in_which_running_sequences_joined(tmp_path):
    flight = Flight(setup_of("tight"), tmp_path)
    for request in made(2, 40, None):
        flight.engine.add(request)
    preempted = 0
    while not flight.engine.empty:
        flight.step()
        running = list(flight.engine._scheduler._running)
        known = [seq for seq in flight.recorder._sequences if seq.state is SequenceState.RUNNING]
        assert known == running
        preempted += any(seq.preemptions for seq in running)
    assert preempted


def test_an_empty_ring_has_no_records():
    fd = os.memfd_create("empty")
    assert flight_recorder.read_ring(fd) is None
    os.ftruncate(fd, 1 << 16)
    assert flight_recorder.read_ring(fd) is None
    os.close(fd)


def test_a_request_that_ends_twice_does_not_hurt_the_recorder(tmp_path):
    flight = Flight(setup_of("roomy"), tmp_path)
    flight.engine.add(Request("one", (7, 8, 9), StopConditions(5), n=3))
    flight.step()
    for _ in range(3):
        flight.engine.abort_sequence("one", 1)
    while not flight.engine.empty:
        flight.step()
    assert flight.replayed().differences == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        gzip.compress(b"", mtime=0),
        gzip.compress(b"[]\n", mtime=0),
        gzip.compress(json.dumps({"quire_flight": 99}).encode(), mtime=0),
        gzip.compress(json.dumps({"quire_flight": 2}).encode(), mtime=0),
    ],
)
def test_what_is_no_recording_is_refused_by_name(tmp_path, content):
    path = tmp_path / "file.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="file"):
        recording_file.read_recording(path)


def test_a_recording_of_an_older_format_names_the_version_that_reads_it(tmp_path):
    path = tmp_path / "old.jsonl.gz"
    header = {"quire_flight": 1, "versions": {"quire-llm": "0.1.0"}}
    path.write_bytes(gzip.compress(json.dumps(header).encode()))
    with pytest.raises(ConfigError, match=r"has recording format 1, .* 3 only: .* \(0\.1\.0\)"):
        recording_file.read_recording(path)


@pytest.mark.parametrize("seed", range(tiers.amount(3, 20)))
def test_sources_of_an_encoder_are_replayed_by_their_digests(tmp_path, monkeypatch, seed):
    """Which sources are equal decides on plans; their tokens are not kept."""
    sources = [tuple(range(1000, 1000 + n)) for n in (3, 9, 14)]

    def with_sources(*given):
        for i, request in enumerate(made(*given)):
            yield replace(request, encoder_prompt=sources[i % 3], parent=None)

    made = Flight.fly.__globals__["made"]
    monkeypatch.setitem(Flight.fly.__globals__, "made", with_sources)
    setup = setup_of("tight")
    setup.blocks, setup.encoder = setup.blocks + 8, (20, 14)
    flight = Flight(setup, tmp_path)
    flight.fly(seed)
    assert flight.replayed().differences == []


@pytest.mark.parametrize("seed", range(tiers.amount(3, 20)))
@pytest.mark.parametrize("bidirectional", [False, True])
def test_media_items_are_replayed_by_their_digests(tmp_path, monkeypatch, seed, bidirectional):
    """Their places, and which are equal, decide on plans; their content is not kept."""
    rng = random.Random(seed)

    def with_items(*given):
        plain = [replace(one, parent=None) for one in made(*given)]
        return with_media(rng, plain, bidirectional=bidirectional)

    made = Flight.fly.__globals__["made"]
    monkeypatch.setitem(Flight.fly.__globals__, "made", with_items)
    setup = setup_of("tight")
    setup.blocks, setup.budget = setup.blocks + 40, 60
    setup.media = {"max_rows": 50, "cache_rows": 64}
    flight = Flight(setup, tmp_path)
    flight.fly(seed)
    assert flight.replayed().differences == []
