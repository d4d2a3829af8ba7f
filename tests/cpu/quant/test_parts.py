"""Layers whose parts have different formats, or none: the same values, on all paths."""

import pytest
import torch

from quire.config.quant import read
from quire.config.quant.facts import LayerRule, QuantFacts
from quire.config.quant.ggml import GgmlFormat
from quire.errors import WeightError
from quire.kernels.formats.parts_weight import PartsExperts, PartsWeight
from quire.kernels.formats.weight import PlainWeight
from quire.kernels.quantizers.ggml import quantize_ggml
from quire.quantize.gguf_blocks import to_blocks
from tests import tiers
from tests.cpu.quant.oracle import check_logits, check_paths, check_ranks, tiny, write_pair
from tests.cpu.quant.test_ggml_blocks import QUANTIZED

KINDS = {
    "q_proj": "Q4_0", "k_proj": "Q4_0", "v_proj": "Q8_0", "gate_proj": "Q5_1", "up_proj": "Q4_0",
    "down_proj": "Q8_0", "o_proj": "Q5_0",
}  # fmt: skip
PLAIN = {"model.layers.1.self_attn.k_proj"}


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration with a format per projection."""
    rules = tuple(
        LayerRule(f"re:.*{name}$", None if kind is None else GgmlFormat(type=kind))
        for name, kind in KINDS.items()
    )
    facts = QuantFacts(quant_method="parts-test", rules=rules, default=None)
    monkeypatch.setitem(read.READERS, "parts-test", lambda _: facts)


def quantize(name, weight):
    kind = KINDS.get(name.rpartition(".")[2])
    if kind is None or name in PLAIN:
        return None
    codes = quantize_ggml(kind, weight)
    blocks = to_blocks(kind, codes).unflatten(1, (-1, QUANTIZED[kind].nbytes))
    return {"ggml": blocks}, codes.dequantize()


def make(tmp_path, model, **settings):
    return write_pair(tmp_path, tiny(model), quantize, {"quant_method": "parts-test"}, **settings)


@pytest.mark.slow("a model on five paths of the engine")
@pytest.mark.parametrize("model", ["qwen3_moe", *tiers.long("llama")])
def test_formats_of_parts(tmp_path, model):
    pair = make(tmp_path, model)
    built = check_logits(pair)
    layers = built[0].layers
    qkv = layers[0].self_attn.qkv_proj.weight
    assert isinstance(qkv, PartsWeight)
    assert len(qkv.parts) == 2, "q and k share a product"
    assert len(layers[1].self_attn.qkv_proj.weight.parts) == 3, "k is plain there"
    if model == "qwen3_moe":
        bank = layers[1].mlp.experts.gate_up_proj
        assert isinstance(bank, PartsExperts)
        assert bank.dequantize().shape == (4, 256, 64)
    check_paths(pair, built)
    check_ranks(pair)


def test_missing_parts_have_the_names_of_the_checkpoint(tmp_path):
    lost = ("model.layers.0.self_attn.v_proj.ggml", "model.layers.1.mlp.experts.2.up_proj.ggml")

    def edit(tensors):
        for name in lost:
            del tensors[name]

    pair = make(tmp_path, "qwen3_moe", edit=edit)
    with pytest.raises(WeightError) as caught:
        pair.build(pair.folder)
    for name in lost:
        assert name.removeprefix("model.") in str(caught.value)
    assert "2 missing" in str(caught.value)


def test_a_weight_of_parts_is_its_parts():
    parts = tuple(torch.randn(n, 8) for n in (3, 5))
    weight = PartsWeight(tuple(PlainWeight(one, requires_grad=False) for one in parts), (3, 5))
    x, bias = torch.randn(4, 8), torch.randn(8)
    assert torch.allclose(weight.product(x, bias), x @ torch.cat(parts).t() + bias, atol=1e-5)
    assert weight.dequantize().equal(torch.cat(parts))
