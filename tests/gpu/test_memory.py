"""Memory on a GPU: taken once, sized by what was measured, and left alone once the engine is ready."""

import gc
import json
import time

import pytest
import torch

from quire import LLM, NoRoom, SamplingParams
from quire.platform import cuda

GIB = 2**30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1536,
    "vocab_size": 32000,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
SMALL = dict(max_num_seqs=48, max_num_batched_tokens=2048, gpu_memory="2GiB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def engine(folder, **options):
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **options)


def asked():
    """Bytes allocated from the driver so far, and bytes that torch holds of them."""
    found = torch.cuda.memory_stats()
    return found["num_device_alloc"], found["reserved_bytes.all.current"]


def prompts(count, length, first=0):
    return [
        {"prompt_token_ids": [(7 * i + k + first) % 31000 + 2 for k in range(length + i % 5)]}
        for i in range(count)
    ]


def stress(llm):
    """Every path a step can take."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    for count in (1, 2, 3, 5, 9, 17, 31, 48, 60):
        llm.generate(prompts(count, 20, count), greedy, use_tqdm=False)
    llm.generate(prompts(4, 3500), greedy, use_tqdm=False)
    for more in (
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 1},
        {"logprobs": 5, "prompt_logprobs": 3},
        {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.4, "logprobs": 20},
        {"logit_bias": {5: 3.0}, "min_tokens": 4},
    ):
        params = SamplingParams(max_tokens=9, ignore_eos=True, detokenize=False, **more)
        for count in (1, 7, 48):
            llm.generate(prompts(count, 90, count), params, use_tqdm=False)


def test_graphs_of_an_engine_outlive_the_start_of_another(folder, monkeypatch):
    """The second start measures its largest step, and returns memory to the driver."""
    from quire.engine.startup import gpu_startup

    first = engine(folder, **SMALL)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def answers():
        some = [*prompts(3, 200), *prompts(20, 9)]
        return [one.outputs[0].token_ids for one in first.generate(some, params, use_tqdm=False)]

    want = answers()
    monkeypatch.setattr(gpu_startup, "read_record", lambda path: None)
    second = engine(folder, **SMALL)
    second.generate(prompts(3, 200), params, use_tqdm=False)
    assert answers() == want


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_after_ready_no_memory_is_allocated_from_the_driver(folder, eager):
    llm = engine(folder, enforce_eager=eager, **SMALL)
    before = asked()
    stress(llm)
    assert asked() == before


def test_preemption_and_the_host_tier_allocate_nothing_from_the_driver(folder):
    llm = engine(
        folder,
        num_gpu_blocks_override=300,
        max_model_len=2048,
        preemption_mode="swap",
        swap_space=0.25,
        max_num_seqs=48,
        max_num_batched_tokens=2048,
    )
    before = asked()
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, detokenize=False)
    llm.generate(prompts(48, 40), params, use_tqdm=False)
    llm.generate(prompts(48, 40), params, use_tqdm=False)
    assert asked() == before
    assert llm.llm_engine.engine.stats().host_loaded_blocks


def test_no_more_is_taken_than_was_allowed(folder):
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    llm = engine(folder, **SMALL)
    plan = llm.llm_engine.built.memory_plan
    assert torch.cuda.memory_reserved() - held + plan.overhead_bytes <= 2 * GIB
    assert plan.kv_available_bytes > 0.3 * GIB
    assert plan.num_blocks == llm.llm_engine.config.cache.num_blocks


def test_the_cache_has_what_the_rest_leaves(folder):
    small = engine(folder, **SMALL).llm_engine.built.memory_plan
    large = engine(folder, **SMALL | {"gpu_memory": "3GiB"}).llm_engine.built.memory_plan
    gained = (large.num_blocks - small.num_blocks) * large.block_bytes
    assert gained == pytest.approx(GIB, rel=0.05)


def test_beside_others_an_engine_fits_itself_in(folder, monkeypatch, caplog):
    real = cuda.memory()
    left = 2 * GIB
    monkeypatch.setattr(cuda, "memory", lambda index=0: type(real)(real.total, left))
    llm = engine(folder, max_num_seqs=48, max_num_batched_tokens=2048)
    plan = llm.llm_engine.built.memory_plan
    assert plan.allowed_bytes <= left
    assert plan.weight_bytes + plan.activation_bytes + plan.num_blocks * plan.block_bytes <= left


def test_what_cannot_fit_is_refused_at_once_with_the_numbers(folder, monkeypatch):
    real = cuda.memory()
    monkeypatch.setattr(cuda, "memory", lambda index=0: type(real)(real.total, GIB // 2))
    began = time.perf_counter()
    with pytest.raises(NoRoom, match=r"there is room for .*What would fit: "):
        engine(folder, max_num_seqs=48, max_num_batched_tokens=2048)
    assert time.perf_counter() - began < 5


def test_a_requested_cache_that_does_not_fit_is_refused(folder):
    with pytest.raises(NoRoom, match=r"needs 900.00 GiB of KV \(kv_cache_memory_bytes\)"):
        engine(folder, kv_cache_memory_bytes="900GiB", max_num_seqs=8)
