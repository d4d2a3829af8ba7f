"""Tensors reach a device whole, in pieces, turned and converted; here the device is the CPU."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from quire.weights import gpu_loader
from quire.weights.gpu_loader import GpuLoader

SMALL = 1 << 12


@pytest.fixture
def small_buffers(monkeypatch):
    monkeypatch.setattr(gpu_loader, "BUFFER_BYTES", SMALL)
    monkeypatch.setattr(gpu_loader, "SYNC_COPY_BYTES", 64)
    monkeypatch.setattr(gpu_loader, "CudaEvent", mock.MagicMock())
    for name in ("Stream", "current_stream", "set_device"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **how: real(*size, **how))


WORDS = torch.randint(-(2**31), 2**31 - 1, (48, 700)).int()
SOURCES = {
    "straight": WORDS,
    "turned": WORDS.t(),
    "a cut of turned": WORDS.t()[100:500, 3:40],
    "a cut": WORDS[5:30, 100:650],
    "one row": WORDS[:1],
    "one column, turned": WORDS[:, :1].t(),
    "strided": WORDS[:, ::2],
    "three axes": WORDS.view(6, 8, 700),
    "three axes, turned": WORDS.view(6, 8, 700).transpose(0, 2),
    "floats": torch.randn(500, 60).bfloat16().t(),
}


@pytest.mark.parametrize("dtype", ["its own", torch.float32])
@pytest.mark.parametrize("name", SOURCES)
def test_every_number_arrives(small_buffers, name, dtype):
    source = SOURCES[name]
    dtype = source.dtype if dtype == "its own" else dtype
    target = torch.zeros(source.shape, dtype=dtype)
    with GpuLoader(torch.device("cpu")) as loader:
        loader.wait(loader.copy(target, source))
    assert torch.equal(target, source.to(dtype))


def test_columns_of_words_are_not_turned_by_the_host():
    assert gpu_loader._is_turned(WORDS.t(), torch.int32)
    assert not gpu_loader._is_turned(WORDS.t(), torch.float32)
    assert not gpu_loader._is_turned(WORDS, torch.int32)
