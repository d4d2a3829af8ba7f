"""The options tree: flat names, help, and names of other engines."""

import dataclasses
import json
import logging
import re

import pytest

from quire.config import vllm_options
from quire.config.engine_args import AsyncEngineArgs, EngineArgs, options_of
from quire.config.media import MediaFacts, read_media_facts, resolve_media
from quire.config.options import Options, option_docs, option_specs
from quire.config.quant.online import ONLINE_FORMATS
from quire.errors import ConfigError


def test_every_option_has_a_default_and_help():
    assert set(option_docs()) == set(option_specs())
    assert all(text.endswith((".", ")")) for text in option_docs().values())
    assert Options.from_flat({}) == Options()


def test_flat_names_make_the_tree():
    o = Options.from_flat(
        {"model": "m", "max_model_len": "8k", "gpu_memory": "24GiB", "dtype": "half"}
    )
    assert (o.model.model, o.model.max_model_len) == ("m", 8000)
    assert o.cache.gpu_memory == 24 * 2**30
    assert o.non_default() == {
        "model": "m", "max_model_len": 8000, "gpu_memory": 24 * 2**30, "dtype": "half",
    }  # fmt: skip


def test_options_and_foreign_names_do_not_overlap():
    assert not set(option_specs()) & set(vllm_options.option_names())
    assert not set(vllm_options.NO_EFFECT) & set(vllm_options.UNSUPPORTED)
    assert set(vllm_options.option_names()) >= vllm_options.BOOLEAN_OPTIONS
    assert set(vllm_options.ADVICE) <= set(vllm_options.UNSUPPORTED)
    assert set(vllm_options.RENAMED.values()) <= {
        *option_specs(),
        *vllm_options.NO_EFFECT,
        *vllm_options.UNSUPPORTED,
    }


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError, match="'max_modle_len'; did you mean max_model_len"):
        Options.from_flat({"max_modle_len": 3})


@pytest.mark.parametrize(
    "given",
    [
        {"cpu_offload_gb": 1},
        {"kv_offloading_backend": "lmcache"},
        {"mm_encoder_only": True},
        {"prefix_caching_hash_algo": "xxhash"},
        {"kv_cache_dtype": "turboquant_k8v4"},
        {"rope_scaling": {"factor": 2}},
    ],
)
def test_what_would_change_results_is_refused(given):
    with pytest.raises(ConfigError, match=f"{next(iter(given))}.*not support"):
        Options.from_flat(given)


@pytest.mark.parametrize("name", sorted(vllm_options.UNSUPPORTED))
def test_features_that_are_off_are_no_reason_to_refuse(name):
    assert Options.from_flat({name: None}) == Options.from_flat({name: False}) == Options()


def test_names_without_effect_are_accepted_with_a_log_line(caplog):
    with caplog.at_level(logging.INFO, "quire"):
        assert (
            Options.from_flat({"worker_use_ray": True, "use_v2_block_manager": True}) == Options()
        )
    assert "worker_use_ray=True has no effect" in caplog.text
    assert "use_v2_block_manager" in caplog.text


def test_old_spellings_work():
    o = Options.from_flat({"task": "generate", "max_model_len": -1, "policy": "priority"})
    assert o.model.max_model_len == "auto"
    assert o.scheduler.scheduling_policy == "priority"
    with pytest.raises(ConfigError, match="another name"):
        Options.from_flat({"token": "a", "hf_token": "b"})


def test_ranges_are_checked():
    for name, value in [
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0),
        ("block_size", 0),
    ]:
        with pytest.raises(ConfigError, match=f"{name} must be >"):
            Options.from_flat({name: value})


def test_engine_args_are_a_dataclass_over_the_same_names():
    args = EngineArgs(model="m", max_model_len=64, use_v2_block_manager=True)
    assert args.model == "m"
    assert Options.from_flat(dataclasses.asdict(args)).non_default() == {
        "model": "m",
        "max_model_len": 64,
    }
    assert repr(EngineArgs(model="m", hf_token="secret")) == "EngineArgs(model='m')"
    assert options_of(AsyncEngineArgs(model="m")).model.model == "m"
    assert EngineArgs(policy="priority").options().non_default() == {
        "scheduling_policy": "priority"
    }
    with pytest.raises(ConfigError):
        EngineArgs(qlora_adapter_name_or_path="x")
    with pytest.raises(TypeError):
        EngineArgs(nonsense=1)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({"quantization": "INT4"}, {"quantization": "int4"}),
        ({"quantization": "none"}, {}),
        ({"quantization": ""}, {}),
        ({"quantization": "GGUF:Q4_K_M"}, {"quantization": "gguf:Q4_K_M"}),
        ({"load_format": "bitsandbytes"}, {"quantization": "bitsandbytes"}),
        (
            {"load_format": "bitsandbytes", "quantization": "bitsandbytes"},
            {"quantization": "bitsandbytes"},
        ),
        ({"load_format": "gguf"}, {"load_format": "gguf"}),
    ],
)
def test_spellings_of_a_quantization(given, want):
    assert Options.from_flat(given).non_default() == want


def test_a_load_format_that_is_a_quantization_must_not_differ_from_it():
    with pytest.raises(ConfigError, match="load_format='bitsandbytes' and quantization='int4'"):
        Options.from_flat({"load_format": "bitsandbytes", "quantization": "int4"})


def test_the_help_of_quantization_lists_what_is_made_on_load():
    text = " ".join(option_docs()["quantization"].split())
    for name in ONLINE_FORMATS:
        if name not in ("fp8_per_channel", "fp8_per_block"):
            assert re.search(rf"\b{name}\b", text), name


@pytest.mark.parametrize(
    "given", ["image=2,video=0", '{"image": 2, "video": 0}', {"image": 2, "video": 0}]
)
def test_limits_of_media_have_two_forms(given):
    options = Options.from_flat({"limit_mm_per_prompt": given}).media
    assert options.limit_mm_per_prompt == {"image": 2, "video": 0}


MEDIA = MediaFacts("llava", {"model_type": "llava"}, {}, {})


def test_options_of_media_become_a_section():
    given = {
        "limit_mm_per_prompt": {"image": {"count": 3, "width": 9}},
        "mm_processor_cache_gb": 0.5,
    }
    section = resolve_media(Options.from_flat(given).media, MEDIA)
    assert (section.counts, section.cache_bytes) == ({"image": 3}, 1 << 29)
    assert section.workers >= 1
    assert resolve_media(Options.from_flat({"language_model_only": True}).media, MEDIA) is None


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"limit_mm_per_prompt": {"picture": 1}}, MEDIA),
        ({"limit_mm_per_prompt": {"image": -1}}, MEDIA),
        ({"limit_mm_per_prompt": {"image": {"count": 1, "length": 5}}}, MEDIA),
        ({"limit_mm_per_prompt": {"image": {"count": 1, "width": "9"}}}, MEDIA),
        ({"limit_mm_per_prompt": {"image": -1}}, None),  # a model of text
        ({"allowed_local_media_path": "/no/such/folder"}, MEDIA),
        ({"enable_mm_embeds": True}, None),
        ({"mm_processor_kwargs": {"a": 1}}, None),
    ],
)
def test_options_of_media_are_checked_at_the_start(given, facts):
    with pytest.raises(ConfigError, match=next(iter(given))):
        resolve_media(Options.from_flat(given).media, facts)


def test_files_of_processors_are_read_by_modality(tmp_path):
    def write(name, **values):
        (tmp_path / name).write_text(json.dumps(values))

    write("preprocessor_config.json", image_processor_type="A", size=3)
    write("video_preprocessor_config.json", size=4)
    write("processor_config.json", image_token="<i>", feature_extractor={"rate": 5})
    facts = read_media_facts(tmp_path, "llava", {})
    assert facts.preprocessors["image"]["size"] == 3
    assert facts.preprocessors["video"]["size"] == 4
    assert facts.preprocessors["audio"]["rate"] == 5
    assert facts.processor == {"image_token": "<i>"}
    assert read_media_facts(tmp_path, "no_family", {}) is None
