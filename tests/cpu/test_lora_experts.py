"""Adapters of experts through LLM: tokens and logprobs are those of peft."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from quire import LoRARequest, RequestError
from quire.config import adapters
from tests import tiers
from tests.cpu.lora_cases import (
    GREEDY,
    PATHS,
    LoraCase,
    dequantize,
    give_weights,
    planned_and_real_bytes,
)

BANK = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = {
    "qwen3_moe": ["q_proj", "v_proj"],
    "mixtral": ["o_proj"],
    "gpt_oss": ["k_proj", "o_proj"],
    "deepseek_v3": ["q_b_proj", "kv_a_proj_with_mqa"],
}
VARIANTS = ["qwen3_moe", *tiers.long("mixtral", "gpt_oss", "deepseek_v3")]
RANKS = [1, 4, 8, 16, 33]


def experts_case(root, variant):
    case = LoraCase(root, variant)
    case.add("attention", target_modules=ATTENTION[variant])
    for rank in RANKS:
        case.add(
            f"r{rank}", r=rank, lora_alpha=rank, target_modules=ATTENTION[variant],
            target_parameters=BANK[rank % 3 == 1 :],
        )  # fmt: skip
    return case


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = {}

    def case(variant):
        if variant not in made:
            made[variant] = experts_case(tmp_path_factory.mktemp(variant), variant)
        return made[variant]

    return case


@pytest.fixture(scope="module")
def qwen(cases):
    return cases("qwen3_moe")


def mixed(case):
    return [None, "attention", *(f"r{rank}" for rank in RANKS)][: len(case.prompts)]


@pytest.mark.slow("peft and engines of several models")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("settings", PATHS, ids=str)
def test_a_mixed_batch_is_as_peft_computes_each_alone(cases, variant, settings):
    case = cases(variant)
    llm = case.llm(**settings)
    for names in (mixed(case), mixed(case)[::-1]):  # the second time with prefix hits
        case.check_batch(llm, names)
        case.check_batch(llm, names)
    planned, real = planned_and_real_bytes(llm)
    assert planned == real


def test_the_adapters_differ(qwen):
    answers = [qwen.greedy(qwen.prompts[1], name) for name in qwen.requests]
    assert len({str(one) for one in answers}) == len(answers)


def test_experts_as_modules_and_as_parameters_are_one(qwen):
    """The tensors of a bank's file, as a file with a module for each expert has them."""
    experts, width, made = 12, 40, {}
    tensors = load_file(qwen.root / "r4" / "adapter_model.safetensors")
    for name, a in tensors.items():
        if not name.endswith("experts.lora_A.weight"):
            continue
        bank, b = name.removesuffix(".lora_A.weight"), tensors[name.replace("lora_A", "lora_B")]
        for i in range(experts):
            to = f"{bank}.{i}.down_proj"
            made[f"{to}.lora_A.weight"] = a.view(experts, 4, width)[i].contiguous()
            made[f"{to}.lora_B.weight"] = b.view(-1, 4, experts)[..., i].contiguous()
    others = {name: one for name, one in tensors.items() if ".experts." not in name}
    shutil.copytree(qwen.root / "r4", qwen.root / "modules", dirs_exist_ok=True)
    save_file(others | made, qwen.root / "modules" / "adapter_model.safetensors")
    config = json.loads((qwen.root / "r4" / "adapter_config.json").read_text())
    config["target_parameters"] = None
    (qwen.root / "modules" / "adapter_config.json").write_text(json.dumps(config))
    request = LoRARequest("modules", 50, str(qwen.root / "modules"))
    llm = qwen.llm()
    found = llm.generate(
        {"prompt_token_ids": qwen.prompts[3]}, GREEDY, lora_request=request, use_tqdm=False
    )
    qwen.check(found, ["r4"])


def test_memory_for_experts_is_reserved_where_it_is_allowed(qwen, monkeypatch):
    request = qwen.requests["r4"]
    for targets, message in [
        (["q_proj", "v_proj"], "lora_target_modules allows q_proj, v_proj only"),
        (["all-linear"], "lora_target_modules allows all-linear only"),
    ]:
        llm = qwen.llm(lora_target_modules=targets)
        planned, real = planned_and_real_bytes(llm)
        assert planned == real
        with pytest.raises(RequestError, match=message):
            llm.generate("a", GREEDY, lora_request=request, use_tqdm=False)
        qwen.check_batch(llm, [None, "attention"])
    llm = qwen.llm(lora_target_modules=["all-linear", "experts"])
    more, real = planned_and_real_bytes(llm)
    assert more == real > planned
    qwen.check_batch(llm, ["r4", "attention"])
    monkeypatch.setattr(adapters, "EXPERTS_SHARE", 10**12)  # as on a small device
    llm = qwen.llm()
    small, real = planned_and_real_bytes(llm)
    assert small == real < more
    with pytest.raises(RequestError, match="name them, lora_target_modules=all-linear,experts"):
        llm.generate("a", GREEDY, lora_request=request, use_tqdm=False)


@pytest.mark.long("two processes that import torch")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks(cases, variant, whole):
    """whole: each rank has some experts."""
    case = cases(variant)
    llm = case.llm(tensor_parallel_size=2, enable_expert_parallel=whole)
    prompts = [{"prompt_token_ids": one} for one in case.prompts]
    try:
        requests = [case.requests[name] for name in mixed(case)]
        case.check(
            llm.generate(prompts, GREEDY, lora_request=requests, use_tqdm=False), mixed(case), 2e-5
        )
    finally:
        llm.llm_engine.engine.shutdown()


@pytest.mark.parametrize(
    "quantization", ["int4", *tiers.long("int8_per_channel_weight_only", "nf4", "mxfp4")]
)
def test_quantized_experts_get_the_same_deltas(qwen, quantization):
    llm = qwen.llm(quantization=quantization)
    (weights,) = llm.apply_model(dequantize)
    assert sum(".experts." in name for name in weights) == 4
    other, names = qwen.copy(), [None, "r8"]
    for name in names:
        give_weights(other.peft(name), weights)
    other.check_batch(llm, names, atol=2e-4)
