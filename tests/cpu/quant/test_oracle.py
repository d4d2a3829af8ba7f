"""The oracle notices what differs: a dense model agrees with itself, and not with another."""

import pytest
import torch

from tests import tiers
from tests.cpu.quant.oracle import (
    check_logits,
    check_pair,
    check_paths,
    check_ranks,
    tiny,
    write_pair,
)

MODELS = ["llama", *tiers.long("phi3", "qwen3_moe", "deepseek_v2")]


def as_it_is(name, weight):
    return None


@pytest.mark.parametrize("model", MODELS)
def test_a_dense_model_agrees_with_itself(model, tmp_path):
    check_pair(write_pair(tmp_path, tiny(model), as_it_is, None))


def test_another_dtype_of_weights_and_of_activations(tmp_path):
    pair = write_pair(tmp_path, tiny("llama"), as_it_is, None, dtype=torch.bfloat16)
    check_logits(pair)
    check_logits(pair, torch.bfloat16)


def test_one_column_of_a_matrix_is_enough_to_differ(tmp_path):
    def shifted(name, weight):
        if name != "model.layers.1.mlp.down_proj":
            return None
        stored = weight.clone()
        stored[:, 3] += 1.0
        return {"weight": stored}, weight

    pair = write_pair(tmp_path, tiny("llama"), shifted, None)
    for check in (check_logits, check_paths, check_ranks):
        with pytest.raises(AssertionError):
            check(pair)
