"""The memory planner against values known from elsewhere."""

import json
import pathlib
from dataclasses import replace

import pytest

from quire.config.facts import model_facts
from quire.config.memory.captured_steps import max_captured_tokens
from quire.config.memory.memory_plan import (
    EngineShape,
    gib,
    gpu_decode_bytes,
    gpu_step_bytes,
    plan_memory,
    rank_layers,
)
from quire.config.memory.weight_facts import WeightFacts
from quire.config.quant.held import MatrixFacts
from quire.errors import ConfigError

GIB = 2**30
HF = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
QWEN = model_facts(HF | {"tie_word_embeddings": False}, name="Qwen/Qwen2.5-7B")


def plan(length, tensor=1, model=QWEN, shape=None, **more):
    sizes = EngineShape(
        dtype="bfloat16", cache_dtype="bfloat16", block_size=16, max_model_len=length,
        max_num_batched_tokens=2048, max_num_seqs=256, tensor=tensor,
    )  # fmt: skip
    return plan_memory(
        model, replace(sizes, **shape or {}), device_bytes=24 * GIB, allowed_bytes=22 * GIB, **more
    )


@pytest.mark.parametrize(("length", "need"), [(131072, "7.00 GiB"), (120000, "6.41 GiB")])
def test_qwen_7b_needs_what_is_known(length, need):
    assert gib(plan(length).max_len_kv_bytes) == need
    assert plan(length).token_bytes == 57344


def test_qwen_7b_weighs_what_is_known():
    assert QWEN.weights.bytes(2) / 1e9 == pytest.approx(15.23, abs=0.02)


def test_ranks_share_weights_and_kv():
    one, two = plan(4096), plan(4096, tensor=2)
    assert two.token_bytes == one.token_bytes // 2
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=1e-3)
    assert plan(4096, tensor=8).token_bytes == one.token_bytes // 4  # 4 KV heads, each kept twice
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        rank_layers(QWEN.layers, 3)


@pytest.mark.parametrize(
    ("ranks", "copies", "most"), [(2, None, 4), (3, None, 3), (5, None, 2), (2, 4, 6)]
)
def test_the_rank_with_most_experts_is_planned(ranks, copies, most):
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    model = model_facts(HF | moe | {"model_type": "qwen3_moe", "head_dim": 128})
    one = plan(4096, model=model).weight_bytes
    rest = plan(
        4096, model=model, shape={"whole_experts": True, "data": 10**6}
    ).weight_bytes  # of one
    each = (one - rest) / 7
    settings = {"whole_experts": True, "redundant_experts": copies, "data": ranks}
    got = plan(4096, model=model, shape=settings).weight_bytes
    assert got == pytest.approx(rest + (most - 1) * each, rel=1e-6)


def test_data_parallel_ranks_share_experts_alone():
    experts = MatrixFacts("model.layers.0.mlp.experts.gate_up_proj", 1000, 64)
    other = MatrixFacts("model.layers.0.self_attn.q_proj", 500, 64)
    facts = WeightFacts(1500 * 64 + 200, 10, (experts, other))
    assert facts.bytes(2) == 2 * (1500 * 64 + 200 + 10)
    assert facts.bytes(2, data=4) == 2 * (250 * 64 + 500 * 64 + 200 + 10)
    assert facts.bytes(2, 2, data=4) == (250 * 64 + 500 * 64 + 200) + 20


def test_concurrency_and_tokens_follow_the_blocks():
    p = plan(1600, num_blocks=250)
    assert p.concurrency == 2.5
    assert p.tokens == 4000
    assert p.max_fitting_len == 4000


def test_weights_from_headers_replace_the_estimate():
    model = model_facts(HF, weights=WeightFacts(10**9, 0))
    tables = plan(1024, model=replace(model, weights=WeightFacts(0, 0))).weight_bytes
    assert plan(1024, model=model).weight_bytes == 2 * 10**9 + tables
    assert tables == model.rotary * 1024 * 4 > 0


MEASURED = json.loads((pathlib.Path(__file__).parent / "measured_peaks.json").read_text())


@pytest.mark.parametrize("case", MEASURED["cases"], ids=lambda case: case["name"])
def test_the_formula_agrees_with_what_was_measured_on_a_gpu(case):
    """torch's peaks on an H200; a kernel that holds more or less must change the formula too."""
    model = model_facts(case["config"])
    shape = EngineShape(
        dtype="bfloat16", cache_dtype="bfloat16", block_size=16, device="cuda",
        max_model_len=model.max_len, max_num_batched_tokens=case["tokens"],
        max_num_seqs=case["seats"],
    )  # fmt: skip
    planned = plan_memory(model, shape, device_bytes=140 * GIB, allowed_bytes=128 * GIB)
    assert planned.weight_bytes == pytest.approx(case["weights"], rel=0.001)
    assert gpu_step_bytes(model, shape) == pytest.approx(case["step"], rel=0.03)
    assert gpu_decode_bytes(model, shape) == pytest.approx(case["decode"], rel=0.03)


@pytest.mark.parametrize(
    ("hidden", "heads", "mlp", "tensor", "tokens"),
    [
        (1024, 16, 3072, 1, 4096),
        (2048, 16, 6144, 1, 2280),
        (3584, 28, 18944, 1, 1024),
        (3584, 28, 18944, 4, 1888),
    ],
)
def test_captured_steps_are_larger_for_smaller_layers(hidden, heads, mlp, tensor, tokens):
    """A host launches a layer while a GPU multiplies so many tokens."""
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": mlp}
    model = model_facts(HF | sizes | {"head_dim": 128}, name="m")
    assert max_captured_tokens(model, tensor) == tokens


def test_captured_steps_count_the_experts_of_a_token():
    sizes = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    model = model_facts(HF | sizes | experts | {"head_dim": 128}, name="m")
    assert max_captured_tokens(model, 1) == 1942
