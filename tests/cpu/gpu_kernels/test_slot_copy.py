"""Loads of slots on a GPU, in the interpreter: every kind of bank, from memory at any byte."""

import dataclasses

import pytest
import torch

from quire.kernels.formats.lora_bank import LoraBank, LoraPart
from quire.weights.adapters.adapter import Adapter, ExpertsDelta, LinearDelta
from quire.weights.adapters.packed import ALIGNMENT, pack_adapter

slot_copy = pytest.importorskip("quire.kernels.gpu.lora.slot_copy", reason="no triton")
CPU = torch.device("cpu")


def bytes_of(size):
    return torch.full((size,), 7, dtype=torch.uint8)


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


def new_bank(slots, rank, inputs, parts, dtype, experts=1, scaled=False):
    bank = LoraBank.allocate(
        slots, rank, inputs, parts, dtype, CPU, experts=experts, factors=scaled, shifts=scaled
    )
    for name in ("a", "b", "factor", "shift"):
        if getattr(bank, name) is not None:
            getattr(bank, name).fill_(3)
    return bank


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize(
    ("inputs", "parts", "ranks"),
    [(64, (32, 16, 16), (16, 16, 16)), (33, (40,), (5,)), (6000, (7, 20), (0, 3))],
)
def test_a_slot_is_as_separate_copies_make_it(inputs, parts, ranks, experts, dtype):
    torch.manual_seed(0)
    lead = (experts,) if experts > 1 else ()
    scaled = experts == 1
    made = [None] * len(parts)
    for i, (r, o) in enumerate(zip(ranks, parts)):
        if r:
            made[i] = LoraPart(
                random(*lead, r, inputs, dtype=dtype), random(*lead, r, o, dtype=dtype)
            )
            if scaled and i != 1:
                made[i] = made[i]._replace(factor=torch.rand(o), shift=torch.rand(o))
    banks = [new_bank(3, 16, inputs, parts, dtype, experts, scaled) for _ in range(2)]
    banks[0].write(1, made)
    places, sources, at = [], [], 0
    for place, source in banks[1].copies(made):
        places.append((at, place))
        sources.append((at, source.contiguous()))
        at += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = bytes_of(at)
    for begin, source in sources:
        flat = source.view(-1).view(torch.uint8)
        buffer[begin : begin + len(flat)] = flat
    slot_copy.copy_to_slot(buffer, slot_copy.build_copy_table(places, CPU), 1)
    for field in dataclasses.fields(LoraBank):
        want, found = (getattr(bank, field.name) for bank in banks)
        assert torch.equal(found, want) if torch.is_tensor(want) else found == want, field.name


def test_a_packed_adapter_is_one_buffer_of_the_same_tensors():
    shared = random(4, 8)
    deltas = {
        "b": {
            0: LinearDelta(shared, random(4, 6)),
            1: LinearDelta(shared, random(4, 3), random(3)),
        },
        "a": {2: ExpertsDelta(random(2, 3, 8), random(2, 3, 5))},
    }
    adapter = Adapter("00", 4, 1, deltas)
    packed = pack_adapter(adapter, bytes_of)
    assert packed.nbytes == packed.packed.buffer.nbytes
    storage = packed.packed.buffer.untyped_storage().data_ptr()
    for layer, parts in deltas.items():
        for part, delta in parts.items():
            found = packed.deltas[layer][part]
            for name in delta.__struct_fields__:
                want, one = getattr(delta, name), getattr(found, name)
                assert (one is None) == (want is None)
                if want is not None:
                    assert torch.equal(one, want)
                    assert one.untyped_storage().data_ptr() == storage
                    assert one.is_contiguous()
    assert packed.deltas["b"][0].a.data_ptr() == packed.deltas["b"][1].a.data_ptr()
    turned = Adapter("01", 4, 1, dict(reversed(deltas.items())))
    assert pack_adapter(turned, bytes_of).packed.layout == packed.packed.layout
    other = Adapter("02", 4, 1, {"a": deltas["a"]})
    assert pack_adapter(other, bytes_of).packed.layout != packed.packed.layout
