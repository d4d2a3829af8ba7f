"""What the plan of several devices says about other ways to use them."""

from dataclasses import replace

import pytest

from bench.make_models import SHAPES
from quire.config.advice import advise, decode_s
from quire.config.decisions import DecisionLog
from quire.config.facts import DeviceFacts, model_facts
from quire.config.options import Options
from quire.config.resolve import resolve_memory_plan

GIB = 1 << 30
LARGE = SHAPES["llama-8b"] | {"hidden_size": 8192, "intermediate_size": 28672,
                              "num_hidden_layers": 80, "num_attention_heads": 64}  # fmt: skip


def advice(hf, gib=80, engines=1, kind="cuda", **options):
    model = model_facts(hf)
    options = Options.from_flat({"model": "m", "max_model_len": 4096, **options})
    device = DeviceFacts(kind=kind, total_bytes=gib * GIB, free_bytes=gib * GIB, count=64)
    plan = resolve_memory_plan(options, model, device, server=True, why=DecisionLog([]))
    return advise(model, plan, engines)


def test_a_small_model_is_hardly_faster_on_two_gpus():
    (line,) = advice(SHAPES["qwen3-0.6b"], tensor_parallel_size=2)
    assert "the model is small. data_parallel_size=2" in line


def test_a_model_that_fits_one_gpu_answers_faster_on_two():
    (line,) = advice(SHAPES["llama-8b"], tensor_parallel_size=2)
    assert "about 1.7 times as fast; data_parallel_size=2 has more" in line


def test_stages_of_a_model_that_fits_answer_no_faster():
    (line,) = advice(SHAPES["llama-8b"], pipeline_parallel_size=2)
    assert "data_parallel_size=2 serves more" in line


def test_a_model_that_needs_the_ranks_gets_no_advice():
    assert advice(LARGE, tensor_parallel_size=4) == []
    assert advice(LARGE, pipeline_parallel_size=4) == []


def test_too_few_devices_get_the_number_that_fits():
    assert advice(LARGE) == [
        "a sequence of max_model_len=4096 fits 2 such devices: tensor_parallel_size=2"
    ]
    (line,) = advice(LARGE, gib=48)
    assert line.endswith("tensor_parallel_size=4")
    assert advice(LARGE, gib=1) == []  # nothing fits


def test_engines_that_do_not_fit_are_named():
    assert advice(LARGE, engines=2)[-1].startswith("each of the 2 engines needs")


@pytest.mark.parametrize(
    ("name", "ranks", "text"),
    [
        (
            "qwen3-30b-a3b",
            8,
            "on 2 of the 8 ranks (the model has 4 KV heads); decode_context_parallel_size=2",
        ),
        (
            "deepseek-v2-lite",
            2,
            "on 2 of the 2 ranks (latent attention has one KV head); decode_context",
        ),
    ],
)
def test_caches_that_are_not_divided_are_named(name, ranks, text):
    assert any(text in line for line in advice(SHAPES[name], tensor_parallel_size=ranks))


def test_tokens_that_are_spread_over_all_ranks_need_no_advice():
    sizes = {"tensor_parallel_size": 4}
    for spread, count in ((1, 1), (2, 1), (4, 0)):
        lines = advice(SHAPES["deepseek-v2-lite"], decode_context_parallel_size=spread, **sizes)
        assert sum("decode_context_parallel_size=4" in line for line in lines) == count


def test_ranks_on_a_cpu_get_none():
    assert advice(SHAPES["qwen3-0.6b"], kind="cpu", tensor_parallel_size=2) == []


def test_times_are_near_those_that_were_measured():
    """Two H100, one row, microseconds: docs of the kernels behind the sums."""
    options = Options.from_flat({"model": "m"})
    device = DeviceFacts(kind="cuda", total_bytes=80 * GIB, free_bytes=80 * GIB)
    for name, one, two in (("llama-8b", 6207, 3709), ("qwen3-0.6b", 1099, 1073)):
        model = model_facts(SHAPES[name])
        shape = resolve_memory_plan(options, model, device, server=True, why=DecisionLog([])).shape
        for ranks, want in ((1, one), (2, two)):
            found = decode_s(model, replace(shape, max_model_len=4096), ranks) * 1e6
            assert found == pytest.approx(want, rel=0.2)
