"""Blocks of every ggml type against the package gguf, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from quire.config.quant.ggml import GGML_TYPES, REFUSED_TYPES, TYPE_BY_NAME, GgmlFormat, GgmlType
from quire.config.quant.held import MatrixFacts
from quire.errors import ConfigError
from quire.kernels.formats.panel_codes import pack_panel_codes
from quire.kernels.formats.tiled_weight import pack_tiles
from quire.quant import ggml_blocks

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
QUANTIZED = {name: kind for name, kind in TYPE_BY_NAME.items() if kind.is_quantized}
NO_PEER = {"Q1_0", "Q2_0"}  # gguf 0.19 cannot dequantize them


def random_blocks(kind: GgmlType, *shape: int) -> torch.Tensor:
    """Bytes of all values: scales that are infinite and NaN are among them."""
    generator = torch.Generator().manual_seed(kind.nbytes)
    data = torch.randint(0, 256, (*shape, kind.nbytes), dtype=torch.uint8, generator=generator)
    if kind.name == "MXFP4":
        data[..., 0].clamp_(max=254)  # 255 is NaN in the format, but a number in gguf
    if kind.name == "NVFP4":
        data[..., :4] %= 255  # the same
    return data


def widened(name: str, data: torch.Tensor) -> torch.Tensor:
    if ggml_blocks.has_codes(name):
        return ggml_blocks.unpack(name, data).dequantize()
    return ggml_blocks.dequantize(name, data)


def test_table_of_types_is_that_of_the_package() -> None:
    for number, (values, nbytes) in gguf.GGML_QUANT_SIZES.items():
        name = gguf.GGMLQuantizationType(number).name
        if number in REFUSED_TYPES:
            assert REFUSED_TYPES[number] == name
        else:
            assert GGML_TYPES[number] == (name, values, nbytes)


@pytest.mark.parametrize("name", sorted(QUANTIZED.keys() - NO_PEER))
def test_values_are_those_of_gguf(name: str) -> None:
    data = random_blocks(QUANTIZED[name], 5, 4)
    number = gguf.GGMLQuantizationType[name]
    want = torch.from_numpy(gguf.quants.dequantize(data.flatten(1).numpy(), number))
    got = widened(name, data)
    numbers = ~want.isnan()
    assert got.dtype == torch.float32
    assert got.shape == want.shape == (5, 4 * QUANTIZED[name].values)
    assert got.isnan().equal(want.isnan())
    got, want = got[numbers] + 0.0, want[numbers] + 0.0  # e2m1 has a negative zero, gguf has not
    assert got.view(torch.int32).equal(want.view(torch.int32))
    assert numbers.float().mean() > 0.5


@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_a_bank_is_its_experts(name: str) -> None:
    data = random_blocks(QUANTIZED[name], 2, 3, 2)
    if ggml_blocks.has_codes(name):
        codes = ggml_blocks.unpack(name, data)
        assert codes.q.dtype == torch.uint8
        assert int(codes.q.max()) < 2**codes.bits
        assert codes.group in (16, 32, 64, 128)
    bank = widened(name, data)
    for one, alone in zip(bank, data):
        assert torch.equal(one.nan_to_num(), widened(name, alone).nan_to_num())


@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_the_plan_has_the_bits_in_memory(name: str) -> None:
    kind, form = QUANTIZED[name], GgmlFormat(type=name)
    planned = {
        device: form.held_bits(MatrixFacts("", 64, 4096), device) for device in ("cpu", "cuda")
    }
    if not ggml_blocks.has_codes(name):
        assert planned == {"cpu": 16, "cuda": 16}
        return
    codes = ggml_blocks.unpack(name, random_blocks(kind, 64, 4096 // kind.values))
    held = {
        "cpu": pack_panel_codes(codes, torch.bfloat16).nbytes,
        "cuda": pack_tiles(codes, torch.bfloat16).nbytes,
    }
    for device, nbytes in held.items():
        assert nbytes * 8 / codes.q.numel() == pytest.approx(planned[device], rel=0.005)


def test_one_bit_and_two_bit_values() -> None:
    scale = np.array([0.5], np.float16).tobytes()
    signs = bytes([0b10000001]) + bytes(15)
    one = ggml_blocks.unpack(
        "Q1_0", torch.frombuffer(bytearray(scale + signs), dtype=torch.uint8)[None, None]
    )
    assert one.dequantize()[0].tolist() == [0.5] + [-0.5] * 6 + [0.5] + [-0.5] * 120
    fields = bytes([0b11100100]) + bytes(15)
    two = ggml_blocks.unpack(
        "Q2_0", torch.frombuffer(bytearray(scale + fields), dtype=torch.uint8)[None, None]
    )
    assert two.dequantize()[0].tolist() == [-0.5, 0, 0.5, 1] + [-0.5] * 60


def test_flat_rows_of_bytes() -> None:
    data = random_blocks(QUANTIZED["Q4_K"], 3, 2)
    flat = ggml_blocks.unpack("Q4_K", data.flatten(1)).dequantize()
    assert flat.nan_to_num().equal(ggml_blocks.unpack("Q4_K", data).dequantize().nan_to_num())


def test_tables_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"IQ2_S need .* pip install quire-llm\[gguf\]"):
        ggml_blocks.dequantize("IQ2_S", random_blocks(QUANTIZED["IQ2_S"], 1, 1))
