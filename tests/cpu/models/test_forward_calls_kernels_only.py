"""A forward pass is kernels and views: that is what the CPU tape records and a graph replays.

Where an op has no native kernel, or not for these arguments, its reference replaces it here.
"""

import functools
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.native import library
from quire.models.build import build_model, read_model_config
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import VARIANTS, tiny

pytestmark = pytest.mark.sampled(4)

VIEWS = {"view", "split", "split_with_sizes", "slice", "select", "_unsafe_view", "unsqueeze"}
VIEWS |= {"expand"}
REFERENCES = {"moe_router", "moe_experts", "weighted_inputs"}  # no native kernel
REFERENCES |= {"mla_attention", "mla_write"}
SINKS = {"paged_attention"}  # nor with sinks
MEMORY = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "alias"}


class Recorder(TorchDispatchMode):
    """Names of the torch operations that ran."""

    def __init__(self, references):
        super().__init__()
        self.names, self.references = set(), references

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not any(name in self.references for name in files_of(sys._getframe())):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@functools.cache
def stem(path):
    return Path(path).stem


def files_of(frame):
    while frame is not None:
        yield stem(frame.f_code.co_filename)
        frame = frame.f_back


@pytest.mark.skipif(not library.available(), reason="without compiled kernels the references run")
@pytest.mark.parametrize(
    ("variant", "dtype"), itertools.product(VARIANTS, [torch.float32, torch.bfloat16])
)
def test_a_forward_pass_computes_in_kernels_only(variant, dtype):
    model_type, config = read_model_config(tiny(variant)[0])
    model = build_model(model_type, config, load_format="dummy", dtype=dtype)
    recorder = Recorder(REFERENCES | (SINKS if model_type == "gpt_oss" else set()))
    stepper = Stepper(Recorded(model, recorder), config, dtype=dtype, max_tokens=64)
    stepper.logits(list(range(3, 20)))
    for tokens in (1, 5):
        recorder.names.clear()
        stepper.logits([7] * tokens)
        assert "view" in recorder.names, "nothing was recorded"
        assert recorder.names <= VIEWS | MEMORY, tokens


class Recorded:
    """A model whose calls are recorded."""

    def __init__(self, model, recorder):
        self._model, self._recorder = model, recorder
        self.modules = model.modules

    def __call__(self, step):
        with self._recorder:
            return self._model(step)

    def logits(self, hidden):
        with self._recorder:
            return self._model.logits(hidden)
