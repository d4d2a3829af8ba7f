"""Rows of a media encoder: how many a step makes, how many the device keeps, and their bytes."""

from dataclasses import replace

import pytest

from quire.config.facts import DeviceFacts, model_facts
from quire.config.memory.memory_plan import encoder_bytes
from quire.config.memory.part_facts import MediaEncoderFacts
from quire.config.options import Options
from quire.config.resolve import resolve
from quire.errors import ConfigError

GIB = 2**30
TINY = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
ENCODER = MediaEncoderFacts(width=128, largest={"image": 700, "video": 9000}, widest=500)


def run(encoder=ENCODER, **options):
    model = replace(model_facts(TINY, name="m"), media_encoder=encoder)
    device = DeviceFacts(kind="cuda", total_bytes=24 * GIB, free_bytes=24 * GIB)
    return resolve(Options.from_flat(options), model, device)


@pytest.mark.parametrize(
    ("options", "modalities", "step", "cache"),
    [
        ({}, ("image", "video"), 8192, 8192),
        ({"max_num_batched_tokens": 1000}, ("image", "video"), 4096, 4096),
        ({"max_num_batched_tokens": 100, "max_model_len": 900}, ("image", "video"), 900, 912),
        ({"limit_mm_per_prompt": {"video": 0}, "max_num_batched_tokens": 9}, ("image",), 700, 704),
        ({"mm_encoder_cache_gb": 0.25}, ("image", "video"), 8192, 1 << 20),
    ],
)
def test_a_step_and_the_cache_hold_the_largest_item(options, modalities, step, cache):
    config, plan, _ = run(**options)
    found = config.media_encoder
    assert found.modalities == modalities
    assert (found.step_rows, found.cache_rows, found.row_bytes) == (step, cache, 256)
    assert plan.encoder_cache_bytes == cache * 256
    without = run(encoder=None, **{k: v for k, v in options.items() if "mm_" not in k}).plan
    assert plan.weight_bytes - without.weight_bytes == plan.encoder_cache_bytes
    assert plan.activation_bytes == max(without.activation_bytes, plan.encoder_step_bytes)


def test_without_any_item_there_is_no_cache():
    config, plan, _ = run(limit_mm_per_prompt={"video": 0, "image": 0})
    assert config.media_encoder is None
    assert plan.encoder_cache_bytes == plan.encoder_step_bytes == 0


def test_only_the_first_stage_has_a_cache():
    shape = run().plan.shape
    assert encoder_bytes(ENCODER, replace(shape, stage=1)) == (0, 0)


def test_a_cache_without_use_or_room_is_refused():
    with pytest.raises(ConfigError, match="mm_encoder_cache_gb: this engine reads text only"):
        run(encoder=None, mm_encoder_cache_gb=1)
    with pytest.raises(ConfigError, match="space for 16 embeddings of 256 bytes, got 1e-06 GiB"):
        run(mm_encoder_cache_gb=1e-6)
