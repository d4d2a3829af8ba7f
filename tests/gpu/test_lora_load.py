"""Loads of adapters on a GPU: from pinned memory, on a stream of their own, in the order of steps."""

import pytest
import torch

from quire.kernels.formats.lora_bank import LoraBank, LoraPart
from quire.runner.gpu.slot_loader import SlotLoader
from quire.weights.adapters.adapter import Adapter, LinearDelta
from quire.weights.adapters.packed import pack_adapter, pinned_bytes

CUDA = torch.device("cuda", 0)
PARTS = (4096, 1024, 1024)
LAYERS, RANK, INPUTS, SLOTS = 16, 16, 4096, 4


def adapter(value):
    def delta(size):
        a = torch.full((RANK, INPUTS), value, dtype=torch.bfloat16)
        return LinearDelta(a, torch.full((RANK, size), value, dtype=torch.bfloat16))

    deltas = {f"{i}": dict(enumerate(map(delta, PARTS))) for i in range(LAYERS)}
    return pack_adapter(Adapter(f"{int(value):02x}", RANK, 0, deltas), pinned_bytes)


@pytest.fixture
def banks():
    return {
        f"{i}": LoraBank.allocate(SLOTS, RANK, INPUTS, PARTS, torch.bfloat16, CUDA)
        for i in range(LAYERS)
    }


def copies_of(banks, one):
    def copies():
        for name, bank in banks.items():
            yield from bank.copies([LoraPart(d.a, d.b) for d in one.deltas[name].values()])

    return copies


def test_a_load_is_pinned_memory_in_its_slot_and_in_no_other(banks):
    loader, made = SlotLoader(CUDA), [adapter(float(i)) for i in range(1, 4)]
    assert all(one.packed.buffer.is_pinned() for one in made)
    for slot, one in enumerate(made):
        loader.load(slot, copies_of(banks, one), one.packed)
    assert len(loader._plans) == 1
    for bank in banks.values():
        for slot, _ in enumerate(made):
            assert (bank.a[slot] == slot + 1).all()
            assert (bank.b[slot] == slot + 1).all()
            assert bank.ranks[slot].tolist() == [RANK] * len(PARTS)
        assert not bank.ranks[3].any()


def test_steps_and_loads_of_one_slot_are_in_order(banks):
    """Each step sums its slot: it must find the adapter that was loaded for it, whole."""
    loader, steps = SlotLoader(CUDA), torch.cuda.Stream()
    made, found = [adapter(float(i)) for i in range(1, 9)], []
    work = torch.randn(4096, 4096, device=CUDA)
    with torch.cuda.stream(steps):
        for turn, one in enumerate(made * 4):
            slot = turn % 2
            loader.begin_step({slot}, {slot})
            loader.load(slot, copies_of(banks, one), one.packed)
            for _ in range(3):
                work = work @ work.T / 4096  # the step is longer than a load
            each = [
                bank.a[slot].float().sum() + bank.b[slot].float().sum() for bank in banks.values()
            ]
            found.append(torch.stack(each).sum())
        torch.cuda.synchronize()
    size = LAYERS * RANK * (len(PARTS) * INPUTS + sum(PARTS))
    for one, total in zip(made * 4, found):
        want = size * int(one.digest, 16)
        assert abs(total.item() - want) <= 1e-5 * want


def test_a_load_does_not_wait_for_the_host_or_for_a_step_that_does_not_read_its_slot(banks):
    loader, one, steps = SlotLoader(CUDA), adapter(5.0), torch.cuda.Stream()
    loader.load(0, copies_of(banks, one), one.packed)  # compiles, and plans
    torch.cuda.synchronize()
    with torch.cuda.stream(steps):
        loader.begin_step({0}, ())
        torch.cuda._sleep(400_000_000)  # a step of some 0.2 s
        after_step = torch.cuda.Event()
        after_step.record()
        loader.begin_step({1}, {1})
        loader.load(1, copies_of(banks, one), one.packed)
        loaded = loader._reading[-1][0]
        loaded.synchronize()
        assert not after_step.query(), "the load was done while the step ran"
        waits = torch.cuda.Event()
        waits.record()
        assert not waits.query(), "what follows on the stream of steps comes after both"
    torch.cuda.synchronize()
    assert (banks["3"].a[1] == 5).all()


def test_bytes_of_a_load_per_second(banks, capsys):
    """Prints a figure; the assertion is far below any bus."""
    loader, one = SlotLoader(CUDA), adapter(2.0)
    loader.load(0, copies_of(banks, one), one.packed)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(8):
        loader.load(0, copies_of(banks, one), one.packed)
    end.record()
    torch.cuda.synchronize()
    rate = 8 * one.nbytes / begin.elapsed_time(end) / 1e6
    with capsys.disabled():
        print(f"\nloads of {one.nbytes / 1e6:.0f} MB: {rate:.1f} GB/s")
    assert rate > 0.5
