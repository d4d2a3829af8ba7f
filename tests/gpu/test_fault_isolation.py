"""Faults on a GPU: the faulty request ends, others are unchanged; a lost device is detected."""

import signal
import subprocess
import sys

import pytest
import torch

from quire.errors import EngineDead
from tests.cpu.engine_of import TINY, WINDOWED, engine_of, request

ASKED = [
    ("a", range(1, 30), 20, {}),
    ("b", range(1, 30), 20, {"temperature": 1.0, "n": 3}),
    ("c", range(5, 9), 30, {"temperature": 0.8, "top_p": 0.9}),
    ("d", range(40, 90), 9, {"repetition_penalty": 1.2}),
    ("e", range(7, 40), 25, {"temperature": 0.0, "logprobs": 2}),
]


def engine(**setup):
    made = engine_of(setup.pop("hf", TINY), num_blocks=80, device="cuda", **setup)
    for name, prompt, most, more in ASKED:
        made.add(request(name, list(prompt), most, **more))
    return made


def lane_of(made):
    return made._executor.runner.worker


def caches(made):
    return lane_of(made)._kv_memory._cache


def spoil_block(cache, block, blocks=80):
    """Wherever the axis of blocks is."""
    axis = list(cache.shape).index(blocks)
    cache.select(axis, block).fill_(float("nan"))


def drive(made, at_step=None):
    said, ends = {}, {}
    for number in range(2000):
        if made.idle:
            break
        if at_step is not None:
            at_step(number)
        for u in made.step():
            said.setdefault(u[:2], []).extend(u.token_ids)
            if u.finish:
                ends[u[:2]] = u
    assert made.idle
    made.shutdown()
    return said, ends


SETUPS = [{"depth": d, "eager": e} for d in (1, 2, 3) for e in (False, True)]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("hf", [TINY, WINDOWED], ids=["full", "windowed"])
def test_nan_in_free_memory_reaches_no_row(hf, setup):
    want = drive(engine(hf=hf, **setup))[0]
    made = engine(hf=hf, **setup)
    for cache in caches(made):
        cache.fill_(float("nan"))
    assert drive(made)[0] == want


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_sequence_whose_memory_is_spoilt_ends_alone(setup):
    want = drive(engine(**setup))[0]
    made = engine(**setup)

    def spoil(number):
        seqs = {s.request.id: s for s in made._scheduler.sequences()}
        if number == 12 and "c" in seqs:
            torch.cuda.synchronize()
            for cache in caches(made):
                spoil_block(cache, seqs["c"].tables[0][0])
            torch.cuda.synchronize()

    said, ends = drive(made, spoil)
    assert ends["c", 0].fault == "numbers"
    for place, tokens in want.items():
        if place != ("c", 0):
            assert said[place] == tokens
    assert made.stats().corrupt_rows == 1


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("always", [False, True])
def test_a_step_that_raises_is_made_again_in_halves(setup, always, monkeypatch, caplog):
    want = drive(engine(**setup))[0]
    made = engine(**setup)
    lane, count = lane_of(made), [0]
    compute, mine = lane.compute, {}

    join = made._executor.runner.sampler.join

    def joins(joined):
        mine[joined.slot] = joined.request_id
        join(joined)

    def breaks(inputs, prompts):
        computed = compute(inputs, prompts)
        count[0] += 1
        hit = "c" in [mine[int(slot)] for slot in inputs.slots] if always else count[0] == 9
        if hit:
            raise RuntimeError("half way")
        return computed

    monkeypatch.setattr(lane, "compute", breaks)
    monkeypatch.setattr(made._executor.runner.sampler, "join", joins)
    said, ends = drive(made)
    blamed = {place for place, update in ends.items() if update.finish == "error"}
    assert blamed == ({("c", 0)} if always else set())
    for place, tokens in want.items():
        if place not in blamed:
            assert said[place] == tokens


LOST = """
import torch
from quire.errors import EngineDead
from tests.gpu.test_fault_isolation import engine, lane_of

made = engine(depth=2)
for _ in range(5):
    made.step()
lane = lane_of(made)
compute = lane.compute
def lose(inputs, prompts):
    lane.compute = compute
    torch.zeros(4, device="cuda")[torch.tensor([9**9], device="cuda")]  # an assertion on the device
    return compute(inputs, prompts)
lane.compute = lose
try:
    for _ in range(5):
        made.step()
except EngineDead as error:
    print("DEAD", error, flush=True)
import os
os._exit(0)
"""


def test_an_error_that_the_context_keeps_ends_the_engine_at_once():
    run = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=120)
    # where a tensor is freed before the device is checked, torch itself ends the process
    known = "DEAD the device is lost" in run.stdout or run.returncode == -signal.SIGABRT
    assert known, run.stdout[-500:] + run.stderr[-2000:]


def test_asking_a_device_that_is_well_changes_nothing():
    made = engine(depth=2)
    for _ in range(4):
        made.step()
    made.drain()
    lane_of(made).recover()
    assert drive(made)[0]
    assert issubclass(EngineDead, RuntimeError)
