"""Routers whose weights a checkpoint has quantized: plain in memory, and the same choices."""

import pytest
import torch

from quire.errors import WeightError
from tests.cpu.quant import test_awq, test_gptq
from tests.cpu.quant.oracle import build, check_logits, check_ranks, tiny, write_pair
from tests.cpu.quant.test_other_makers import fp8_rows, int8_rows, quark

ROWS = {"dtype": "fp8_e4m3", "qscheme": "per_token", "is_dynamic": True}
CHANNELS = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": False}
GATE = "model.layers.1.mlp.gate"


def words():
    return test_gptq.quantizer(), test_gptq.CONFIG


def awq():
    return test_awq.quantizer(), test_awq.CONFIG


def fp8_weights():
    """W8A16: rows in 8 bits would not compare."""
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config["config_groups"] = {"group_0": group | {"input_activations": None}}
    group["weights"]["strategy"] = "channel"
    return fp8_rows, config | {"ignore": ["lm_head"]}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [words, awq, fp8_weights])
def test_a_quantized_router_makes_the_choices_of_its_values(make, tmp_path):
    quantize, config = make()
    hf = tiny("qwen3_moe", num_experts=8)
    pair = write_pair(tmp_path, hf, quantize, config, routers=True)
    model, _ = check_logits(pair)
    gate = model.layers[1].mlp.gate.weight
    dense = build(pair.dense)[0].layers[1].mlp.gate.weight
    assert gate.kind == "plain"
    assert torch.equal(gate, dense)
    check_ranks(pair)


@pytest.mark.parametrize("quantize", [fp8_rows, int8_rows])
def test_beside_layers_that_multiply_rows_of_8_bits(quantize, tmp_path):
    inputs = {**CHANNELS, "dtype": "int8", "symmetric": True}
    rows = {**ROWS, "dtype": "int8", "symmetric": True}
    config = quark(CHANNELS, ROWS) if quantize is fp8_rows else quark(inputs, rows)

    def made(name, weight):
        found = quantize(name, weight)
        keep = ("weight", "weight_scale")
        return found and ({k: v for k, v in found[0].items() if k in keep}, found[1])

    pair = write_pair(tmp_path, tiny("qwen3_moe"), made, config, routers=True)
    model, dense = build(pair.folder)[0], build(pair.dense)[0]
    assert torch.equal(model.layers[1].mlp.gate.weight, dense.layers[1].mlp.gate.weight)


def test_a_broken_router_is_named(tmp_path):
    def edit(tensors):
        del tensors[f"{GATE}.scales"]

    quantize, config = words()
    hf = tiny("qwen3_moe", num_experts=8)
    pair = write_pair(tmp_path, hf, quantize, config, routers=True, edit=edit)
    with pytest.raises(WeightError, match=r"missing .*layers\.1\.mlp\.gate\.scales"):
        build(pair.folder)


def test_a_plain_router_stays_so_where_the_configuration_names_all_layers(tmp_path):
    quantize, config = words()
    pair = write_pair(tmp_path, tiny("qwen3_moe"), quantize, config)
    router = build(pair.folder)[0].layers[1].mlp.gate
    assert router.method.name == "none"
    assert router.weight.kind == "plain"
