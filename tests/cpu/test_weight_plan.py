"""The plan's bytes of weights are those that a loaded model holds, in every format."""

import pytest
import torch

from quire.config.facts import count_weights_in_headers, model_facts
from quire.config.quant.read import reconcile_quantization
from quire.distributed.mesh import Mesh
from quire.models._weight_report import model_bytes
from quire.weights.files import read_headers
from tests import tiers
from tests.cpu.models.harness import Together
from tests.cpu.quant import test_awq, test_gptq, test_hqq
from tests.cpu.quant.oracle import build, tiny, tiny_tensors, write_folder, write_pair
from tests.cpu.quant.test_online import NAMES

SIZES = {"unit": 256, "vocab_size": 512}
NEAR = 0.01


def planned(hf, folder, quant=None, ranks=1):
    """Bytes by the headers, and by config.json alone."""
    counted = count_weights_in_headers(read_headers(folder), hf)
    facts = model_facts(hf, weights=counted)
    found = reconcile_quantization(facts.quantization, quant)
    estimated = model_facts(hf).weights
    return counted.bytes(2, ranks, found), estimated.bytes(2, ranks, found)


def held(folder, **settings):
    model, _ = build(folder, dtype=torch.bfloat16, **settings)
    return model_bytes(model)


@pytest.mark.parametrize("quant", [None, "fp8", "fp8_block", *NAMES])
@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v2"])
def test_formats_made_on_load(tmp_path, model, quant):
    hf = tiny(model, **SIZES)
    folder = write_folder(tmp_path / "m", hf, tiny_tensors(hf, torch.bfloat16))
    by_headers, by_config = planned(hf, folder, quant)
    assert by_headers == pytest.approx(held(folder, quant=quant), rel=NEAR)
    assert by_config == pytest.approx(by_headers, rel=NEAR)


def test_a_tied_head_counts_once(tmp_path):
    hf = tiny("llama", **SIZES, tie_word_embeddings=True)
    folder = write_folder(tmp_path / "m", hf, tiny_tensors(hf, torch.bfloat16))
    by_headers, by_config = planned(hf, folder, "int4")
    assert by_headers == pytest.approx(held(folder, quant="int4"), rel=NEAR)
    assert by_config == pytest.approx(by_headers, rel=NEAR)


def test_each_rank_has_its_share(tmp_path):
    hf = tiny("qwen3_moe", **SIZES)
    folder = write_folder(tmp_path / "m", hf, tiny_tensors(hf, torch.bfloat16))
    mesh = {"mesh": Mesh(tp=2, rank=1), "comm": Together(2).of(1)}
    by_headers, _ = planned(hf, folder, "int4", ranks=2)
    assert by_headers == pytest.approx(held(folder, quant="int4", **mesh), rel=NEAR)


def bitsandbytes_nested():
    from tests.cpu.quant import test_bitsandbytes as bnb

    return bnb.four_bits(nested=True), bnb.config()


def bitsandbytes_int8():
    from tests.cpu.quant import test_bitsandbytes as bnb

    return bnb.eight_bits, bnb.EIGHT


def gptq_symmetric():
    return test_gptq.quantizer(), test_gptq.CONFIG


def gptq_with_zeros():
    changes = {"bits": 8, "group_size": 64, "sym": False}
    how = {"bits": 8, "group": 64, "symmetric": False}
    return test_gptq.quantizer(**how), test_gptq.CONFIG | changes


def awq():
    return test_awq.quantizer(), test_awq.CONFIG


def compressed(case):
    from tests.cpu.quant import test_compressed_tensors as made

    weights, fmt = made.CASES[case]

    def quantize(name, weight):
        return made.compress(weight.bfloat16(), weights, fmt, torch.bfloat16)

    return quantize, made.settings(weights, fmt)


def compressed_w4():
    return compressed("w4 group asymmetric")


def compressed_fp8():
    return compressed("fp8 channel")


def awq_of_8_bits():
    return test_awq.quantizer(bits=8), test_awq.CONFIG | {"bits": 8}


def hqq():
    return test_hqq.quantizer(4, 64), test_hqq.config(4, 64)


def hqq_of_3_bits():
    return test_hqq.quantizer(3, 32), test_hqq.config(3, 32)


def compressed_nvfp4():
    return compressed("nvfp4")


def compressed_mxfp4():
    return compressed("mxfp4")


@pytest.mark.slow("imports bitsandbytes")
@pytest.mark.parametrize(
    "case",
    [
        *(bitsandbytes_nested, bitsandbytes_int8, gptq_symmetric, gptq_with_zeros, awq),
        *(compressed_w4, compressed_nvfp4, compressed_mxfp4, compressed_fp8),
        *tiers.long(awq_of_8_bits, hqq, hqq_of_3_bits),
    ],
)
def test_stored_formats(tmp_path, case):
    quantize, config = case()
    for model in ("qwen3_moe", "deepseek_v2"):
        (tmp_path / model).mkdir()
        hf = tiny(model, **SIZES)
        pair = write_pair(tmp_path / model, hf, quantize, config, dtype=torch.bfloat16)
        said = hf | {"quantization_config": config}
        by_headers, _ = planned(said, pair.folder)
        assert by_headers == pytest.approx(held(pair.folder), rel=NEAR), model
