"""What an op returns may not be written yet: every model reads it with ops alone, or flushes.

The kernels are not run: the order of calls decides, not the values. So all models fit in a test.
"""

import json
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.distributed.collectives import ProcessGroupCollectives
from quire.distributed.mesh import Mesh
from quire.errors import ConfigError
from quire.kernels import moe_experts
from quire.kernels.formats.peer_memory import PeerMemory
from quire.kernels.framework import lazy_fusion, op
from quire.kernels.framework.meta_device import MetaGroup
from quire.kernels.native import library
from quire.kernels.native.op_tape import _VIEW_OPS
from quire.models.build import build_model, read_model_config
from tests import tiers
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import TINY, VARIANTS
from tests.fused import call

pytest.importorskip("triton", reason="triton is not installed")


class ReadGuard(TorchDispatchMode):
    """Refuses a torch op that computes with a result whose kernel is not launched."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ not in _VIEW_OPS | {"empty_like"}:
            with self:  # under inference_mode flatten and the like arrive whole
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
            pending = lazy_fusion._thread_state.queue.pending
            unwritten = {
                t.untyped_storage().data_ptr() for held in pending for t in tensors(held.outputs)
            }
            read = {t.untyped_storage().data_ptr() for t in tensors((*args, *kwargs.values()))}
            assert not unwritten & read, f"{func} reads what {pending[-1].op} has not written"
        return func(*args, **kwargs)


def tensors(values):
    if isinstance(values, torch.Tensor):
        return [values]
    return [t for v in values for t in tensors(v)] if isinstance(values, (tuple, list)) else []


@pytest.fixture
def on_gpu(monkeypatch):
    """Ops take the path of CUDA tensors, and launch nothing."""
    from quire.kernels.gpu.runtime.fast_launch import TritonKernel

    monkeypatch.setattr(op, "_device_type", lambda first: "cuda")
    monkeypatch.setattr(library, "load_library", lambda: None)  # weights stay plain
    monkeypatch.setattr(TritonKernel, "__call__", lambda *args, **how: None)
    monkeypatch.setattr(moe_experts, "_multiply_chosen", moe_experts.multiply_all_experts)


def test_a_torch_op_on_a_pending_result_is_caught():
    x, w = torch.ones(1, 64).bfloat16(), torch.ones(64, 64).bfloat16()
    with ReadGuard():
        y = call("linear", x, w)
        with pytest.raises(AssertionError, match="has not written"):
            y.view(-1).add(1)
        lazy_fusion.flush()
        y.view(-1).add(1)


def step_guarded(variants, **settings):
    """Step models; return those that can be built so."""
    stepped = []
    for i, variant in enumerate(variants):
        model_type, config = read_model_config(json.loads((TINY / f"{variant}.json").read_text()))
        settings |= {"load_format": "dummy", "dtype": torch.bfloat16, "progress": False}
        try:
            model = build_model(model_type, config, **settings)
        except ConfigError:  # its heads cannot be divided
            continue
        stepped.append(variant)
        for rows in tiers.amount([(1, 40)[i % 2]], (1, 3, 40)):
            stepper = Stepper(model, config, dtype=torch.bfloat16)
            exchange = getattr(settings.get("comm"), "dp_exchange", None)
            equal = nullcontext()
            if exchange is not None:
                exchange.begin_step((rows, 2))
                equal = exchange.equal_rows(torch.zeros(rows, dtype=torch.int32))
            for way in (nullcontext(), *((equal,) if exchange else ())):
                with ReadGuard(), way:
                    stepper.hidden(list(range(rows)))
    return stepped


@pytest.mark.usefixtures("on_gpu")
def test_every_model_reads_pending_results_with_ops_alone():
    assert step_guarded(VARIANTS) == [*VARIANTS]


@pytest.mark.usefixtures("on_gpu")
def test_every_model_of_two_ranks_reads_pending_sums_with_ops_alone():
    areas, abort = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    comm = ProcessGroupCollectives(MetaGroup(2), PeerMemory(areas, abort, 0, 2, programs=128))
    some = [*[*VARIANTS][::4], "olmo2", "minimax_m2"]  # these two add up squares of all heads
    stepped = step_guarded(tiers.amount(some, VARIANTS), mesh=Mesh(tp=2), comm=comm)
    assert len(stepped) > 15
    assert {"olmo2", "minimax_m2"} <= {*stepped}


@pytest.mark.usefixtures("on_gpu")
def test_rows_of_data_parallel_ranks_are_sent_when_they_are_written():
    comm = ProcessGroupCollectives(None)
    comm.share_experts(MetaGroup(2), MetaGroup(2))
    mesh = Mesh(dp=2, ep=2)
    some = tiers.amount(["qwen3_moe"], ["qwen3_moe", "mixtral", "deepseek_v2_lite", "gpt_oss"])
    assert step_guarded(some, mesh=mesh, comm=comm, experts="linear") == some
