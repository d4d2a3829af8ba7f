"""Products with adapters in one launch, at the sizes of an 8B model: sums, bits of base rows, races."""

from functools import partial

import pytest
import torch

from quire.kernels.act import act_mul
from quire.kernels.formats.lora_bank import LoraRows
from quire.kernels.framework import lazy_fusion
from quire.kernels.linear import linear
from quire.kernels.lora import lora_linear, random_bank, sort_rows
from quire.kernels.rms_norm import rms_norm

CUDA = torch.device("cuda", 0)
LAYERS = {  # parts, inputs
    "qkv": ((4096, 1024, 1024), 4096),
    "o": ((4096,), 4096),
    "gate_up": ((14336, 14336), 4096),
    "down": ((4096,), 14336),
}
SLOTS = 32


class Layer:
    def __init__(self, name, count):
        parts, inputs = LAYERS[name]
        self.gated, self.normed = name == "gate_up", name in ("qkv", "gate_up")
        ranks = [[(16, 8, 1, 13)[slot % 4]] * len(parts) for slot in range(SLOTS)]
        self.bank = random_bank(ranks, inputs, parts, torch.bfloat16, CUDA)
        self.x = torch.randn(count, inputs, device=CUDA).bfloat16()
        self.residual = torch.randn(count, inputs, device=CUDA).bfloat16()
        self.norm = torch.randn(inputs, device=CUDA).bfloat16()
        weight = torch.randn(sum(parts), inputs, device=CUDA) / inputs**0.5
        self.weight = weight.bfloat16()

    def run(self, rows):
        x = self.x
        if self.normed:
            x, _ = rms_norm(x, self.norm, 1e-6, self.residual)
        y = linear(x, self.weight)
        if rows is not None:
            y = lora_linear(y, x, self.bank, rows)
        out = act_mul(y, "silu") if self.gated else y
        lazy_fusion.flush()
        return out


def rows_of(slots):
    rows = LoraRows.allocate(len(slots), SLOTS, CUDA)
    return assigned(rows, slots)


def assigned(rows, slots):
    rows.slots.copy_(torch.as_tensor(slots, dtype=torch.int32))
    sort_rows(rows)
    return rows


def mixes(count):
    yield torch.full((count,), 5)
    yield torch.arange(count) % SLOTS
    yield torch.randint(-1, SLOTS, (count,))
    yield torch.full((count,), -1)
    yield torch.arange(count) // 2 % SLOTS


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("count", [1, 2, 5, 8, 9, 32, 64, 65])
def test_products_with_adapters_are_those_of_ops_one_by_one(name, count):
    torch.manual_seed(0)
    layer = Layer(name, count)
    base = layer.run(None)
    for slots in mixes(count):
        rows = rows_of(slots)
        got = layer.run(rows)
        with lazy_fusion.disabled():
            want = layer.run(rows)
        torch.testing.assert_close(got, want, atol=0.1, rtol=0.05)
        plain = (slots < 0).to(CUDA)
        assert torch.equal(got[plain], base[plain])
        assert plain.all() or not torch.equal(got, base)


@pytest.mark.parametrize("count", [1, 4, 8, 32, 64])
def test_replays_of_a_graph_have_one_result(count):
    """Programs that read v too early would read that of the replay before, of another mix."""
    torch.manual_seed(0)
    layers, rows = [Layer(name, count) for name in LAYERS], rows_of([0] * count)
    run = partial(lambda: [layer.run(rows) for layer in layers])
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    some = list(mixes(count))
    want = []
    for slots in some:
        assigned(rows, slots)
        want.append([one.clone() for one in run()])
    for turn in range(200):
        assigned(rows, some[turn % len(some)])
        graph.replay()
        for one, other in zip(made, want[turn % len(some)]):
            assert torch.equal(one, other), turn
