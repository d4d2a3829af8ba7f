"""Order of loads and steps on a GPU, on streams that note what must have happened before what."""

import random
from contextlib import contextmanager

import pytest
import torch

from quire.kernels.formats.lora_bank import SlotCopy
from quire.weights.adapters.adapter import PackedTensors

slot_loader = pytest.importorskip("quire.runner.gpu.slot_loader", reason="no triton")
CPU = torch.device("cpu")


class Device:
    """Streams and events of a device. A stream's past: numbers of the work that is done before."""

    def __init__(self):
        self.count = 0
        self.steps = self.current = FakeStream()

    def run(self):
        self.count += 1
        self.current.past.add(self.count)
        return self.count, frozenset(self.current.past)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class FakeStream:
    def __init__(self, device=None):
        self.past = set()

    def wait_event(self, event):
        self.past |= event.past


@pytest.fixture
def device(monkeypatch):
    device = Device()

    class FakeEvent:
        done = False

        def record(self, stream=None):
            self.past = frozenset((stream or device.current).past)

        def query(self):
            return self.done

    FakeEvent.all_done = lambda: setattr(FakeEvent, "done", True)
    device.event = FakeEvent
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: device.current)
    return device


def bytes_of(size):
    return torch.zeros(size, dtype=torch.uint8)


def packed(*tensors, layout=b"x"):
    buffer = bytes_of(256 * len(tensors))
    views = []
    for i, one in enumerate(tensors):
        views.append(buffer[256 * i :][: one.nbytes].view(one.dtype).view(one.shape).copy_(one))
    return PackedTensors(layout, buffer), views


@pytest.mark.parametrize("seed", range(20))
def test_a_load_is_after_the_last_step_that_read_its_slot_and_before_the_next(
    seed, device, monkeypatch
):
    draw = random.Random(seed)
    loader = slot_loader.SlotLoader(CPU, bytes_of)
    place, source = torch.zeros(4, 8), torch.ones(8)
    readers, loads = {}, {}  # slot -> the last step that read it, the last load of it
    overlapped = []

    def copy(buffer, table, slot):
        assert device.current is not device.steps
        number, past = device.run()
        if slot in readers:
            assert readers[slot] in past, "a step may still read what is overwritten"
        overlapped.append(bool(device.steps.past - past))
        loads[slot] = number

    monkeypatch.setattr(slot_loader, "copy_to_slot", copy)
    for _ in range(60):
        used = draw.sample(range(4), draw.randrange(4))
        filled = [slot for slot in used if draw.random() < 0.3]
        if used:  # a step without adapters does not reach the loader
            loader.begin_step(used, filled)
            for slot in filled:
                memory, (view,) = packed(source)
                loader.load(slot, lambda view=view: [SlotCopy(place, view)], memory)
        number, past = device.run()
        for slot in used:
            assert slot not in loads or loads[slot] in past, "a step reads before its load"
            readers[slot] = number
    assert any(overlapped), "loads run beside steps that do not read their slot"


def test_copies_are_planned_once_for_a_layout(device):
    loader = slot_loader.SlotLoader(CPU, bytes_of)
    bank, ranks = torch.zeros(3, 4, 6), torch.zeros(3, 1, dtype=torch.int32)
    planned = []

    def load(slot, value, layout):
        memory, (view,) = packed(torch.full((4, 6), value), layout=layout)

        def copies():
            planned.append(layout)
            yield SlotCopy(bank, view)
            yield SlotCopy(ranks, torch.tensor([4], dtype=torch.int32))

        loader.load(slot, copies, memory)

    for slot, value, layout in [(0, 1.0, b"a"), (2, 2.0, b"a"), (1, 3.0, b"b"), (0, 4.0, b"a")]:
        load(slot, value, layout)
    assert planned == [b"a", b"b"]
    assert bank[:, 0, 0].tolist() == [4, 3, 2]
    assert (bank == bank[:, :1, :1]).all()
    assert ranks[:, 0].tolist() == [4, 4, 4]
    for i in range(2 * slot_loader.MAX_PLANS):
        load(1, float(i), b"%d" % i)
    assert len(loader._plans) == slot_loader.MAX_PLANS
    assert bank[1, 3, 5] == 2 * slot_loader.MAX_PLANS - 1


def test_memory_is_held_until_its_copies_are_done(device):
    loader = slot_loader.SlotLoader(CPU, bytes_of)
    place = torch.zeros(2, 8)
    for _ in range(5):
        memory, (view,) = packed(torch.ones(8))
        loader.load(0, lambda view=view: [SlotCopy(place, view)], memory)
    assert len(loader._reading) == 5
    device.event.all_done()
    loader.load(0, lambda view=view: [SlotCopy(place, view)], memory)
    assert not loader._reading


def test_an_adapter_of_another_process_is_cut_and_gathered(device):
    loader = slot_loader.SlotLoader(CPU, bytes_of)
    place, whole = torch.zeros(2, 4, 3), torch.randn(4, 9)
    loader.load(1, lambda: [SlotCopy(place, whole[:, 3:6])], None)
    assert torch.equal(place[1], whole[:, 3:6])
    assert not place[0].any()
