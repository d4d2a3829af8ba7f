"""LoRA adapters through LLM: tokens and logprobs are those of peft on transformers."""

import asyncio
import json
import random
import shutil

import pytest
import torch

from quire import LLM, AsyncLLM, RequestError, SamplingParams, Unsupported
from quire.config.options import Options
from quire.core.params import BeamSearchParams, LoRARequest
from quire.errors import ConfigError
from tests import tiers
from tests.cpu.lora_folders import Peft, base_model, write_adapter
from tests.cpu.same_bits import needs_same_bits

RANKS = [4, 1, 8, 33]
COUNT = 6
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
PROMPTS = [[7 + (i * k) % 90 for k in range(n)] for i, n in enumerate((3, 41, 18, 70, 25, 9))]
SETTINGS = {
    "dtype": "float32", "enable_lora": True, "max_loras": 4, "max_lora_rank": 33,
    "num_gpu_blocks_override": 256, "use_tqdm_on_load": False, "max_num_seqs": 8,
}  # fmt: skip
TYPES = ["llama", *tiers.long("qwen3", "qwen2")]


class Case:
    """A model, its adapters, and what peft says."""

    def __init__(self, root, model_type):
        self.base = base_model(root, model_type)
        self.folders = [
            write_adapter(self.base, root / "q", 0, ["q_proj"], 4),
            write_adapter(self.base, root / "one", 1, r=1),
            write_adapter(self.base, root / "rs", 2, r=8, use_rslora=True),
            write_adapter(self.base, root / "mlp", 3, ["up_proj", "down_proj", "v_proj"], 33),
        ]
        self.requests = [
            LoRARequest(one.name, i + 1, str(one)) for i, one in enumerate(self.folders)
        ]
        self.peft = Peft(self.base)
        self._known = {}

    def llm(self, **settings):
        return LLM(str(self.base), **SETTINGS | settings)

    def want(self, prompt, request):
        key = tuple(prompt), request and request.lora_path
        if key not in self._known:
            self._known[key] = self.peft.greedy(prompt, COUNT, key[1])
        return self._known[key]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = {}

    def case(model_type):
        if model_type not in made:
            made[model_type] = Case(tmp_path_factory.mktemp(model_type), model_type)
        return made[model_type]

    return case


@pytest.fixture(scope="module")
def llama(cases):
    return cases("llama")


@pytest.fixture(scope="module")
def llm(llama):
    return llama.llm()


def run(llm, prompts, requests, params=GREEDY):
    given = [{"prompt_token_ids": one} for one in prompts]
    outputs = llm.generate(given, params, lora_request=requests, use_tqdm=False)
    engine = llm.llm_engine
    assert not engine.engine.stats().held_blocks
    engine.engine.check()
    engine.built.adapters.check()
    assert not engine.built.adapters._holds
    return outputs


def check(case, outputs, requests):
    for output, request in zip(outputs, requests, strict=True):
        tokens, logprobs = case.want(output.prompt_token_ids, request)
        answer = output.outputs[0]
        assert list(answer.token_ids) == tokens, request
        found = [one[token].logprob for one, token in zip(answer.logprobs, tokens)]
        torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-5)
        assert output.lora_request is request
        assert answer.lora_request is request


def mixed(case):
    return [None, *case.requests, None][: len(PROMPTS)]


def test_adapters_change_what_peft_says(llama):
    bases = [llama.want(PROMPTS[1], None)] + [llama.want(PROMPTS[1], r) for r in llama.requests]
    assert len({str(one) for one in bases}) == len(bases)


@pytest.mark.slow("peft and engines of several models")
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 9},
        {"max_loras": 1},
        {"block_size": 2, "num_gpu_blocks_override": 88, "enable_prefix_caching": False},
        *tiers.long(
            {"block_size": 2, "num_gpu_blocks_override": 88, "kv_offloading_size": 0.01},
            {"max_loras": 2, "max_cpu_loras": 2, "steps_in_flight": 2},
            {"enforce_eager": True, "max_num_seqs": 2},
            {"block_size": 1},
        ),
    ],
    ids=str,
)
def test_a_mixed_batch_is_as_peft_computes_each_alone(model_type, settings, cases):
    case = cases(model_type)
    llm = case.llm(**settings)
    requests = mixed(case)
    check(case, run(llm, PROMPTS, requests), requests)
    if "num_gpu_blocks_override" in settings:
        assert llm.llm_engine.engine.stats().preemptions


def test_each_alone_and_again_from_the_prefix_cache(llama, llm):
    for prompt in PROMPTS[1:4:2]:
        for request in (*llama.requests, None):
            for again in (False, True):
                (output,) = run(llm, [prompt], request)
                check(llama, [output], [request])
                assert (output.num_cached_tokens > 0) == again or request is None or again


@needs_same_bits
def test_base_rows_keep_their_bits_beside_adapters(llama, llm):
    plain = LLM(str(llama.base), **SETTINGS | {"enable_lora": False})
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
    others = [llama.requests[i % 4] for i in range(3)]
    prompts = [PROMPTS[3], PROMPTS[1], *PROMPTS[:3]]
    beside = run(llm, prompts, [None, None, *others], params)[:2]
    llm.llm_engine.reset_prefix_cache()
    alone = run(llm, prompts[:2], None, params)
    given = [{"prompt_token_ids": one} for one in prompts[:2]]
    without = plain.generate(given, params, use_tqdm=False)
    for found in (beside, alone):
        assert [one.outputs[0].logprobs for one in found] == [
            one.outputs[0].logprobs for one in without
        ]


@needs_same_bits
def test_an_adapter_row_does_not_depend_on_its_neighbours(llama, llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    together = run(llm, PROMPTS, mixed(llama), params)
    for prompt, request, output in zip(PROMPTS, mixed(llama), together):
        llm.llm_engine.reset_prefix_cache()
        (alone,) = run(llm, [prompt], request, params)
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def test_several_answers_prompt_logprobs_and_constraints(llama, llm):
    request = llama.requests[1]
    params = SamplingParams(n=3, seed=1, max_tokens=5, temperature=1.0, prompt_logprobs=0)
    (output,) = run(llm, [PROMPTS[1]], request, params)
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1
    want = llama.peft.logprobs(PROMPTS[1], request.lora_path)
    for i, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry[PROMPTS[1][i + 1]].logprob == pytest.approx(
            float(want[i, PROMPTS[1][i + 1]]), abs=1e-5
        )
    base = run(llm, [PROMPTS[1]], None, params)[0]
    assert [o.token_ids for o in base.outputs] != [o.token_ids for o in output.outputs]


def test_beam_search(llama, llm):
    params = BeamSearchParams(3, 4, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPTS[1]}
    adapted, base = (llm.beam_search([prompt], params, one) for one in (llama.requests[2], None))
    best = adapted[0].sequences[0]
    assert best.lora_request is llama.requests[2]
    assert best.tokens != base[0].sequences[0].tokens
    rows = llama.peft.logprobs(best.tokens, llama.requests[2].lora_path)
    start = len(PROMPTS[1])
    total = sum(float(rows[i - 1, best.tokens[i]]) for i in range(start, len(best.tokens)))
    assert best.cum_logprob == pytest.approx(total, abs=1e-4)


def test_chat_takes_adapters(llama, llm):
    messages = [{"role": "user", "content": "Hello"}]
    adapted, base = (
        llm.chat(messages, GREEDY, use_tqdm=False, lora_request=one)[0]
        for one in (llama.requests[1], None)
    )
    check(llama, [adapted], [llama.requests[1]])
    assert adapted.outputs[0].token_ids != base.outputs[0].token_ids


def test_embeddings_are_of_the_adapted_model(llama):
    llm = LLM(
        str(llama.base), runner="pooling", convert="embed", pooler_config={"normalize": False},
        **SETTINGS,
    )  # fmt: skip
    requests = [llama.requests[1], None, llama.requests[3]]
    prompt = {"prompt_token_ids": PROMPTS[2]}
    outputs = llm.embed([prompt] * 3, lora_request=requests, use_tqdm=False)
    for output, request in zip(outputs, requests):
        model = llama.peft.model(request and request.lora_path)
        inner = model.get_base_model().model if request else model.model
        with torch.inference_mode():
            hidden = inner(torch.tensor([PROMPTS[2]])).last_hidden_state[0, -1]
        want = torch.nn.functional.normalize(hidden, dim=0)
        found = torch.nn.functional.normalize(torch.tensor(output.outputs.embedding), dim=0)
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


# -- names and lives ------------------------------------------------------------------------------


def test_a_name_a_number_and_a_folder_stay_together(llama):
    llm = llama.llm(max_loras=1)
    a, b = llama.requests[:2]
    prompt = {"prompt_token_ids": PROMPTS[0]}
    for wrong, message in [
        (LoRARequest(a.lora_name, 9, a.lora_path), "is loaded with lora_int_id 1, got 9"),
        (LoRARequest(a.lora_name, 1, b.lora_path), "is loaded from .*got.*load_inplace"),
        (LoRARequest("other", 1, a.lora_path), "lora_int_id 1 is 'q', got the name 'other'"),
    ]:
        llm.generate(prompt, GREEDY, lora_request=a, use_tqdm=False)
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, GREEDY, lora_request=wrong, use_tqdm=False)
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate(prompt, GREEDY, lora_request=[a, b], use_tqdm=False)
    with pytest.raises(RequestError, match="must be a LoRARequest, got str"):
        llm.generate(prompt, GREEDY, lora_request="q", use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_adapters_are_added_listed_and_removed(llama):
    engine = llama.llm().llm_engine
    a, b = llama.requests[:2]
    assert engine.add_lora(a)
    assert not engine.add_lora(a)
    assert engine.add_lora(b)
    assert engine.list_loras() == {1, 2}
    assert engine.pin_lora(2)
    with pytest.raises(RequestError, match="number of a loaded adapter, got 3"):
        engine.pin_lora(3)
    assert engine.remove_lora(1)
    assert not engine.remove_lora(1)
    assert engine.list_loras() == {2}


def test_differences_from_training_are_logged(llama, tmp_path, caplog):
    folder = tmp_path / "moved"
    shutil.copytree(llama.requests[0].lora_path, folder)
    config = folder / "adapter_config.json"
    changed = json.loads(config.read_text()) | {"base_model_name_or_path": "org/other"}
    config.write_text(json.dumps(changed))
    (folder / "added_tokens.json").write_text("{}")
    with caplog.at_level("WARNING", logger="quire"):
        llama.llm().llm_engine.add_lora(LoRARequest("moved", 1, str(folder)))
        text = caplog.text
        assert "adapter 'moved': its config names the model 'org/other', and this one is" in text
        assert "its added_tokens.json has no effect" in text
        caplog.clear()
        llama.llm().llm_engine.add_lora(llama.requests[0])
        assert "adapter" not in caplog.text


def test_a_folder_in_place_is_a_new_generation(llama, tmp_path):
    llm = llama.llm()
    folder = tmp_path / "live"
    first, second = llama.requests[1], llama.requests[2]
    shutil.copytree(first.lora_path, folder)
    live = LoRARequest("live", 1, str(folder))
    (before,) = run(llm, [PROMPTS[1]], live)
    running = llm.enqueue([{"prompt_token_ids": PROMPTS[1]}], GREEDY, lora_request=live)
    llm.llm_engine.step()
    shutil.copytree(second.lora_path, folder, dirs_exist_ok=True)
    again = LoRARequest("live", 1, str(folder), load_inplace=True)
    (after,) = llm.generate(
        [{"prompt_token_ids": PROMPTS[1]}], GREEDY, lora_request=again, use_tqdm=False
    )
    (old,) = llm.wait_for_completion(use_tqdm=False)
    assert old.request_id == running[0]
    for output, request in ((before, first), (old, first), (after, second)):
        assert list(output.outputs[0].token_ids) == llama.want(PROMPTS[1], request)[0]
    assert after.num_cached_tokens == 0


def test_dropped_adapters_are_read_again_while_others_run(llama):
    llm = llama.llm(max_loras=1, max_cpu_loras=1)
    for requests in (
        [*llama.requests[:3], None],
        [None, *llama.requests[1::-1], llama.requests[3]],
    ):
        check(llama, run(llm, PROMPTS[: len(requests)], requests), requests)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_lora_rank": 7}, "rank 8.*maximum is 7"),
        ({"lora_target_modules": ["q_proj"]}, "lora_target_modules"),
    ],
)
def test_what_the_engine_was_not_started_for_is_refused(llama, settings, message):
    llm = llama.llm(**settings)
    with pytest.raises(RequestError, match=message):
        llm.generate("a", GREEDY, lora_request=llama.requests[2], use_tqdm=False)
    (output,) = run(llm, [PROMPTS[0]], llama.requests[0])
    check(llama, [output], [llama.requests[0]])


def test_weights_without_memory_are_refused_with_the_bytes(llama, llm, tmp_path):
    folder = write_adapter(llama.base, tmp_path / "a", 0, ["q_proj"], modules_to_save=["lm_head"])
    vocab = llm.llm_engine.config.model.vocab
    message = (
        f"replaces {vocab} rows of lm_head, and each slot has memory for 0: 4 slots need "
        f"lora_modules_to_save_memory={vocab * 64 * 4 * 4}$"
    )
    with pytest.raises(RequestError, match=message):
        llm.generate("a", GREEDY, lora_request=LoRARequest("bad", 77, str(folder)))
    assert 77 not in llm.llm_engine.list_loras()


def test_engines_without_adapters_refuse_them(llama):
    plain = LLM(str(llama.base), **SETTINGS | {"enable_lora": False})
    with pytest.raises(Unsupported, match="enable_lora=True"):
        plain.generate("a", GREEDY, lora_request=llama.requests[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras=3 is less than max_loras=4"),
        ({"lora_dtype": "bfloat16"}, "lora_dtype='bfloat16' is not the model's dtype"),
    ],
)
def test_options_that_contradict_are_refused(llama, given, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(llama.base), **SETTINGS | given)


def test_the_memory_plan_counts_the_slots(llama, llm):
    plan, model = llm.llm_engine.built.memory_plan, llm.llm_engine.engine.executor.runner.model
    real = 4 * (model.adapter_banks.numel + 4 * model.adapter_banks.scales)
    assert plan.adapter_bytes == real
    assert plan.weight_bytes > real


def test_options_are_parsed():
    assert Options.from_flat({"enable_lora": True, "lora_target_modules": ["q_proj"]}).lora


@pytest.mark.slow("two more adapters by peft")
@pytest.mark.parametrize("model_type", ["qwen2", *tiers.long("llama")])
def test_magnitudes_and_biases(cases, tmp_path, model_type):
    case = cases(model_type)
    kinds = [{"use_dora": True}, {"lora_bias": True}, {"use_dora": True, "targets": ["v_proj"]}]
    folders = [
        write_adapter(case.base, tmp_path / f"k{i}", i, **kind) for i, kind in enumerate(kinds)
    ]
    dora, biased, narrow = (LoRARequest(one.name, i + 1, str(one)) for i, one in enumerate(folders))
    llm = case.llm(max_loras=2)
    plain = LoRARequest("plain", 9, case.requests[1].lora_path)
    for requests in ([dora, None, biased, narrow, plain], [plain, biased, None, plain, dora]):
        check(case, run(llm, PROMPTS[:5], requests), requests)


# -- ranks and quantized weights -------------------------------------------------------------------


@pytest.mark.slow("peft, and three runs on two ranks")
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("model_type", ["qwen2", *tiers.long("llama")])
def test_two_ranks(cases, tmp_path, model_type):
    """Of magnitudes: norms of layers cut by outputs and by inputs, with biases of the model."""
    case = cases(model_type)
    kinds = [{"use_dora": True}, {"lora_bias": True}, {"use_dora": True, "targets": ["down_proj"]}]
    folders = [
        write_adapter(case.base, tmp_path / f"k{i}", i, **kind) for i, kind in enumerate(kinds)
    ]
    scaled = [LoRARequest(one.name, 9 - i, str(one)) for i, one in enumerate(folders)]
    llm = case.llm(tensor_parallel_size=2, max_loras=2)
    given = [{"prompt_token_ids": one} for one in PROMPTS]
    try:
        for requests in (mixed(case), [*scaled, None, case.requests[1], scaled[0]], mixed(case)):
            outputs = llm.generate(given, GREEDY, lora_request=requests, use_tqdm=False)
            check(case, outputs, requests)
    finally:
        llm.llm_engine.engine.shutdown()


def dequantized(model):
    """HF name -> the weight that each linear layer multiplies by."""
    found = {}
    for name, module in model.named_modules():
        if not name.startswith("layers.") or not hasattr(module, "rank_rows"):
            continue
        parts = module.weight.dequantize().float().split([out.rows for out in module.outputs])
        for path, part in zip(model.weights.checkpoint_paths(name), parts, strict=True):
            found[f"model.{path}.weight"] = part.clone()
    return found


@pytest.mark.parametrize(
    "quantization", ["int4", *tiers.long("int8_per_channel_weight_only", "nf4", "mxfp4")]
)
def test_quantized_layers_get_the_same_deltas(llama, quantization):
    llm = llama.llm(quantization=quantization)
    (weights,) = llm.apply_model(dequantized)
    peft = Peft(llama.base)
    for request in (None, llama.requests[1], llama.requests[3]):
        model = peft.model(request and request.lora_path)
        inner = model if request is None else model.get_base_model()
        names = {n.replace(".base_layer", ""): p for n, p in inner.named_parameters()}
        for name, weight in weights.items():
            names[name].data.copy_(weight)
        (output,) = run(llm, [PROMPTS[1]], request)
        tokens, logprobs = peft.greedy(PROMPTS[1], COUNT, request and request.lora_path)
        assert list(output.outputs[0].token_ids) == tokens
        found = [one[token].logprob for one, token in zip(output.outputs[0].logprobs, tokens)]
        torch.testing.assert_close(found, logprobs, rtol=0, atol=2e-4)


@pytest.mark.usefixtures("forked")
def test_async_llm_takes_adapters(llama):
    async def body():
        engine = AsyncLLM.from_engine_args({"model": str(llama.base)} | SETTINGS)

        async def answer(request):
            async for output in engine.generate(
                {"prompt_token_ids": PROMPTS[1]}, GREEDY, lora_request=request
            ):
                last = output
            return last

        try:
            assert await engine.add_lora(llama.requests[0])
            requests = [llama.requests[1], None, llama.requests[1], llama.requests[0]]
            outputs = await asyncio.gather(*map(answer, requests))
            for output, request in zip(outputs, requests):
                assert list(output.outputs[0].token_ids) == llama.want(PROMPTS[1], request)[0]
                assert output.lora_request is request
            assert await engine.list_loras() == {1, 2}
            assert await engine.pin_lora(2)
            with pytest.raises(RequestError, match="number of a loaded adapter, got 3"):
                await engine.pin_lora(3)
            assert await engine.remove_lora(1)
            with pytest.raises(RequestError, match="got the name 'other'"):
                await answer(LoRARequest("other", 2, llama.requests[0].lora_path))
            with pytest.raises(RequestError, match="there is no adapter"):
                await answer(LoRARequest("none", 9, "/none"))
            assert await engine.list_loras() == {2}
        finally:
            engine.shutdown()

    asyncio.run(body())


@pytest.mark.slow("many rounds of short answers")
@pytest.mark.parametrize("seed", range(tiers.amount(1, 12)))
def test_random_loads_unloads_and_requests(llama, seed):
    """Each answer is that of the generation with which its request began."""
    draw = random.Random(seed)
    llm = llama.llm(
        max_loras=draw.choice([1, 2]),
        max_cpu_loras=draw.choice([2, 3]),
        steps_in_flight=draw.choice([1, 2]),
        max_num_seqs=4,
    )
    engine = llm.llm_engine
    loaded = dict.fromkeys("wxyz")  # name -> which of the adapters it means
    wanted = {}
    for _ in range(tiers.amount(40, 200)):
        name = draw.choice("wxyz")
        if loaded[name] is None or draw.random() < 0.2:
            loaded[name] = draw.randrange(len(llama.folders))
            place = str(llama.folders[loaded[name]])
            engine.add_lora(LoRARequest(name, ord(name), place, load_inplace=True))
        of = None if draw.random() < 0.2 else llama.requests[loaded[name]]
        given = None if of is None else LoRARequest(name, ord(name), of.lora_path)
        prompt = draw.choice(PROMPTS[:3])
        (request_id,) = llm.enqueue(
            {"prompt_token_ids": prompt}, GREEDY, lora_request=given, use_tqdm=False
        )
        wanted[request_id] = llama.want(prompt, of)[0]
        if draw.random() < 0.1:
            llm._queue.abort([request_id])
        for _ in range(draw.randrange(4)):
            for output in engine.step():
                llm._queue._done[output.request_id] = output
        if draw.random() < 0.1:
            engine.remove_lora(ord(name))
            loaded[name] = None
        engine.built.adapters.check()
        engine.engine.check()
    for output in llm.wait_for_completion(use_tqdm=False):
        assert list(output.outputs[0].token_ids) == wanted[output.request_id]
    assert not engine.built.adapters._holds
    assert not engine.engine.stats().held_blocks
