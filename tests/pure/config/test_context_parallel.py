"""Decode context parallelism: what it does to the plan, and what is refused."""

import pytest

from quire.config.facts import DeviceFacts, model_facts
from quire.config.options import Options
from quire.config.resolve import resolve
from quire.errors import ConfigError
from tests.pure.config.test_resolve import GIB, TINY

DEEPSEEK = TINY | {
    "model_type": "deepseek_v2", "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4, "q_lora_rank": None,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
ONE_KV_HEAD = TINY | {"num_key_value_heads": 1}


def plan(hf, tensor, context, **more):
    device = DeviceFacts(kind="cuda", total_bytes=8 * GIB, free_bytes=8 * GIB, count=8)
    options = {"tensor_parallel_size": tensor, "decode_context_parallel_size": context} | more
    return resolve(Options.from_flat(options), model_facts(hf, name="m"), device, server=False)


@pytest.mark.parametrize("hf", [ONE_KV_HEAD, DEEPSEEK], ids=["kv head", "latents"])
@pytest.mark.parametrize("context", [2, 4])
def test_a_rank_has_a_part_of_each_token_s_bytes(hf, context):
    one, some = plan(hf, 4, 1), plan(hf, 4, context)
    assert some.config.cache.block_size == 16 * context
    assert some.config.parallel.context == context
    assert some.plan.block_bytes == one.plan.block_bytes  # of as many times more tokens
    assert some.plan.token_bytes * context == one.plan.token_bytes
    assert some.plan.max_len_kv_bytes * context == one.plan.max_len_kv_bytes
    assert some.plan.tokens == pytest.approx(context * one.plan.tokens, rel=1e-3)


def test_what_ranks_gather_counts_as_memory_of_a_step():
    one, two = (plan(ONE_KV_HEAD, 2, n).plan for n in (1, 2))
    whole = 512 * 2 * 16 * 2  # tokens, keys and values, numbers, bytes: of one layer
    tables = 4 * two.shape.max_num_seqs * 512 // 32  # that larger blocks save
    assert two.activation_bytes - one.activation_bytes == 3 * whole - tables


REFUSED = {
    "two KV heads": (TINY | {"num_key_value_heads": 2}, 4, 4, "each of 2 KV heads is on 2 ranks.*"),
    "no copies": (TINY | {"num_key_value_heads": 4}, 4, 2, "on 1 ranks.*leave it out"),
    "another divisor": (ONE_KV_HEAD, 4, 3, "must divide; use 2, 4"),
    "one rank": (ONE_KV_HEAD, 1, 2, "leave it out"),
    "a window": (
        ONE_KV_HEAD | {"model_type": "mistral", "sliding_window": 33}, 2, 2, "sliding windows"
    ),
    "uneven heads": (
        ONE_KV_HEAD | {"num_attention_heads": 5, "head_dim": 16}, 2, 2, "5 attention heads"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    hf, tensor, context, message = REFUSED[case]
    with pytest.raises(ConfigError, match=f"^decode_context_parallel_size={context}.*{message}"):
        plan(hf, tensor, context)


def test_other_backends_and_data_parallel_attention_are_refused():
    with pytest.raises(ConfigError, match="attention_backend='flash_attn'"):
        plan(ONE_KV_HEAD, 2, 2, attention_backend="flash_attn")
    device = DeviceFacts(kind="cpu", total_bytes=8 * GIB, free_bytes=8 * GIB, count=8)
    options = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2,
               "data_parallel_size": 2, "enable_expert_parallel": True}  # fmt: skip
    with pytest.raises(ConfigError, match="leave one of the two out"):
        resolve(Options.from_flat(options), model_facts(DEEPSEEK, name="m"), device, server=False)
