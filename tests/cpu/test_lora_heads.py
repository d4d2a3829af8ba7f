"""Adapters of embeddings and output heads through LLM: tokens and logprobs are those of peft."""

import functools

import pytest
import torch

from quire import RequestError, SamplingParams
from tests import tiers
from tests.cpu.lora_cases import GREEDY, PATHS, LoraCase, planned_and_real_bytes

pytestmark = pytest.mark.sampled(2)

TIED = "llama_bias_tied_head_dim"
TARGETS = {
    "llama": ("embed_tokens", "lm_head", "q_proj"),
    TIED: ("embed_tokens", None, "v_proj"),
    "gemma2": ("embed_tokens", None, "o_proj"),  # scaled embeddings, capped logits
    "gpt2": ("wte", None, "c_attn"),
    "phi3": ("embed_tokens", "lm_head", "qkv_proj"),
    "qwen3": ("embed_tokens", "lm_head", "down_proj"),
}
VARIANTS = ["gemma2", *tiers.long(TIED, "gpt2", "phi3", "qwen3")]


def heads_case(root, variant):
    case = LoraCase(root, variant)
    table, head, other = TARGETS[variant]
    case.add("table", r=1, target_modules=[table])
    case.add("both", r=8, target_modules=[table, other])
    case.add("linear", r=4, target_modules=[other])
    case.add("dora", r=5, target_modules=[table, *([head] * (head is not None))], use_dora=True)
    if head is not None:
        case.add("head", r=16, target_modules=[head])
        case.add("all", r=33, lora_alpha=33, target_modules=[table, head, other])
    return case


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = {}

    def case(variant):
        if variant not in made:
            made[variant] = heads_case(tmp_path_factory.mktemp(variant), variant)
        return made[variant]

    return case


@pytest.mark.sampled(2)
@pytest.mark.slow("peft and engines of several models")
@pytest.mark.parametrize("variant", ["llama", *VARIANTS])
@pytest.mark.parametrize("settings", PATHS, ids=str)
def test_a_mixed_batch_is_as_peft_computes_each_alone(cases, variant, settings):
    case = cases(variant)
    llm = case.llm(**settings)
    names = list(case.requests)
    for mixed in (names, names[::-1]):  # the second time with prefix hits
        case.check_batch(llm, mixed)
        case.check_batch(llm, mixed)
    planned, real = planned_and_real_bytes(llm)
    assert planned == real


@pytest.fixture(scope="module")
def llama(cases):
    return cases("llama")


def test_several_answers_and_prompt_logprobs(llama):
    llm = llama.llm(max_num_batched_tokens=17)
    prompt, params = llama.prompts[1], SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=0)
    names = ["all", None, "head"]
    for name, output in zip(names, llama.run(llm, [prompt] * 3, names, params)):
        assert len({tuple(one.token_ids) for one in output.outputs}) > 1
        want = llama.logprobs(prompt, name)
        for i, entry in enumerate(output.prompt_logprobs[1:]):
            token = prompt[i + 1]
            assert entry[token].logprob == pytest.approx(float(want[i, token]), abs=1e-5)


@pytest.mark.parametrize("settings", [{}, *tiers.long({"max_num_batched_tokens": 9})], ids=str)
def test_vectors_of_prompts_are_beside_adapted_embeddings(llama, settings):
    """The vectors that a request gives are not changed, those that are looked up are."""
    llm = llama.llm(enable_prompt_embeds=True, **settings)
    prompt, name = llama.prompts[1], "table"
    table = llama.peft(name).get_input_embeddings()
    with torch.inference_mode():
        vectors = table(torch.tensor(prompt)).clone()
    outputs = llm.generate(
        [{"prompt_embeds": vectors}, {"prompt_token_ids": prompt}],
        GREEDY,
        lora_request=[llama.requests[name]] * 2,
        use_tqdm=False,
    )
    want, _ = llama.greedy(prompt, name)
    for output in outputs:
        assert list(output.outputs[0].token_ids) == want


@pytest.mark.long("two processes that import torch")
@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_two_ranks(cases, variant):
    case = cases(variant)
    names = list(case.requests)
    llm = case.llm(tensor_parallel_size=2, lora_modules_to_save_memory=1 << 22)
    given = [{"prompt_token_ids": one} for one in case.prompts[: len(names)]]
    requests = [case.requests[name] for name in names]
    try:
        case.check(llm.generate(given, GREEDY, lora_request=requests, use_tqdm=False), names, 2e-5)
    finally:
        llm.llm_engine.engine.shutdown()


# -- weights in place of the model's ---------------------------------------------------------------


def change_all(model):
    """Random numbers in what an adapter replaces."""
    for name, value in model.named_parameters():
        if value.requires_grad and "lora_" not in name:
            value.data += 0.5 * torch.randn_like(value) * value.std()


@pytest.fixture(scope="module")
def replaced(tmp_path_factory):
    @functools.cache
    def case(variant):
        case = LoraCase(tmp_path_factory.mktemp(variant), variant)
        table, head, other = TARGETS[variant]
        both = [one for one in (table, head) if one is not None]
        case.add("whole", change_all, target_modules=[other], modules_to_save=both)
        case.add("table", change_all, target_modules=[other], modules_to_save=[table])
        tokens = sorted({*case.prompts[1], *case.greedy(case.prompts[1])[0]})
        tokens = {table: tokens} | ({} if head is None else {head: tokens[::2]})
        case.add("tokens", change_all, r=1, target_modules=[other], trainable_token_indices=tokens)
        case.add("linear", target_modules=[other])
        case.add("dora", target_modules=[table], use_dora=True)
        return case

    return case


@pytest.mark.slow("peft and engines of several models")
@pytest.mark.parametrize("variant", ["llama", *VARIANTS])
@pytest.mark.parametrize(
    "settings",
    [{}, *tiers.long({"max_num_batched_tokens": 9}, {"max_loras": 1}, {"tensor_parallel_size": 2})],
    ids=str,
)
def test_replaced_weights_and_tokens_are_those_of_peft(replaced, variant, settings):
    case = replaced(variant)
    llm = case.llm(lora_modules_to_save_memory=1 << 22, **settings)
    names = ["dora", None, "tokens", "table", "linear", "whole", "tokens"]
    answers = {str(case.greedy(case.prompts[1], name)) for name in {*names}}
    assert len(answers) == len({*names})
    given = [{"prompt_token_ids": case.prompts[1]} for _ in names]
    requests = [case.requests[name] for name in names]
    for _ in range(2):
        outputs = llm.generate(given, GREEDY, lora_request=requests, use_tqdm=False)
        case.check(outputs, names, 2e-5)
    if "tensor_parallel_size" in settings:
        llm.llm_engine.engine.shutdown()
        return
    planned, real = planned_and_real_bytes(llm)
    assert planned == real


def test_memory_for_replaced_rows_is_that_of_the_option(replaced):
    case = replaced("llama")
    llm = case.llm(lora_modules_to_save_memory=60 * 128 * 4 * 6)
    planned, real = planned_and_real_bytes(llm)
    assert planned == real == planned_and_real_bytes(case.llm())[1] + 60 * 128 * 4 * 6
    case.check_batch(llm, [None, "tokens"])
    message = (
        f"replaces {case.vocab} rows of embed_tokens, and each slot has memory for 60: 6 slots"
    )
    with pytest.raises(RequestError, match=message):
        llm.generate("a", GREEDY, lora_request=case.requests["table"], use_tqdm=False)
    need = case.vocab * 128 * 4 * 6
    with pytest.raises(RequestError, match=f"lora_modules_to_save_memory={need}"):
        llm.generate("a", GREEDY, lora_request=case.requests["whole"], use_tqdm=False)
    case.check_batch(case.llm(lora_modules_to_save_memory=need), [None, "whole"])
