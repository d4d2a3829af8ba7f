"""SqueezeLLM checkpoints: tables of each output, and outliers that are added."""

import json

import pytest
import torch
from safetensors.torch import load_file

from quire.config.quant.read import read_quantization
from quire.errors import ConfigError, WeightError
from tests.cpu.quant.oracle import build, check_logits, check_pair, check_ranks, tiny, write_pair
from tests.cpu.quant.packers_int import int32, words_of

CONFIG = {"quant_method": "squeezellm", "wbits": 4}


def quantizer(bits=4, sparse=True, full=False):
    """A function for write_pair. sparse: 1 % outliers. full: two outputs are outliers as a whole."""

    def quantize(name, weight):
        if name == "lm_head":
            return None
        outputs, inputs = weight.shape
        levels = torch.linspace(0, 1, 1 << bits)
        table = torch.stack([torch.quantile(row, levels) for row in weight])
        distance = (weight[:, :, None] - table[:, None]).abs()
        q = distance.argmin(-1)
        dense = table.gather(1, q)
        found = {
            "qweight": int32([words_of(bits, row) for row in q.tolist()]).t().contiguous(),
            "lookup_table": table,
        }
        draw = torch.Generator().manual_seed(outputs)
        if sparse:
            added = torch.randn(weight.shape, generator=draw)
            added[torch.rand(weight.shape, generator=draw) > 0.01] = 0
            at, cols = added.nonzero(as_tuple=True)
            counts = torch.bincount(at, minlength=outputs).cumsum(0)
            found["rows"] = torch.cat([torch.zeros(1), counts]).int()
            found["cols"], found["vals"] = cols.int(), added[at, cols]
            found["startrows"] = torch.zeros(128, dtype=torch.int32)
            dense = dense + added
        if full:
            found["full_rows"] = torch.randn(inputs, 2, generator=draw)
            found["full_row_indices"] = torch.tensor([outputs - 1, 3], dtype=torch.int32)
            for k, output in enumerate((outputs - 1, 3)):
                dense[output] += found["full_rows"][:, k]
        return found, dense

    return quantize


def test_a_checkpoint_with_outliers_computes_what_its_values_do(tmp_path):
    check_pair(write_pair(tmp_path, tiny("llama"), quantizer(), CONFIG))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("sparse", "full"), [(False, False), (True, True), (False, True)])
def test_three_bits_and_whole_rows_of_outliers(sparse, full, tmp_path):
    quantize = quantizer(3, sparse, full)
    pair = write_pair(tmp_path, tiny("llama"), quantize, CONFIG | {"wbits": 3})
    check_logits(pair)
    check_ranks(pair)


def test_the_up_projection_of_latent_attention_becomes_plain(tmp_path):
    hf = tiny("deepseek_v2", first_k_dense_replace=2)
    check_logits(write_pair(tmp_path, hf, quantizer(), CONFIG))


def test_activations_in_16_bits(tmp_path):
    pair = write_pair(tmp_path, tiny("llama"), quantizer(), CONFIG, dtype=torch.bfloat16)
    check_logits(pair, torch.bfloat16)


def pickled(pair, value=None):
    """The pair with its weights in a pickle, as they are published; value: in its place."""
    tensors = load_file(pair.folder / "model.safetensors")
    (pair.folder / "model.safetensors").unlink()
    torch.save(tensors if value is None else value, pair.folder / "sq-model-w4.pt")
    return pair


def test_a_pickle_of_tensors_is_read(tmp_path):
    check_logits(pickled(write_pair(tmp_path, tiny("llama"), quantizer(), CONFIG)))


class Code:
    def __reduce__(self):
        return print, ("run",)


def test_a_pickle_of_code_is_refused(tmp_path, capsys):
    pair = write_pair(tmp_path, tiny("llama"), quantizer(), CONFIG)
    with pytest.raises(WeightError, match=r"sq-model-w4\.pt holds objects of print: pickles are"):
        build(pickled(pair, {"model.norm.weight": Code()}).folder)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"wbits": 2}, {"wbits": None}, {"wbits": "4"}, {"colour": 1}])
def test_a_field_that_is_not_understood_is_refused_by_name(changes):
    (field,) = changes
    with pytest.raises(ConfigError, match=f"config.json: quantization_config.*{field}"):
        read_quantization({"quantization_config": CONFIG | changes})


def drop(suffix):
    def change(tensors, at):
        del tensors[at + suffix]

    return change


def edit_of(suffix, how):
    def change(tensors, at):
        tensors[at + suffix] = how(tensors[at + suffix])

    return change


BROKEN = {
    "a missing part": (drop("cols"), r"q_proj\.outliers: the layer has .*rows.*; outliers are"),
    "a column beyond": (edit_of("cols", lambda t: t + 64), r"cols has numbers from \d+ to"),
    "a negative column": (edit_of("cols", lambda t: t - 70), r"cols has numbers from -"),
    "too few rows": (edit_of("rows", lambda t: t[:-1]), r"rows has 128 numbers"),
    "rows beyond": (edit_of("rows", lambda t: t * 2), r"outliers needs 129 from 0 to"),
    "rows that decrease": (
        edit_of("rows", lambda t: torch.cat([t[:1], t[:-1].flip(0)[:-1], t[-1:]])),
        r"rows decreases",
    ),
    "too few values": (edit_of("vals", lambda t: t[:-1]), r"vals has not the length of cols"),
    "whole rows of another length": (
        edit_of("full_rows", lambda t: t[:-1]),
        r"full_rows is \[63, 2\]; it must be \[64, 2\]",
    ),
    "whole rows of integers": (
        edit_of("full_rows", lambda t: t.long()),
        r"full_rows is torch.int64; it must have floats",
    ),
    "columns that are floats": (
        edit_of("cols", lambda t: t.float()),
        r"cols is torch.float32; it must have integers",
    ),
    "an output beyond": (
        edit_of("full_row_indices", lambda t: t + 1),
        r"full_row_indices has numbers from 4 to 128; they must be below 128",
    ),
    "a short table": (edit_of("lookup_table", lambda t: t[:, :8]), r"lookup_table is \[128, 8\]"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_outliers_are_named(kind, tmp_path):
    change, message = BROKEN[kind]

    def edit(tensors):
        change(tensors, "model.layers.1.self_attn.q_proj.")

    pair = write_pair(tmp_path, tiny("llama"), quantizer(full=True), CONFIG, edit=edit)
    assert json.loads((pair.folder / "config.json").read_text())["quantization_config"] == CONFIG
    with pytest.raises(WeightError, match=message):
        build(pair.folder)
