"""Every stored format on every path: alone, batched, chunked, after a prefix hit, preempted, ranks.

Where rows of activations stay as they are, tokens are those of a dense model of the dequantized
weights. Where rows are rounded, they are those of the same model by itself; the rounding has tests
of its own.
"""

from dataclasses import replace

import pytest

from tests import tiers
from tests.cpu.quant.oracle import check_pair, check_paths, check_ranks, tiny, write_pair
from tests.cpu.quant.stored_formats import FORMATS, ROUNDED_ROWS, SIDES, WITH_OUTLIERS

MODELS = ("llama", "qwen3_moe", "deepseek_v2")
EVERYDAY = (("modelopt nvfp4", "llama"), ("quark mxfp4", "qwen3_moe"))
"""Formats whose other tests compare logits alone."""
SHARED_SCALE = ("modelopt fp8", "quark fp8", "quark int8")
"""Formats with one scale of activations for all inputs: ranks round as one model does."""


def can_be_made(name, model):
    if name in WITH_OUTLIERS:
        return model == "llama"  # experts have none
    return (name, model) != ("gptq 3", "deepseek_v2")  # heads of 16 are no whole words


ROUNDED = [(name, model) for model in MODELS for name in ROUNDED_ROWS]
CELLS = [(name, model) for name in FORMATS for model in MODELS if can_be_made(name, model)]


def pair_of(folder, name, model):
    quantize, config = (FORMATS | ROUNDED_ROWS)[name]()
    changes = {}
    if name == "compressed w5 asymmetric":
        changes["vocab_size"] = 128  # ranks cut zeros of the head between words of 32 / 5
    if name in SIDES:
        changes |= {"unit": 256, "vocab_size": 256}
        if model == "deepseek_v2":
            changes |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 128}
    return write_pair(folder, tiny(model, **changes), quantize, config)


@pytest.mark.slow("engines on five paths, and two ranks")
@pytest.mark.parametrize(
    ("name", "model"), [*EVERYDAY, *tiers.long(*sorted({*CELLS} - {*EVERYDAY}))]
)
def test_tokens_are_those_of_the_dequantized_weights(tmp_path, name, model):
    check_pair(pair_of(tmp_path, name, model))


@pytest.mark.slow("engines on five paths")
@pytest.mark.parametrize(
    ("name", "model"),
    [ROUNDED[0], *tiers.long(*ROUNDED[1:])],
)
def test_rounded_rows_give_the_same_tokens_on_every_path(tmp_path, name, model):
    pair = pair_of(tmp_path, name, model)
    itself = replace(pair, dense=pair.folder)
    check_paths(itself)
    if name in SHARED_SCALE:
        check_ranks(itself)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("quark mxfp4", "qwen3_moe"),
        ("modelopt fp8", "qwen3_moe"),
        *tiers.long(*(cell for cell in CELLS if cell[1] != "llama" and cell[0] != "quark mxfp4")),
        *tiers.long(("quark fp8", "deepseek_v2"), ("quark int8", "qwen3_moe")),
    ],
)
def test_ranks_with_whole_experts_give_the_logits_of_one(tmp_path, name, model):
    pair = pair_of(tmp_path, name, model)
    if name in SHARED_SCALE:
        pair = replace(pair, dense=pair.folder)
    check_ranks(pair, experts="round_robin")


def test_experts_share_the_largest_scale_of_activations_over_ranks(tmp_path):
    quantize, config = ROUNDED_ROWS["modelopt fp8"]()

    def edit(tensors):
        for name in tensors:
            if ".experts.3." in name and name.endswith("input_scale"):
                tensors[name] *= 3

    pair = write_pair(tmp_path, tiny("qwen3_moe"), quantize, config, edit=edit)
    check_ranks(replace(pair, dense=pair.folder), experts="linear")
