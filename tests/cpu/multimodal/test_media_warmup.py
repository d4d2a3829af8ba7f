"""The item of a start goes through the encoder of every family."""

import msgspec
import pytest
import torch

from quire import LLM, env
from quire.config.facts import DeviceFacts
from quire.config.options import Options
from quire.config.resolve import resolve
from quire.engine.build import build_scheduler
from quire.engine.startup import warmup
from quire.engine.startup.media_warmup import largest_items, media_request
from quire.engine.startup.model_setup import describe_model
from tests import tiers
from tests.cpu.multimodal import families, hub_models, qwen_models

OPTIONS = {
    "dtype": "float32", "kv_cache_memory_bytes": "64MiB", "max_model_len": 2048,
    "inter_token_target_ms": 40,
}  # fmt: skip
NAMES = ["llava", "qwen2_5_vl", *tiers.long("gemma3", "idefics3", "qwen3_vl")]


@pytest.mark.slow("imports transformers, and makes models of it")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_start_sends_one_item_through_the_encoder(tmp_path, name):
    if name in qwen_models.FAMILIES:
        qwen_models.saved(name, tmp_path)
        qwen_models.processor_of(name).save_pretrained(tmp_path)
    else:
        families.made(name, tmp_path).processor.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS).llm_engine
    found = media_request(llm.config)
    assert found is not None
    scheduler = build_scheduler(llm.config)
    scheduler.add(found)
    while not scheduler.idle:
        plan = scheduler.plan()
        updates = scheduler.apply(plan, llm.engine.executor.submit(plan).wait())
    assert [one.finish for one in updates] == ["length"]
    most, section = largest_items(llm.config), llm.config.media_encoder
    rows = [one.num_rows for one in most]
    assert section.step_rows // 2 < sum(rows) <= section.step_rows
    llm.engine.executor.call("call_part", "media", msgspec.msgpack.encode(most[:1]))
    pool = llm.engine.executor.runner.model.media_rows.pool
    assert pool.allocate()[: rows[0]].any()
    wanted = pool.allocate()[: rows[0]].clone()
    pool.allocate().zero_()
    with warmup._beside_slices((scheduler, llm.engine.executor), llm.config, most[:1]):
        assert (
            not pool.allocate().any()
        )  # steps run while the states of the last slice but one live
    assert torch.equal(pool.allocate()[: rows[0]], wanted)


@pytest.mark.slow("imports transformers, and makes models of it")
@pytest.mark.parametrize("name", hub_models.FAMILIES)
def test_a_start_knows_items_before_it_has_a_tokenizer(tmp_path, name):
    hub_models.FAMILIES[name](tmp_path)
    options = Options.from_flat({"model": str(tmp_path), "device": "cpu", **OPTIONS})
    device = DeviceFacts(kind="cpu", total_bytes=8 << 30, free_bytes=4 << 30, threads=2)
    config = resolve(options, describe_model(options, env.read()).facts, device).config
    assert largest_items(config)
    assert media_request(config) is not None


def test_a_model_of_text_has_none():
    assert media_request(LLM("embedded").llm_engine.config) is None
