"""The plan's bytes of weights are those that a loaded model holds, in every format."""

import pytest
import torch

from quire.config.facts import count_weights_in_headers, model_facts
from quire.config.quant.held import BEFORE_FP8
from quire.config.quant.read import read_quantization, reconcile_quantization
from quire.distributed.mesh import Mesh
from quire.kernels.gpu.runtime.target import GpuTarget, describe_target
from quire.models._weight_report import model_bytes
from quire.weights.files import read_headers
from tests import tiers
from tests.cpu.models.harness import Together
from tests.cpu.quant.oracle import build, tiny, tiny_tensors, write_folder, write_pair
from tests.cpu.quant.stored_formats import ALL, SIDES, WITH_OUTLIERS
from tests.cpu.quant.test_online import NAMES

SIZES = {"unit": 256, "vocab_size": 512}
NEAR = 0.01


def planned(hf, folder, quant=None, ranks=1, more_experts=0.0, data=1):
    """Bytes by the headers, and by config.json alone."""
    counted = count_weights_in_headers(read_headers(folder), hf)
    facts = model_facts(hf, weights=counted)
    found = reconcile_quantization(facts.quantization, quant)
    estimated = model_facts(hf).weights
    return tuple(
        one.bytes(2, ranks, found, more_experts=more_experts, data=data)
        for one in (counted, estimated)
    )


def held(folder, **settings):
    model, _ = build(folder, dtype=torch.bfloat16, **settings)
    return model_bytes(model)


@pytest.mark.sampled(3)
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quant", [None, *tiers.long("int4", "fp8")])
def test_each_stage_has_its_share(tmp_path, tied, quant):
    hf = tiny("llama", **SIZES, tie_word_embeddings=tied)
    folder = write_folder(tmp_path / "m", hf, tiny_tensors(hf, torch.bfloat16))
    counted = count_weights_in_headers(read_headers(folder), hf)
    found = reconcile_quantization(model_facts(hf, weights=counted).quantization, quant)
    depth = hf["num_hidden_layers"]
    for stage in (range(1), range(1, depth)):
        planned = counted.of_layers(stage, depth).bytes(2, 1, found)
        assert planned == pytest.approx(held(folder, quant=quant, stage=stage), rel=NEAR), stage


def test_each_rank_has_its_share(tmp_path):
    hf = tiny("qwen3_moe", **SIZES)
    folder = write_folder(tmp_path / "m", hf, tiny_tensors(hf, torch.bfloat16))
    mesh = {"mesh": Mesh(tp=2, rank=1), "comm": Together(2).of(1)}
    by_headers, _ = planned(hf, folder, "int4", ranks=2)
    assert by_headers == pytest.approx(held(folder, quant="int4", **mesh), rel=NEAR)


def test_copies_of_experts_count(tmp_path):
    """Six for four experts on two ranks."""
    hf = tiny("qwen3_moe", **SIZES)
    folder = write_folder(tmp_path / "m", hf, tiny_tensors(hf, torch.bfloat16))
    experts = {"experts": "linear", "redundant_experts": 2}
    real = held(folder, mesh=Mesh(tp=2, ep=2), comm=Together(2).of(0), **experts)
    for one in planned(hf, folder, ranks=2, more_experts=0.5):
        assert one == pytest.approx(real, rel=NEAR)


def test_the_rank_with_most_experts_counts(tmp_path):
    """Two of four experts, on the first of three ranks."""
    hf = tiny("qwen3_moe", **SIZES)
    folder = write_folder(tmp_path / "m", hf, tiny_tensors(hf, torch.bfloat16))
    real = held(folder, mesh=Mesh(dp=3, ep=3), comm=Together(1).of(0), experts="linear")
    for one in planned(hf, folder, data=3, more_experts=0.5):
        assert one == pytest.approx(real, rel=NEAR)


DEVICES = {"cpu": None, "cuda": (9, 0), BEFORE_FP8: (8, 0)}
EVERYDAY = (
    *("gptq in order of activations", "awq 8", "hqq", "bitsandbytes nf4 nested", "w8a8"),
    *("compressed w4 group asymmetric", "compressed w7 group", "compressed nvfp4"),
    *("compressed fp8 block", "compressed mxfp8", "fp8", "fp8 blocks"),
)


def in_model_dtype(tensors):
    """Scales as compressed-tensors stores them."""
    for name, value in tensors.items():
        if name.endswith("weight_scale") and value.dtype == torch.float32:
            tensors[name] = value.bfloat16()


@pytest.mark.sampled(4)
@pytest.mark.slow("imports bitsandbytes and compressed-tensors")
@pytest.mark.parametrize("model", ["llama", *tiers.long("qwen3_moe", "deepseek_v2")])
@pytest.mark.parametrize("name", [*EVERYDAY, *tiers.long(*(ALL.keys() - EVERYDAY))])
def test_stored_formats(tmp_path, name, model):
    """On a CPU, and as a GPU would hold them: the layouts of meta tensors have the same sizes."""
    quantize, config = ALL[name]()
    if model != "llama" and name in WITH_OUTLIERS:
        pytest.skip("experts have no outliers")
    if model == "deepseek_v2" and name == "gptq 3":
        pytest.skip("32 codes in three words do not end where its heads do")
    changes = {"num_hidden_layers": 1} if model == "llama" else {}
    if model == "deepseek_v2" and name in SIDES:
        changes |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 128}
    hf = tiny(model, **SIZES, **changes)
    edit = in_model_dtype if name.startswith("compressed") else None
    pair = write_pair(tmp_path, hf, quantize, config, dtype=torch.bfloat16, edit=edit)
    counted = count_weights_in_headers(read_headers(pair.folder), hf)
    quantized = read_quantization(hf | {"quantization_config": config})
    for device, capability in DEVICES.items():
        if device != "cpu" and name in (*WITH_OUTLIERS, "hqq 3", "hqq 5"):
            continue  # without values there are no outliers; HQQ does not state the inputs
        by_headers = counted.bytes(2, 1, quantized, device)
        if capability is None:
            real = held(pair.folder)
        else:
            describe_target(GpuTarget(capability, 100))
            try:
                real = held(pair.folder, device="meta")
            finally:
                describe_target(None)
        assert by_headers == pytest.approx(real, rel=NEAR), device


@pytest.mark.slow("imports compressed-tensors")
def test_scales_in_float32_are_counted_so(tmp_path):
    quantize, config = ALL["compressed w4 group"]()
    hf = tiny("llama", **SIZES, num_hidden_layers=1)
    pair = write_pair(tmp_path, hf, quantize, config, dtype=torch.bfloat16)
    by_headers, _ = planned(hf | {"quantization_config": config}, pair.folder)
    assert by_headers == pytest.approx(held(pair.folder), rel=NEAR)


@pytest.mark.parametrize("name", ["awq", "compressed fp8 channel", "fp8 blocks", "hqq"])
def test_without_tensors_the_sizes_are_those_of_config_json(name):
    _, config = ALL[name]()
    hf = tiny("llama", **SIZES)
    plain = model_facts(hf).weights.bytes(2)
    facts = model_facts(hf | {"quantization_config": config})
    assert facts.weights.bytes(2, 1, facts.quantization) < 0.8 * plain
