"""The kernels that a start compiles are all that any step needs: no list is kept by hand.

Every number of rows and tokens (without --long: those near multiples of 16) is stepped on meta
tensors, at published widths (two layers), and must need no kernel that the enumeration has not. See
kernel_coverage.py.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from bench.make_models import SHAPES
from tests import tiers
from tests.cpu.encoder_decoder.seq2seq import BART, FLAN

TINY = pathlib.Path(__file__).parent / "models" / "tiny"
PROGRAM = pathlib.Path(__file__).parent / "kernel_coverage.py"
SMALL = {"max_num_seqs": 9, "max_num_batched_tokens": 64, "max_model_len": 128}
LARGE = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 8192}


def tiny(kind):
    hf = json.loads((TINY / f"{kind}.json").read_text())
    return hf.get("config", hf)


BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
QWEN2_5_VL = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "text_config": SHAPES["qwen3-0.6b"]
    | {
        "model_type": "qwen2_5_vl_text",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 8,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "out_hidden_size": 1024,
    },
}
MLLAMA = {
    "model_type": "mllama",
    "architectures": ["MllamaForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_index": 5,
    "text_config": SHAPES["qwen3-0.6b"]
    | {"model_type": "mllama_text_model", "head_dim": 64, "cross_attention_layers": [3, 8]},
    "vision_config": {"image_size": 560, "num_hidden_layers": 4, "num_global_layers": 2,
                      "intermediate_layers_indices": [0, 2]},
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
EIGHT = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": EIGHT | {"strategy": "channel", "dynamic": False},
            "input_activations": EIGHT | {"strategy": "token", "dynamic": True},
        }
    },
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
EAGLE3 = SHAPES["llama-8b"] | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}
CASES = {
    "a head that drafts": (
        SHAPES["llama-8b"],
        {"speculative_config": {"head": EAGLE3, "num_speculative_tokens": 3}},
    ),
    "a head without graphs": (
        SHAPES["llama-8b"],
        {
            "speculative_config": {"head": EAGLE3, "num_speculative_tokens": 5},
            "enforce_eager": True,
        },
    ),
    "a draft model": (
        SHAPES["qwen3-0.6b"],
        {"speculative_config": {"head": SHAPES["qwen3-0.6b"], "num_speculative_tokens": 3}},
    ),
    "dense": (SHAPES["llama-8b"], {}),
    "eager": (SHAPES["llama-8b"], {"enforce_eager": True}),
    "two ranks": (SHAPES["llama-8b"], {"tensor_parallel_size": 2}),
    "two ranks with unequal shares": (
        tiny("mistral"),
        {
            "tensor_parallel_size": 2,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "max_model_len": 64,
        },
    ),
    "tokens over two ranks": (
        SHAPES["llama-8b"] | {"num_key_value_heads": 1},
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    ),
    "latents over two ranks": (
        SHAPES["deepseek-v2-lite"],
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    ),
    "adapters on two ranks": (
        SHAPES["qwen3-0.6b"],
        {"tensor_parallel_size": 2, "enable_lora": True},
    ),
    "four ranks with experts": (SHAPES["qwen3-30b-a3b"], {"tensor_parallel_size": 4}),
    "four ranks with whole experts": (
        SHAPES["qwen3-30b-a3b"],
        {"tensor_parallel_size": 4, "enable_expert_parallel": True},
    ),
    "four ranks with experts that move": (
        SHAPES["qwen3-30b-a3b"],
        {"tensor_parallel_size": 4, "enable_expert_parallel": True, "enable_eplb": True},
    ),
    "two data-parallel ranks that share experts": (
        tiny("qwen3_moe"),
        {"data_parallel_size": 2, "enable_expert_parallel": True, "max_model_len": 128},
    ),
    "two large data-parallel ranks": (
        SHAPES["deepseek-v2-lite"],
        {"data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "three stages": (SHAPES["qwen3-0.6b"], {"pipeline_parallel_size": 3}),
    "two stages of two ranks": (
        SHAPES["qwen3-30b-a3b"],
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ),
    "float32": (SHAPES["qwen3-0.6b"], {"dtype": "float32"}),
    "experts": (SHAPES["qwen3-30b-a3b"], {}),
    "latent": (SHAPES["deepseek-v2-lite"], {}),
    "fp8": (SHAPES["llama-8b"], {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "a cache with scales": (
        SHAPES["qwen3-0.6b"],
        {"kv_cache_dtype": "int8_per_token_head"},
    ),
    "fp8 experts": (SHAPES["qwen3-30b-a3b"], {"quantization": "fp8"}),
    "int4": (SHAPES["llama-8b"], {"quantization": "int4"}),
    "int4 experts": (SHAPES["qwen3-30b-a3b"], {"quantization": "int4"}),
    "nf4": (SHAPES["qwen3-0.6b"], {"quantization": "nf4"}),
    "W8A8": (SHAPES["llama-8b"] | {"quantization_config": W8A8}, {}),
    "gptq": (SHAPES["llama-8b"] | {"quantization_config": GPTQ}, {}),
    "adapters of a tiny model": (
        tiny("mistral"),
        {
            "enable_lora": True,
            "max_lora_rank": 64,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 8,
            "max_model_len": 16,
        },
    ),
    "adapters": (SHAPES["qwen3-0.6b"], {"enable_lora": True, "max_loras": 4}),
    "adapters of few ranks and of many": (
        SHAPES["llama-8b"],
        {"enable_lora": True, "max_lora_rank": 64},
    ),
    "adapters of quantized layers": (
        SHAPES["llama-8b"],
        {"enable_lora": True, "max_lora_rank": 64, "quantization": "fp8"},
    ),
    "adapters of experts": (SHAPES["qwen3-30b-a3b"], {"enable_lora": True, "max_loras": 2}),
    "adapters of an encoder": (
        BERT,
        {"enable_lora": True, "runner": "pooling", "max_model_len": 128},
    ),
    "adapters with rows in place of others": (
        SHAPES["qwen3-0.6b"],
        {"enable_lora": True, "lora_modules_to_save_memory": 1 << 31},
    ),
    "awq experts": (SHAPES["qwen3-30b-a3b"] | {"quantization_config": AWQ}, {}),
    "windows": (tiny("gemma2"), {"max_model_len": 512}),
    "norms of heads": (tiny("cohere_qk_norm_untied_bias"), {"max_model_len": 512}),
    "ALiBi": (tiny("bloom"), {"max_model_len": 512}),
    "two head sizes, shared caches": (tiny("gemma4_text"), {"max_model_len": 512}),
    "experts beside an MLP": (tiny("gemma4_text_experts"), {"max_model_len": 512}),
    "interleaved pairs, a part of each head": (tiny("gptj"), {"max_model_len": 512}),
    "parts of heads": (tiny("glm4_no_bias_yarn"), {"max_model_len": 512}),
    "through transformers": (SHAPES["qwen3-30b-a3b"], {"model_impl": "transformers"}),
    "sinks": (tiny("gpt_oss"), {"max_model_len": 512}),
    "an encoder": (FLAN | {"is_encoder_decoder": True}, {"max_model_len": 100}),
    "an encoder with learned positions": (
        BART | {"is_encoder_decoder": True, "dtype": "float32"},
        {"max_model_len": 100},
    ),
    "an encoder of images": (QWEN2_5_VL, {"max_model_len": 512}),
    "an embedding decoder": (SHAPES["qwen3-0.6b"], {"runner": "pooling"}),
    "images that cross attention reads": (MLLAMA, {"max_model_len": 512}),
    "a bidirectional encoder": (
        BERT,
        {"runner": "pooling", "max_model_len": tiers.amount(64, 128)},
    ),
    "late interaction": (
        BERT | {"architectures": ["HF_ColBERT"], "dim": 128},
        {"max_model_len": 128},
    ),
    "a classifier of tokens": (
        BERT | {"architectures": ["BertForTokenClassification"]},
        {"max_model_len": 128},
    ),
    "recurrent layers and experts": (tiny("qwen3_next"), {"max_model_len": 512}),
    "recurrent layers alone": (tiny("mamba2"), {"max_model_len": 512}),
    "processed logprobs": (SHAPES["qwen3-0.6b"], {"logprobs_mode": "processed_logprobs"}),
}
EVERYDAY = ("two ranks with unequal shares", "adapters of a tiny model", "a bidirectional encoder")


@pytest.fixture(scope="module")
def program():
    """It imports torch once for all cases."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    env["PYTHONPATH"] = os.getcwd()
    pipe = subprocess.PIPE
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        yield process


def run(program, *case):
    print(json.dumps(case), file=program.stdin, flush=True)
    answer = program.stdout.readline()
    assert answer, "the program has failed: its error is on stderr"
    return json.loads(answer)


@pytest.mark.slow("steps of every size of three engines")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "case", [*EVERYDAY, *tiers.long(*(name for name in CASES if name not in EVERYDAY))]
)
def test_no_step_needs_a_kernel_that_a_start_does_not_compile(case, program):
    hf, options = CASES[case]
    sizes, rounds = tiers.amount((SMALL, 2), (LARGE, 200))
    if not tiers.LONG and case != "a bidirectional encoder":
        sizes = sizes | {"runner": "generate"}  # the encoder pools
    found = run(program, hf, sizes | options, rounds, tiers.LONG)
    assert found["missing"] == []
    assert found["later"] > 5  # the second half has stepped
    assert ("_sum_flagged" in found["names"]) == ("tensor_parallel_size" in options)
