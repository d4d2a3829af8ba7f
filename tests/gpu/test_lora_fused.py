"""Products of few rows with adapters, at the sizes of an 8B model: sums, bits of base rows, races."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from quire.kernels.act import act_mul
from quire.kernels.add import add
from quire.kernels.formats.lora_bank import LoraRows
from quire.kernels.framework import lazy_fusion
from quire.kernels.gpu.lora import adapted_linear
from quire.kernels.gpu.runtime.fast_launch import TritonKernel
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
        self.more = torch.randn(count, inputs, device=CUDA).bfloat16()
        self.residual = torch.randn(count, inputs, device=CUDA).bfloat16()
        self.norm = torch.randn(inputs, device=CUDA).bfloat16()
        weight = torch.randn(sum(parts), inputs, device=CUDA) / inputs**0.5
        self.weight = weight.bfloat16()

    def run(self, rows, x=None):
        x = add(self.x, self.more) if x is None else x
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


@pytest.fixture(params=["late", "early", "before", "beside", "behind", None])
def form(request, monkeypatch):
    """A form for all numbers of rows; None: the one that each has."""
    if request.param:
        monkeypatch.setattr(adapted_linear, "FORMS", {64: request.param})
    return request.param


def skip_impossible(form, count):
    if form in adapted_linear.INSIDE and count > 32:
        pytest.skip("cuBLAS has no adapters inside")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("count", [1, 5, 8, 9, 16, 32, 64, 65])
def test_products_with_adapters_are_those_of_ops_one_by_one(name, count, form):
    skip_impossible(form, count)
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


@pytest.mark.parametrize("count", [1, 4, 8, 16, 32, 64])
def test_replays_of_a_graph_have_one_result(count, form):
    """Programs that read x or v too early would read those of the replay before, of another mix."""
    skip_impossible(form, count)
    torch.manual_seed(0)
    layers, rows = [Layer(name, count) for name in LAYERS], rows_of([0] * count)

    def run():
        qkv, o, gate_up, down = layers
        made = [qkv.run(rows), o.run(rows)]
        for layer in gate_up, down:  # the product before still runs while these begin
            made.append(layer.run(rows, made[-1]))
        return made

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    some = list(mixes(count))
    inputs = [[torch.randn_like(layer.more) for layer in layers] for _ in some]
    want = []
    for slots, more in zip(some, inputs):
        set_step(layers, more, rows, slots)
        with without_overlap():
            want.append([one.clone() for one in run()])
    for turn in range(200):
        at = turn % len(some)
        set_step(layers, inputs[at], rows, some[at])
        graph.replay()
        for one, other in zip(made, want[at]):
            assert torch.equal(one, other), turn


def set_step(layers, more, rows, slots):
    for layer, one in zip(layers, more):
        layer.more.copy_(one)
    assigned(rows, slots)


@contextmanager
def without_overlap():
    """Within, each kernel begins after the one before it has ended."""
    launch = TritonKernel.__call__

    def alone(*args, **kwargs):
        launch(*args, **kwargs)
        torch.cuda.synchronize()

    with mock.patch.object(TritonKernel, "__call__", alone):
        yield
