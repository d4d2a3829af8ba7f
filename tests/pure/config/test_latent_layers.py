"""Layers that keep one latent per token instead of keys and values are planned as such."""

from quire.config.facts import model_facts
from quire.config.memory.kv_format import KV_FORMATS
from quire.config.memory.kv_layout import LayerFacts, block_bytes, group_layers
from quire.config.memory.memory_plan import rank_layers

LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
}
V3 = LITE | {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}


def test_a_latent_layer_keeps_its_numbers_once():
    layers = (LayerFacts(1, 576, latent=512),) * 3
    groups = group_layers(layers)
    assert block_bytes(layers, groups, 16, KV_FORMATS["bfloat16"]) == 3 * 576 * 16 * 2


def test_a_latent_layer_is_whole_on_every_rank():
    layers = (LayerFacts(1, 576, latent=512),)
    assert rank_layers(layers, 8) == layers


def test_the_published_sizes_of_deepseek_are_estimated_from_the_config_alone():
    for hf, billions in ((LITE, 15.7), (V3, 671.0)):
        facts = model_facts(hf)
        assert set(facts.layers) == {LayerFacts(1, 576, latent=512)}
        assert round(facts.weights.matrices / 1e9, 1) == billions
