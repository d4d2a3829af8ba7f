"""Options and facts to a config: defaults, and what cannot be."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.facts import DeviceFacts, model_facts
from quire.config.memory.kv_format import KV_FORMATS
from quire.config.memory.kv_layout import LayerFacts
from quire.config.memory.kv_memory import SHARED_GPU_RESERVE
from quire.config.memory.memory_plan import apply_measurements, blocks_per_sequence
from quire.config.options import Options
from quire.config.quant.facts import QuantFacts
from quire.config.resolve import resolve
from quire.config.sentence_transformers import FolderModules
from quire.errors import ConfigError, NoRoom
from tests import tiers

GIB = 2**30
HF = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
TINY = HF | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100,
    "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


def cpu(total=24, free=20):
    return DeviceFacts(kind="cpu", total_bytes=total * GIB, free_bytes=free * GIB)


def gpu(total=24, free=None):
    free = total if free is None else free
    return DeviceFacts(kind="cuda", total_bytes=total * GIB, free_bytes=free * GIB)


def run(hf=TINY, device=None, server=False, generation=None, **options):
    model = model_facts(hf, name="m", generation=generation)
    return resolve(Options.from_flat(options), model, device or cpu(), server=server)


@pytest.mark.parametrize("given", ["", [], [""]])
def test_an_empty_served_name_is_none(given):
    """As scripts pass it whose variable is not set: --served-model-name "$NAME"."""
    assert run(served_model_name=given).config.model.served_names == ("embedded",)


def test_no_value_is_left_open():
    config = run().config
    assert config.cache.block_size == 16
    assert config.scheduler.max_model_len == 512
    assert config.scheduler.steps_in_flight >= 1
    assert config.model.served_names == ("embedded",)
    assert config.cache.prefix_caching


@pytest.mark.parametrize(
    ("asked", "checkpoint", "device", "dtype"),
    [
        ("auto", "bfloat16", cpu(), "bfloat16"),
        ("auto", "float32", cpu(), "float32"),
        ("auto", "float16", cpu(), "bfloat16"),
        ("auto", None, cpu(), "float32"),
        ("auto", "float32", gpu(), "bfloat16"),
        ("half", "bfloat16", cpu(), "float16"),
        ("float", "bfloat16", cpu(), "float32"),
    ],
)
def test_dtypes(asked, checkpoint, device, dtype):
    resolved = run(TINY | {"torch_dtype": checkpoint}, device, dtype=asked)
    assert resolved.config.model.dtype == dtype
    assert any(why.field == "model.dtype" for why in resolved.decisions)


def test_a_cpu_takes_what_its_sequences_can_use_and_no_more():
    r = run()
    assert r.config.cache.num_blocks == 256 * 512 // 16
    r = run(HF, cpu(free=22), max_model_len=1024)
    assert r.config.cache.num_blocks == 4 * GIB // r.config.cache.block_bytes
    plan = run(HF, cpu(free=18), max_model_len=1024).plan
    left = 18 * GIB - plan.weight_bytes - plan.activation_bytes
    assert plan.num_blocks == left // plan.block_bytes


def test_a_cpu_without_options_serves_the_length_that_fits(caplog):
    r = run(HF, cpu(total=64, free=32))
    assert r.config.scheduler.max_model_len == 131072  # 7 GiB, of 16
    r = run(HF, cpu(free=20))
    assert 0 < r.config.scheduler.max_model_len < 131072
    assert r.plan.weight_bytes + r.plan.num_blocks * r.plan.block_bytes < 20 * GIB
    assert "does not fit" in caplog.text
    with pytest.raises(NoRoom):
        run(HF, cpu(free=20), max_model_len=131072)


def cures_of(error):
    """The options that a refusal offers, with their values."""
    words = str(error).split("What would fit: ")[1].split("; ")
    found = (one.split(" (")[0] for one in words)
    return dict(one.split("=") for one in found if "=" in one)


BIG = HF | {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
SLIDING = TINY | {"model_type": "mistral", "sliding_window": 8}
MIXED = TINY | {"model_type": "gemma3_text", "sliding_window": 8, "num_hidden_layers": 6}


@pytest.mark.parametrize("device", [cpu(23, 21), gpu(24)], ids=["cpu", "gpu"])
def test_weights_that_do_not_fit_are_refused_whatever_sizes_the_cache(device):
    for said in ({}, {"kv_cache_memory_bytes": "1GiB"}, {"num_gpu_blocks_override": 9},
                 {"cpu_kvcache_space": 1}, {"gpu_memory_utilization": 0.9}):  # fmt: skip
        with pytest.raises(NoRoom, match=r"for weights in bfloat16 .* a model with at most"):
            run(BIG, device, max_model_len=512, **said)


@pytest.mark.parametrize("device", [cpu(23, 21), gpu(24)], ids=["cpu", "gpu"])
def test_a_cache_beyond_the_free_memory_is_refused(device):
    with pytest.raises(NoRoom, match=r"needs 40\.00 GiB of KV") as e:
        run(HF, device, max_model_len=512, kv_cache_memory_bytes="40GiB")
    run(HF, device, max_model_len=512, **cures_of(e.value))
    with pytest.raises(NoRoom, match="leave num_gpu_blocks_override out"):
        run(HF, device, max_model_len=512, num_gpu_blocks_override=10**6)


def test_windows_on_every_layer_hold_any_length_in_few_blocks():
    one = run(SLIDING, max_num_batched_tokens=24, max_num_seqs=6, enable_prefix_caching=False)
    assert one.plan.max_fitting_len == 512
    for tokens in (18, 33):
        run(SLIDING | {"model_type": "gemma3_text"}, max_num_batched_tokens=tokens, max_num_seqs=1)


@settings(max_examples=tiers.amount(30, 20000), deadline=None)
@given(
    hf=st.sampled_from([TINY, SLIDING, MIXED, HF, HF | {"torch_dtype": "float32"}, BIG]),
    device=st.builds(
        lambda make, total, share: make(total, total * share // 8),
        st.sampled_from([cpu, gpu]), st.integers(1, 400), st.integers(1, 8),
    ),
    said=st.fixed_dictionaries({}, optional={
        "max_model_len": st.sampled_from([1, 17, 512]),
        "max_num_batched_tokens": st.integers(1, 64),
        "max_num_seqs": st.integers(1, 8),
        "kv_cache_memory_bytes": st.sampled_from(["16KiB", "1MiB", "9GiB"]),
        "cpu_kvcache_space": st.sampled_from([0.0001, 0.3, 7.5]),
        "gpu_memory_utilization": st.sampled_from([0.01, 0.3, 0.77, 1.0]),
        "gpu_memory": st.sampled_from(["1MiB", "1GiB", "17.2GiB", "40GiB"]),
        "dtype": st.just("float32"),
    }),
)  # fmt: skip
def test_refused_is_what_does_not_fit_and_what_is_offered_does(hf, device, said):
    try:
        resolved = run(hf, device, **said)
    except NoRoom as error:
        for name, value in cures_of(error).items():
            run(hf, device, **said | {name: value})
        return
    plan = resolved.plan
    length = resolved.config.scheduler.max_model_len
    assert blocks_per_sequence(plan.groups, plan.shape, length) <= plan.num_blocks
    used = plan.weight_bytes + plan.num_blocks * plan.block_bytes
    assert used <= device.free_bytes


@settings(max_examples=tiers.amount(100, 5000), deadline=None)
@given(
    hf=st.sampled_from([TINY, SLIDING, MIXED]),
    budget=st.integers(1, 64), length=st.integers(1, 512), blocks=st.integers(1, 200),
)  # fmt: skip
def test_the_cache_of_one_sequence_is_refused_one_block_below_what_it_holds(
    hf, budget, length, blocks
):
    said = {"max_num_batched_tokens": budget, "max_model_len": length}
    plan = run(hf, num_gpu_blocks_override=blocks, **said).plan
    held = blocks_per_sequence(plan.groups, plan.shape, length)
    size = {"kv_cache_memory_bytes": blocks * plan.block_bytes}
    if blocks >= held:
        run(hf, **said, **size)
    else:
        with pytest.raises(NoRoom, match="there is room for"):
            run(hf, **said, **size)


def test_memory_is_given_in_four_ways():
    block = run(HF, max_model_len=1024).config.cache.block_bytes
    by_blocks = run(HF, max_model_len=1024, num_gpu_blocks_override=100)
    assert by_blocks.config.cache.num_blocks == 100
    by_bytes = run(HF, max_model_len=1024, kv_cache_memory_bytes="1GiB")
    assert by_bytes.config.cache.num_blocks == GIB // block
    share = run(HF, max_model_len=1024, gpu_memory_utilization=0.9)
    amount = run(HF, max_model_len=1024, gpu_memory=int(24 * GIB * 0.9))
    assert share.config.cache.num_blocks == amount.config.cache.num_blocks
    plan = share.plan
    assert plan.kv_available_bytes == plan.allowed_bytes - plan.weight_bytes - plan.activation_bytes


def test_no_room_gives_the_numbers_and_what_would_fit():
    with pytest.raises(NoRoom) as e:
        run(HF, gpu())
    text = str(e.value)
    assert "needs 7.00 GiB" in text
    fits = int(text.split("max_model_len=")[2].split()[0])
    assert run(HF, gpu(), max_model_len=fits).config.scheduler.max_model_len == fits
    with pytest.raises(NoRoom):
        run(HF, gpu(), max_model_len=fits + fits // 50)  # shorter ones have shorter rotary tables
    share = float(text.split("gpu_memory_utilization=")[1].split(";")[0])
    run(HF, gpu(), gpu_memory_utilization=share)
    blocks = int(text.rpartition("=")[2])
    assert run(HF, gpu(), num_gpu_blocks_override=blocks).plan.max_fitting_len >= 131072


def test_auto_takes_the_longest_that_fits():
    assert run(HF, gpu(), max_model_len="auto").plan.max_fitting_len < 131072
    assert run(HF, gpu(80), max_model_len="auto").config.scheduler.max_model_len == 131072
    with pytest.raises(NoRoom):
        run(HF, gpu(8), max_model_len="auto")


def test_budgets_follow_device_and_use():
    def sizes(**more):
        s = run(HF, max_model_len=4096, **more).config.scheduler
        return s.max_num_batched_tokens, s.max_num_seqs

    assert sizes() == (4096, 256)
    assert sizes(server=True) == (2048, 128)
    assert sizes(device=gpu()) == (8192, 256)
    assert sizes(device=gpu(), server=True) == (2048, 256)
    assert sizes(device=gpu(80)) == (16384, 1024)
    assert sizes(device=gpu(80), server=True) == (8192, 1024)
    assert sizes(device=gpu(180), server=True) == (16384, 1024)
    assert sizes(enable_chunked_prefill=False, server=True) == (4096, 128)
    assert sizes(max_num_seqs=2, max_num_batched_tokens=7) == (7, 2)
    assert run(max_num_seqs=2).config.scheduler.max_num_batched_tokens == 2 * 512


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 513},
        {"max_model_len": 0},
        {"tensor_parallel_size": 2},
        {"kv_cache_dtype": "float32"},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 100},
        {"async_scheduling": False, "steps_in_flight": 2},
        {"preemption_mode": "swap", "swap_space": 0},
        {"kv_offloading_size": 1e-9},
    ],
)
def test_what_cannot_be_is_refused(options):
    with pytest.raises(ConfigError, match=f"(?s){next(iter(options))}|max_num_batched|swap_space"):
        run(**options)


def test_a_quantized_checkpoint_is_refused():
    with pytest.raises(ConfigError, match="method 'zip'"):
        run(TINY | {"quantization_config": {"quant_method": "zip"}})


def test_steps_in_flight():
    assert run().config.scheduler.steps_in_flight == 1
    assert run(async_scheduling=True).config.scheduler.steps_in_flight == 2
    assert run(device=gpu()).config.scheduler.steps_in_flight == 2
    assert run(steps_in_flight=3).config.scheduler.steps_in_flight == 3


def test_a_cap_on_long_prompts_has_a_length_from_which_they_are_long():
    assert run(max_long_partial_prefills=1).config.scheduler.long_prefill_token_threshold == 20
    given = run(max_long_partial_prefills=1, long_prefill_token_threshold=7).config.scheduler
    assert given.long_prefill_token_threshold == 7
    assert run(max_num_partial_prefills=2).config.scheduler.long_prefill_token_threshold == 0


def test_a_server_has_a_target_for_the_time_between_tokens():
    assert run().config.scheduler.inter_token_target_s == 0
    assert run(server=True).config.scheduler.inter_token_target_s == 0.04
    assert run(inter_token_target_ms=80).config.scheduler.inter_token_target_s == 0.08
    assert run(server=True, inter_token_target_ms=0).config.scheduler.inter_token_target_s == 0
    assert run(server=True, enable_chunked_prefill=False).config.scheduler.inter_token_target_s == 0
    with pytest.raises(ConfigError, match="inter_token_target_ms"):
        run(enable_chunked_prefill=False, inter_token_target_ms=80)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 0),
        ({"swap_space": 1}, 0),
        ({"kv_offloading_size": 0}, 0),
        ({"kv_offloading_size": 2}, 2),
        ({"kv_offloading_size": 2, "swap_space": 1}, 2),  # without effect, and logged
        ({"preemption_mode": "swap"}, 4),
        ({"preemption_mode": "swap", "swap_space": 1}, 1),
        ({"preemption_mode": "swap", "kv_offloading_size": 2}, 2),
        ({"preemption_mode": "swap", "kv_offloading_size": 2, "swap_space": 2}, 2),
    ],
)
def test_the_host_tier_has_the_size_that_was_asked_for(options, size):
    cache = run(**options).config.cache
    assert cache.num_host_blocks == size * GIB // cache.block_bytes


def test_the_host_tier_s_size_is_that_of_all_ranks():
    two = run(device=replace(cpu(), count=2), tensor_parallel_size=2, kv_offloading_size=1)
    assert two.config.cache.num_host_blocks * 2 * two.config.cache.block_bytes == GIB


def test_two_sizes_of_the_host_tier_are_refused():
    with pytest.raises(ConfigError, match=r"(?s)kv_offloading_size.*swap_space.*give one"):
        run(preemption_mode="swap", kv_offloading_size=2, swap_space=1)


@pytest.mark.parametrize(
    ("options", "knob"),
    [
        ({"kv_offloading_size": 1}, "kv_offloading_size"),
        ({"preemption_mode": "swap"}, "swap_space"),
    ],
)
def test_a_host_tier_without_prefix_caching_is_refused(options, knob):
    with pytest.raises(ConfigError, match=f"(?s){knob}.*enable_prefix_caching"):
        run(enable_prefix_caching=False, **options)
    assert run(enable_prefix_caching=False).config.cache.num_host_blocks == 0


@pytest.mark.parametrize(
    ("device", "options", "need", "fits"),
    [
        (replace(gpu(), host_free_bytes=3 * GIB), {"kv_offloading_size": 4}, "4.00 GiB", 3),
        (replace(gpu(), host_free_bytes=3 * GIB), {"preemption_mode": "swap"}, "4.00 GiB", 3),
        (cpu(), {"kv_offloading_size": 20}, "20.00 GiB", 19),
        (
            replace(cpu(free=10), count=2),
            {"kv_offloading_size": 25, "tensor_parallel_size": 2},
            "25.00 GiB",
            19,
        ),
    ],
)
def test_a_host_tier_beyond_free_memory_is_refused_with_what_fits(device, options, need, fits):
    with pytest.raises(NoRoom, match=f"needs {need} of host memory for KV.* are free") as caught:
        run(device=device, kv_cache_memory_bytes=1 << 26, **options)
    option, size = re.search(r"What would fit: (\w+)=([\d.]+)", str(caught.value)).groups()
    assert fits <= float(size) <= 20
    offered = options | {option: float(size)}
    assert run(device=device, kv_cache_memory_bytes=1 << 26, **offered).config.cache.num_host_blocks


def test_a_host_whose_memory_is_unknown_refuses_no_host_tier():
    assert run(device=gpu(), kv_offloading_size=400).config.cache.num_host_blocks


def test_window_layers_are_grouped_or_not():
    hf = TINY | {"model_type": "gemma2", "sliding_window": 64}
    assert len(run(hf).config.cache.groups) == 2
    assert len(run(hf, disable_hybrid_kv_cache_manager=True).config.cache.groups) == 1
    off = run(hf, disable_sliding_window=True).config
    assert off.scheduler.max_model_len == 64
    assert all(layer.window is None for layer in off.cache.layers)


def test_sampling_defaults_come_from_the_generation_config():
    generation = {"temperature": 0.6, "max_new_tokens": 9, "bos_token_id": 1, "top_k": None}
    sampling = run(generation=generation).config.sampling
    assert sampling.defaults == {"temperature": 0.6, "max_tokens": 9}


def test_an_override_of_the_generation_config_without_effect_is_logged(caplog):
    run(override_generation_config={"temperature": 0.5, "eos_token_id": 3})
    assert not caplog.records
    run(override_generation_config={"temprature": 0.5})
    assert "'temprature' has no effect" in caplog.text


def test_every_choice_can_be_explained():
    reasons = {one.field: (one.value, one.reason) for one in run().decisions}
    assert "cache.num_blocks" in reasons
    dtype, reason = reasons["model.dtype"]
    assert dtype == "bfloat16"
    assert reason.startswith("the checkpoint's")


def test_beside_others_a_gpu_engine_takes_what_is_free(caplog):
    busy = gpu(total=80, free=30)
    plan = run(HF, busy, max_model_len=4096).plan
    assert plan.allowed_bytes == 30 * GIB - SHARED_GPU_RESERVE
    assert "other processes use 50.00 GiB" in caplog.text
    with pytest.raises(NoRoom, match="there is room for"):
        run(HF, gpu(total=80, free=12), max_model_len=4096)


def test_an_absolute_budget_holds_whatever_the_device_has():
    plan = run(HF, gpu(total=140), gpu_memory="60GiB").plan
    assert plan.allowed_bytes == 60 * GIB
    assert plan.kv_available_bytes == (
        60 * GIB - plan.weight_bytes - plan.activation_bytes - plan.overhead_bytes
    )
    assert plan.overhead_bytes > 0


def test_keys_and_values_in_eight_bits_take_half_the_room():
    half = run(HF, gpu(total=80), kv_cache_dtype="fp8").config.cache
    whole = run(HF, gpu(total=80)).config.cache
    assert half.dtype == "float8_e4m3fn"
    assert half.block_bytes * 2 == whole.block_bytes
    assert run(HF, kv_cache_dtype="fp8").config.cache.dtype == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "float8_e4m3fn"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "float8_e5m2"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "fp8_per_token_head"),
        ({"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, "fp8_per_token_head"),
        ({"calculate_kv_scales": True}, "bfloat16"),
    ],
)
def test_formats_of_the_cache(given, want):
    resolved = run(**given)
    assert resolved.config.cache.dtype == resolved.plan.shape.cache_dtype == want
    per_block = 2 * 2 * 4 * KV_FORMATS[want].head_bytes(16, 16)  # layers, planes, heads
    assert resolved.config.cache.block_bytes == per_block
    assert resolved.plan.token_bytes == per_block // 16


@pytest.mark.parametrize(
    ("stored", "given", "want"),
    [
        ("int8", {}, "int8"),
        ("float8_e4m3fn", {}, "float8_e4m3fn"),
        ("float8_e4m3fn", {"kv_cache_dtype": "bfloat16"}, "bfloat16"),
        ("int8", {"kv_cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
    ],
)
def test_a_checkpoint_states_the_format_of_the_cache(stored, given, want):
    facts = QuantFacts(quant_method="fp8", default=None, kv_cache=stored)
    model = replace(model_facts(TINY, name="m"), quantization=facts)
    assert resolve(Options.from_flat(given), model, cpu()).config.cache.dtype == want


def test_formats_that_a_model_or_a_device_lacks_are_refused():
    latent = replace(model_facts(TINY, name="m"), layers=(LayerFacts(1, 576, latent=512),))
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8': qwen2 caches latents"):
        resolve(Options.from_flat({"kv_cache_dtype": "fp8"}), latent, cpu())
    stated = replace(
        latent, quantization=QuantFacts(quant_method="fp8", default=None, kv_cache="int8")
    )
    assert resolve(Options.from_flat({}), stated, cpu()).config.cache.dtype == "bfloat16"
    old = replace(gpu(), capability=(8, 0))
    with pytest.raises(ConfigError, match=r"compute capability 8\.0, .* use int8_per_token_head"):
        run(TINY, old, kv_cache_dtype="fp8_per_token_head")
    stated = replace(stated.quantization, kv_cache="float8_e4m3fn")
    stated = replace(model_facts(TINY, name="m"), quantization=stated)
    assert resolve(Options.from_flat({}), stated, old).config.cache.dtype == "bfloat16"
    assert run(TINY, old, kv_cache_dtype="int8_per_token_head")
    with pytest.raises(ConfigError, match="calculate_kv_scales is for"):
        run(kv_cache_dtype="fp8_e5m2", calculate_kv_scales=True)


def test_weights_in_eight_bits_leave_more_room():
    small = run(HF, gpu(total=80), quantization="fp8")
    whole = run(HF, gpu(total=80))
    assert small.config.model.quantization == "fp8"
    assert whole.config.model.quantization is None
    assert whole.config.model.weight_bits == 16
    assert 8 < small.config.model.weight_bits < 12
    assert small.plan.weight_bytes < 0.62 * whole.plan.weight_bytes
    assert small.plan.num_blocks > whole.plan.num_blocks


def test_what_was_measured_replaces_what_was_planned():
    plan = run(HF, gpu(total=80)).plan
    changes = {"weights": 10 * GIB, "activations": 3 * GIB, "overhead": GIB}
    fitted = apply_measurements(plan, **changes, num_blocks=None)
    assert fitted.kv_available_bytes == plan.allowed_bytes - 14 * GIB
    assert fitted.num_blocks == fitted.kv_available_bytes // plan.block_bytes
    assert apply_measurements(plan, **changes, num_blocks=77).num_blocks == 77


def test_ranks_on_gpus_need_as_many():
    with pytest.raises(ConfigError, match=r"needs 2 devices; this engine can use 1 \(CUDA_VISIBLE"):
        run(device=gpu(), tensor_parallel_size=2)
    found = run(device=replace(gpu(), count=2), tensor_parallel_size=2).config
    assert (found.parallel.tensor, found.parallel.backend) == (2, "mp")


def test_stages_on_gpus_have_a_step_each_in_flight_and_one_that_waits():
    two = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    found = run(device=replace(gpu(), count=4), **two).config
    assert found.parallel.ranks == 4
    assert found.scheduler.steps_in_flight == 3
    one = run(device=gpu()).config.scheduler
    assert found.scheduler.max_num_batched_tokens == 4096 < one.max_num_batched_tokens


def test_how_ranks_run_follows_their_number_unless_it_is_given():
    two = {"device": replace(cpu(), count=2), "tensor_parallel_size": 2}

    def backend(given=None, **more):
        return run(distributed_executor_backend=given, **more).config.parallel.backend

    assert (backend(), backend(**two)) == ("uni", "mp")
    assert (backend("mp"), backend("mp", **two), backend("uni")) == ("uni", "mp", "uni")
    more = {"device": replace(cpu(), count=2), "tensor_parallel_size": 4}
    assert backend("ray", **more) == "mp", "on nodes that Ray will find"
    launched = "external_launcher"
    assert (backend(launched), backend(launched, **two)) == (launched, launched)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "one rank.*use 'mp'"),
        ({"distributed_executor_backend": "external_launcher", "server": True}, "torchrun.*'mp'"),
    ],
)
def test_ways_to_run_ranks_that_do_not_work_are_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        run(device=replace(cpu(), count=2), **given)


BERT = {
    "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 64, "vocab_size": 100,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 5000,
}  # fmt: skip


def test_an_encoder_has_no_kv_and_reads_whole_prompts(caplog):
    r = run(BERT, server=True)
    assert not r.config.generates
    assert (r.config.cache.num_blocks, r.config.cache.groups, r.config.cache.layers) == (0, (), ())
    assert not r.config.cache.prefix_caching
    assert not r.config.scheduler.chunked_prefill
    assert r.config.scheduler.max_model_len == 5000
    assert r.config.scheduler.max_num_batched_tokens == 5000
    assert r.config.scheduler.inter_token_target_s == 0
    assert r.config.scheduler.max_num_queued_reqs == 16 * 4096
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be >= max_model_len"):
        run(BERT, max_num_batched_tokens=4999)
    with pytest.raises(ConfigError, match="has no KV to keep in host memory"):
        run(BERT, kv_offloading_size=1)
    with caplog.at_level("INFO"):
        run(BERT, enable_prefix_caching=True, enable_chunked_prefill=True, block_size=32)
    for name in ("enable_prefix_caching", "enable_chunked_prefill=True", "block_size=32"):
        assert f"{name} has no effect: the model has no KV" in caplog.text


def test_the_prefix_cache_is_for_results_that_can_read_it(caplog):
    assert run(runner="pooling").config.cache.prefix_caching
    mean = {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}}
    with caplog.at_level("INFO"):
        assert not run(**mean, enable_prefix_caching=True).config.cache.prefix_caching
    assert "enable_prefix_caching has no effect: the results need" in caplog.text
    assert run(pooler_config={"pooling_type": "MEAN"}).config.cache.prefix_caching  # it generates


def test_inputs_are_as_long_as_sentence_transformers_cuts_them_unless_a_length_is_set():
    model = model_facts(BERT, name="m")
    files = FolderModules(methods=("cls",), max_seq_length=128)
    model = replace(model, pooling=replace(model.pooling, modules=files))

    def length(**options):
        found = resolve(Options.from_flat(options), model, cpu())
        return found.config.scheduler.max_model_len

    assert length() == 128
    assert length(max_model_len=512) == 512
    with pytest.raises(ConfigError, match="exceeds the limit"):
        length(max_model_len=5001)


def test_what_has_no_meaning_without_logits_or_windows():
    with pytest.raises(ConfigError, match="logits_processors: this model pools"):
        run(BERT, logits_processors=["a:B"])
    with pytest.raises(ConfigError, match="disable_sliding_window is not supported for encoders"):
        run(BERT, disable_sliding_window=True)
