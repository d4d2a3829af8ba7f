"""Attention of prompts by the Gluon kernel with a loader, whose body runs as Python here."""

from types import SimpleNamespace

import pytest
import torch

from quire.kernels.framework.op import OPS
from quire.kernels.gpu.attention import split_plan
from quire.kernels.gpu.attention.split_plan import AttentionExtras
from quire.kernels.paged_attention import _case
from tests import tiers
from tests.cpu.gpu_kernels import gluon_on_torch, gluon_partitions

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")

REFERENCE = OPS["paged_attention"].reference
KEYS = 32


class Blocks:
    """Shared memory [N, D] as the copy engine fills it: blocks of 64 channels of some tokens."""

    def __init__(self, data, shape):
        self._data, (_, self._tokens, self._channels) = data, shape

    def index(self, i):
        half, block = divmod(i, len(self._data) // self._tokens)
        rows = slice(block * self._tokens, (block + 1) * self._tokens)
        columns = slice(half * self._channels, (half + 1) * self._channels)
        return Shared(self._data[rows, columns])


class Shared(gluon_on_torch.Shared):
    layout = None

    @property
    def dtype(self):
        return self.data.dtype

    def index(self, i):
        return Shared(self.data[i])

    def store(self, value):
        self.data.copy_(value)

    def _reinterpret(self, dtype, shape, layout):
        return Blocks(self.data, shape)


def product(a, b, acc, use_acc=True, is_async=False):
    a = a.data if isinstance(a, gluon_on_torch.Shared) else a
    pending = gluon_partitions._Pending(a, b, acc)
    return pending if is_async else pending.result()


def wait(outstanding, deps):
    """The first of two products is waited for alone."""
    assert outstanding == 2 - len(deps)
    done = tuple(one.result() if hasattr(one, "result") else one for one in deps)
    return done[0] if len(done) == 1 else done


def whole(x):
    return torch.as_tensor(x)


def language(gl, programs):
    names = gluon_partitions.language(gl, programs)
    gl.load = lambda at, mask=None, other=0.0, cache_modifier="": gluon_on_torch.load(
        at, None if mask is None else torch.broadcast_tensors(mask, whole(at.at))[0], other
    )
    gl.allocate_shared_memory = lambda dtype, shape, layout: Shared(
        torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)
    )
    gl.maximum = lambda a, b: torch.maximum(whole(a), whole(b))
    gl.max, gl.exp2 = lambda x, axis: x.amax(axis), lambda x: torch.exp2(x.double()).float()
    gl.full = lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype)
    gl.zeros_like, gl.full_like = torch.zeros_like, torch.full_like
    gl.cdiv = lambda a, b: -(-a // b)
    gl.int1 = torch.bool
    return names | {"warpgroup_mma": product, "warpgroup_mma_wait": wait}


@pytest.fixture
def in_python(monkeypatch):
    """The kernel runs as Python, on a device of some multiprocessors."""
    from triton.experimental.gluon import language as gl

    from quire.kernels.gpu.attention import paged_attention_prefill_hopper as hopper
    from quire.kernels.gpu.attention import paged_attention_prefill_loader as loader

    body = hopper.prefill_hopper_kernel
    constants = {
        name: value.value
        for module in (hopper, loader)
        for name, value in vars(module).items()
        if isinstance(value, gl.constexpr)
    }

    def launch(grid, tensors, numbers, consts, tiles):
        (cache,) = tiles
        rows = SimpleNamespace(
            base=cache.base.view(-1, cache.base.shape[-1]), shape=cache.shape,
            block_shape=cache.block_shape, layout=None,
        )  # fmt: skip
        hopper.programs = grid[0]
        gluon_on_torch.run(body, grid, tensors, numbers, consts, constants, (rows,), language)

    monkeypatch.setattr(hopper, "programs", 0, raising=False)
    monkeypatch.setattr(hopper, "prefill_hopper_kernel", launch)
    monkeypatch.setattr(hopper, "sm_count", lambda device: 2)
    return hopper


@pytest.mark.parametrize(
    ("rows", "how", "programs"),
    [
        ([(70, 150), (9, 9), (90, 99)], {}, 2),
        ([(40, 240)], {"turns": False}, 2),
        *tiers.long(
            ([(1, 1), (130, 130)], {}, 2),
            ([(20, 20), (3, 260)], {"stages": 3}, 4),
            ([(33, 97)], {}, 2),
        ),
    ],
)
def test_tiles_of_keys_come_in_the_order_in_which_they_are_needed(rows, how, programs, in_python):
    torch.manual_seed(0)
    case = _case(torch.device("cpu"), (4, 2, 64, 16), rows, torch.bfloat16)
    out = torch.full_like(case["q"], float("nan"))
    counters = torch.zeros(64, dtype=torch.int32)
    extras = AttentionExtras(case["scale"], counters=counters)
    in_python.launch(
        out, case["q"], case["cache"], case["tables"], case["q_starts"], case["contexts"], 0,
        extras, keys=KEYS, **how,
    )  # fmt: skip
    torch.testing.assert_close(out, REFERENCE(**case), atol=2e-2, rtol=2e-2)
    assert not counters.any()
    assert in_python.programs == programs


def test_programs_share_the_keys_of_few_tiles(in_python, monkeypatch):
    monkeypatch.setattr(in_python, "sm_count", lambda device: 8)
    for module in (in_python, split_plan):
        monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 2 * KEYS)
    torch.manual_seed(0)
    case = _case(torch.device("cpu"), (4, 2, 64, 16), [(40, 300), (3, 80)], torch.bfloat16)
    out, counters = torch.full_like(case["q"], float("nan")), torch.zeros(64, dtype=torch.int32)
    extras = AttentionExtras(case["scale"], counters=counters)
    in_python.launch(
        out, case["q"], case["cache"], case["tables"], case["q_starts"], case["contexts"], 0,
        extras, keys=KEYS,
    )  # fmt: skip
    assert in_python.programs == 2 * 2 * 4, "two tiles for each of two heads, of four programs each"
    torch.testing.assert_close(out, REFERENCE(**case), atol=2e-2, rtol=2e-2)
    assert not counters.any()
