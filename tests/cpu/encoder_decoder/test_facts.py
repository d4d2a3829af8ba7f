"""What is planned without a model's code agrees with the model."""

import pytest

from quire.config.facts import model_facts
from quire.config.memory.kv_layout import group_layers
from quire.config.memory.memory_plan import EngineShape, plan_memory
from quire.errors import ConfigError
from quire.models.build import read_model_config
from tests.cpu.encoder_decoder.seq2seq import BART, T5, VARIANTS, write_model

pytestmark = pytest.mark.slow("imports transformers, and makes models of it")


def full(hf):
    return {**hf, "is_encoder_decoder": True}


@pytest.mark.parametrize("variant", VARIANTS)
def test_facts_are_those_of_the_model(variant, tmp_path):
    hf = full(VARIANTS[variant])
    facts, (_, config) = model_facts(hf), read_model_config(hf)
    assert facts.layers == config.attention_layers()
    assert (facts.hidden, facts.vocab, facts.mlp) == (config.hidden, config.vocab, config.mlp)
    assert facts.max_len == config.max_len == facts.encoder.max_len == 128
    assert facts.rotary == 0
    theirs = write_model(tmp_path, VARIANTS[variant])
    matrices = {
        id(value): value.numel()
        for name, value in theirs.named_parameters()
        if value.ndim > 1 and not (variant == "marian" and "embed_positions" in name)
    }
    # transformers ties the head of any T5; in this config.json it has a matrix of its own
    head = 0 if hf.get("tie_word_embeddings", True) else config.vocab * config.hidden
    assert facts.weights.matrices == pytest.approx(sum(matrices.values()) + head, rel=0.01)


@pytest.mark.parametrize("variant", ["t5", "bart"])
def test_a_plan_counts_the_blocks_of_sources(variant):
    facts = model_facts(full(VARIANTS[variant]))
    shape = EngineShape(
        dtype="float32",
        cache_dtype="float32",
        block_size=16,
        max_model_len=40,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_encoder_len=100,
    )
    plan = plan_memory(facts, shape, device_bytes=1 << 30, allowed_bytes=1 << 30, num_blocks=100)
    each = 2 * 16 * 32 * 4  # layers, tokens, numbers of K and V of the width of the model, bytes
    assert plan.block_bytes == 2 * each
    assert plan.max_len_kv_bytes == (3 + 7) * plan.block_bytes
    assert plan.concurrency == 10.0
    assert plan.max_fitting_len > 100
    assert [group.cross for group in group_layers(facts.layers)] == [False, True]


def test_a_start_token_must_be_known():
    hf = {key: value for key, value in full(T5).items() if key != "decoder_start_token_id"}
    with pytest.raises(ConfigError, match="decoder_start_token_id is missing"):
        model_facts(hf)
    assert model_facts(hf, forced={"decoder_start_token_id": 7}).encoder.start_id == 7


def test_a_generation_config_goes_before_the_config():
    found = model_facts(full(BART), forced={"forced_bos_token_id": None, "suppress_tokens": [4]})
    assert found.encoder.forced_first == BART["forced_bos_token_id"]
    assert found.encoder.banned == (4,)


@pytest.mark.parametrize(
    ("hf", "words"),
    [
        (BART | {"decoder_attention_heads": 5}, "decoder_attention_heads"),
        (T5 | {"feed_forward_proj": "gated-spiral"}, "feed_forward_proj is 'spiral'"),
        (VARIANTS["marian"] | {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder"),
        (T5 | {"is_encoder_decoder": False}, "is_encoder_decoder is False"),
    ],
)
def test_unsupported_settings_are_refused(hf, words):
    with pytest.raises(ConfigError, match=words):
        read_model_config({"is_encoder_decoder": True, **hf})


def test_pipeline_stages_are_refused():
    import torch

    from quire.models.build import build_model

    model_type, config = read_model_config(full(T5))
    with pytest.raises(ConfigError, match="cannot be cut into pipeline stages"):
        build_model(model_type, config, load_format="dummy", dtype=torch.float32, stage=range(1))
