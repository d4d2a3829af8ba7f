"""Quire loads what `quire quantize` has written: the values of the compressed-tensors package, and a
calibrated model."""

import pytest
import torch

from quire.kernels.quantizers.ggml import LAYOUTS, quantize_ggml
from quire.models.build import build_model, read_model_config
from quire.quant.ggml_blocks import unpack
from quire.quantize.gguf_blocks import to_blocks
from tests.cpu.models.harness import Stepper
from tests.cpu.quantize.folders import write_source
from tests.cpu.quantize.test_compressed import config_of, decompressed, run, tensors_of

IDS = list(range(3, 40))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source"))


def model_of(folder, **more):
    kind, config = read_model_config(config_of(folder))
    model = build_model(kind, config, folder=folder, dtype=torch.float32, progress=False, **more)
    return model, Stepper(model, config).logits(IDS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("to", "settings"),
    [
        ("int4", {}),
        ("int4", {"symmetric": False, "group_size": 32, "lm_head": True}),
        ("int4", {"bits": 3, "group_size": 64}),
        ("int8", {"group_size": -1}),
        ("mxfp4", {}),
        ("nvfp4", {}),
        ("w8a8", {}),
    ],
    ids=str,
)
def test_quire_loads_the_values_that_compressed_tensors_reads(source, tmp_path, to, settings):
    run(source, tmp_path / "out", to, **settings)
    model, _ = model_of(tmp_path / "out")
    found = decompressed(tmp_path / "out")
    for name in ("o_proj", "down_proj"):
        at = f"layers.1.{'mlp' if name == 'down_proj' else 'self_attn'}.{name}"
        weight = model.get_submodule(at).weight
        assert weight.kind != "plain"
        assert torch.equal(weight.dequantize(), found[f"model.{at}.weight"].float())
    if settings.get("lm_head"):
        assert torch.equal(model.lm_head.weight.dequantize(), found["lm_head.weight"])


@pytest.mark.parametrize("to", ["int4", "int8"])
def test_tokens_are_those_of_a_plain_model_of_the_same_values(source, tmp_path, to):
    from safetensors.torch import save_file

    run(source, tmp_path / "out", to)
    plain = tmp_path / "plain"
    plain.mkdir()
    wide = {**tensors_of(source), **decompressed(tmp_path / "out")}
    save_file({name: one.contiguous() for name, one in wide.items()}, plain / "model.safetensors")
    (plain / "config.json").write_bytes((source / "config.json").read_bytes())
    logits = [model_of(folder)[1] for folder in (tmp_path / "out", plain)]
    assert torch.allclose(*logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_are_unpacked_to_the_codes_that_were_packed(kind):
    weight = torch.randn(6, 512, generator=torch.Generator().manual_seed(2)) / 20
    codes = quantize_ggml(kind, weight)
    data = to_blocks(kind, codes)
    size = data.shape[1] // (512 // (256 if kind.endswith("_K") else 32))
    found = unpack(kind, data.unflatten(1, (-1, size)))
    assert torch.equal(found.dequantize(), codes.dequantize())
    assert torch.equal(found.q, codes.q)
