"""Data-parallel ranks that share experts: the tokens of one rank, wherever requests run."""

import random
from dataclasses import replace

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.core.params import StructuredOutputsParams
from quire.errors import ConfigError
from quire.runner.model_input import ModelInputBuilder
from quire.runner.slots import BlockTableUpdate
from tests import tiers
from tests.cpu.models.fallback.tiny_models import tiny_model
from tests.cpu.models.peers import peer
from tests.cpu.tiny_models import write_ascii_tokenizer, write_model

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

SIZES = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 60, "device": "cpu"}
CHUNKS = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True}
KINDS = {
    "greedy": {"temperature": 0},
    "seeds": {"temperature": 0.9, "seed": 7, "n": 3, "top_p": 0.8},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "logit_bias": {70: 2.0}},
    "one of many": {"temperature": 0, "prompts": slice(2, 3)},
}


def make(name, folder):
    vocab = peer(name, folder).config.get_text_config().vocab_size
    write_ascii_tokenizer(folder, vocab)
    return str(folder)


def prompts(vocab=90):
    rng = random.Random(3)
    made = [[rng.randrange(3, vocab) for _ in range(n)] for n in (5, 60, 1, 33, 17, 90)]
    return [*made, [*made[1], 7], made[5]]


def ids(llm, **params):
    chosen = prompts()[params.pop("prompts", slice(None))]
    params = SamplingParams(**({"max_tokens": 16, "ignore_eos": True} | params))
    outputs = llm.generate([{"prompt_token_ids": one} for one in chosen], params, use_tqdm=False)
    return [list(each.token_ids) for output in outputs for each in output.outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("qwen3_moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def one(folder):
    return LLM(folder, **SIZES, **CHUNKS)


@pytest.fixture(scope="module")
def two(folder):
    llm = LLM(folder, **SIZES, **CHUNKS, **SHARED)
    yield llm
    llm.llm_engine.engine.shutdown()


@pytest.fixture
def rows(two, monkeypatch):
    """Rows of each data-parallel rank in each step."""
    scheduler, found = two.llm_engine.engine._scheduler, []
    plan = scheduler.plan

    def watched():
        made = plan()
        found.append([len(own.rows) for own in made.dp_plans])
        return made

    monkeypatch.setattr(scheduler, "plan", watched)
    return found


def test_drafts_of_predictions_change_no_token(one, two):
    kinds = {"temperature": 0.9, "seed": 7}, {"temperature": 0, "repetition_penalty": 1.5}
    common = {"max_tokens": 16, "ignore_eos": True}
    given = [{"prompt_token_ids": tokens} for tokens in prompts()]
    params = [SamplingParams(**common, **kinds[i % 2]) for i in range(len(given))]
    want = [list(out.outputs[0].token_ids) for out in one.generate(given, params, use_tqdm=False)]
    predicted = [
        replace(params, prediction=[*tokens[:9], 3, *tokens[10:]])
        for params, tokens in zip(params, want)
    ]
    found = two.generate(given, predicted, use_tqdm=False)
    assert [list(out.outputs[0].token_ids) for out in found] == want
    counts = two.llm_engine.engine.snapshot().counters.draft_counts
    assert sum(counts.accepted) > 20


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_give_the_tokens_of_one(one, two, kind, rows):
    want = ids(one, **KINDS[kind])
    assert ids(two, **KINDS[kind]) == want
    assert any(min(step) == 0 < max(step) for step in rows), "no rank was without rows"
    assert (kind == "one of many") != any(min(step) for step in rows)
    assert ids(two, **KINDS[kind]) == want, "prompts found in the prefix cache"


def test_requests_of_one_long_prefix_all_run_where_it_is_cached(one, two, rows):
    head = [*prompts()[5], *prompts()[5][::-1], *prompts()[1]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    two.generate([{"prompt_token_ids": head}], params, use_tqdm=False)
    rows.clear()
    asked = [{"prompt_token_ids": [*head, last]} for last in (5, 6)]
    got, want = (llm.generate(asked, params, use_tqdm=False) for llm in (two, one))
    assert [x.outputs[0].token_ids for x in got] == [x.outputs[0].token_ids for x in want]
    assert all(sorted(step) == [0, 2] for step in rows), rows


def test_logprobs_and_those_of_prompts_come_from_each_rank(one, two):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    asked = [{"prompt_token_ids": one} for one in prompts()[:4]]
    for a, b in zip(*(llm.generate(asked, params, use_tqdm=False) for llm in (one, two))):
        assert [list(x) for x in a.outputs[0].logprobs] == [list(x) for x in b.outputs[0].logprobs]
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:]):
            assert list(x) == list(y)
            for token in x:
                assert y[token].logprob == pytest.approx(x[token].logprob, abs=1e-4)


def test_structured_output_runs_on_the_rank_with_the_grammars(one, two, rows):
    params = {"temperature": 0.9, "seed": 5, "ignore_eos": False, "prompts": slice(0, 3)}
    params["structured_outputs"] = StructuredOutputsParams(regex="[a-f]{4,9}!")
    assert ids(two, **params) == ids(one, **params)
    assert all(step[1] == 0 for step in rows)


def test_kv_memory_is_given_back_on_all_ranks_and_taken_again(one, two):
    two.sleep(level=1)
    two.wake_up()
    assert ids(two, temperature=0) == ids(one, temperature=0)
    assert two.reset_prefix_cache()


def broken_input(monkeypatch, llm, rank):
    """Have one step raise on one rank, before its forward pass."""
    builders, broken = llm.llm_engine.engine.executor._inputs, []
    build = ModelInputBuilder.build

    def build_broken(self, plan):
        step = build(self, plan)
        if step.batch is None or broken or self is not builders[rank]:
            return step
        broken.append(1)
        return msgspec.structs.replace(step, block_table_updates=[BlockTableUpdate(9, 0, 0, [1])])

    monkeypatch.setattr(ModelInputBuilder, "build", build_broken)
    return broken


def broken_experts(monkeypatch, llm, rank):
    """Have one step raise on rank 0 in a layer of experts, when it has the rows of others."""
    experts = llm.llm_engine.engine.executor._local.runner.model.layers[1].mlp.experts
    bank, broken = experts.gate_up_proj, []
    mlp = bank.mlp

    def fail_once(*args):
        if not broken:
            broken.append(1)
            raise ValueError("no experts today")
        return mlp(*args)

    monkeypatch.setattr(bank, "mlp", fail_once, raising=False)
    return broken


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("breaks", "rank"), [(broken_input, 0), (broken_input, 1), (broken_experts, 0)]
)
def test_a_step_that_fails_on_one_rank_is_repeated_on_all(one, two, monkeypatch, breaks, rank):
    """The others do not wait for it: no rank is restarted."""
    broken = breaks(monkeypatch, two, rank)
    assert ids(two, temperature=0) == ids(one, temperature=0)
    assert broken
    assert two.llm_engine.engine.executor.group.monitor.failure is None


@pytest.mark.parametrize(
    "options",
    [
        *tiers.long(
            {"tensor_parallel_size": 2},
            {"data_parallel_size": 3, "expert_placement_strategy": "round_robin"},
            {"num_gpu_blocks_override": 18, "enable_prefix_caching": False},
            {"num_gpu_blocks_override": 18, "kv_offloading_size": 0.01, "steps_in_flight": 2},
            {"max_num_batched_tokens": 9, "steps_in_flight": 2},
            {"quantization": "fp8"},
            {"pipeline_parallel_size": 2},
        ),
    ],
    ids=str,
)
def test_other_sizes_and_paths_give_the_tokens_of_one_rank(folder, one, options):
    quantized = {name: value for name, value in options.items() if name == "quantization"}
    same = LLM(folder, **SIZES, **CHUNKS, **quantized) if quantized else one
    llm = LLM(folder, **SIZES | CHUNKS | SHARED | options)
    for kind in KINDS:
        assert ids(llm, **KINDS[kind]) == ids(same, **KINDS[kind])
    llm.llm_engine.engine.shutdown()


MODELS = ["deepseek_v2_lite", "deepseek_v3", "gemma4_text_experts", "glm4_moe", "gpt_oss"]
MODELS += ["minimax_m2", "mixtral", "qwen2_moe", "qwen3_moe_some_dense_windows"]


@pytest.mark.parametrize("name", tiers.long(*MODELS))
def test_every_mixture_of_experts_gives_the_tokens_of_one_rank(name, tmp_path):
    folder = make(name, tmp_path)
    sizes = SIZES | CHUNKS | {"max_model_len": 160}
    want = ids(LLM(folder, **sizes), temperature=0)
    llm = LLM(folder, **sizes, **SHARED)
    assert ids(llm, temperature=0) == want
    llm.llm_engine.engine.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": True}, "serves no adapters"),
        ({"distributed_executor_backend": "external_launcher"}, "needs 'mp'"),
        ({"data_parallel_size": 999}, "needs 999 devices"),
    ],
)
def test_what_cannot_run_is_refused_by_name(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(folder, **SIZES | SHARED | options)


@pytest.mark.long("a second engine")
@pytest.mark.parametrize(
    ("breaks", "rank"), [(broken_input, 0), (broken_input, 1), (broken_experts, 0)]
)
def test_a_step_behind_one_that_failed_on_one_rank_leaves_no_rank_waiting(
    folder, one, monkeypatch, breaks, rank
):
    llm = LLM(folder, **SIZES | CHUNKS | SHARED, steps_in_flight=2)
    broken = breaks(monkeypatch, llm, rank)
    assert ids(llm, temperature=0) == ids(one, temperature=0)
    assert broken
    assert llm.llm_engine.engine.executor.group.monitor.failure is None
    llm.llm_engine.engine.shutdown()


@pytest.mark.long("transformers")
def test_a_model_of_transformers_is_refused(tmp_path):
    tiny_model("olmoe").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="run through transformers"):
        LLM(str(tmp_path), **SIZES, **SHARED, skip_tokenizer_init=True)


def test_a_model_without_experts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="llama has no experts"):
        LLM(str(write_model(tmp_path, "llama")), **SIZES, **SHARED)
