"""One model in pipeline stages, each a process of its own: the same tokens as on one rank."""

import pytest

from quire import LLM, SamplingParams
from quire.core.params import BeamSearchParams
from quire.core.scheduling.limits.pipeline import PipelineLimit
from quire.errors import ConfigError, EngineDead, RequestError
from quire.executors import rank_monitor
from tests import tiers
from tests.cpu.models.peers import VARIANTS, peer, prompt_of
from tests.cpu.tiny_models import write_ascii_tokenizer, write_model
from tests.faults.arming import Fault
from tests.faults.ranks import of_ranks

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow("engines of two processes")]

TEXT = "The capital of France is Paris, and the future of AI is not yet written. "
PROMPTS = ["What", [70, 70, 5], TEXT, TEXT * 2 + "Hello", list(range(60, 120)), TEXT * 2 + "Oh"]
COMMON = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "use_tqdm_on_load": False}
TIGHT = {"block_size": 4, "num_gpu_blocks_override": 36, "max_num_batched_tokens": 32}
SETTINGS = {
    "chunks, preemption": TIGHT | {"max_num_seqs": 6},
    **tiers.amount(
        {},
        {
            "four steps in flight": TIGHT | {"steps_in_flight": 4},
            "one step at a time": TIGHT | {"steps_in_flight": 1},
            "swap": TIGHT | {"kv_offloading_size": 0.01, "steps_in_flight": 3},
            "no prefix cache, whole prompts": {
                "enable_prefix_caching": False,
                "enable_chunked_prefill": False,
                "num_gpu_blocks_override": 60,
            },
            "tensor parallel too": TIGHT | {"tensor_parallel_size": 2},
            "three stages": TIGHT | {"pipeline_parallel_size": 3},
            "uneven stages": TIGHT | {"pipeline_layers": "3,1"},
        },
    ),
}
KINDS = {
    "greedy": {"temperature": 0},
    "seeds": {"temperature": 0.9, "seed": 7, "n": 3, "top_p": 0.8},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "logit_bias": {70: 2.0}},
    "bad words": {"temperature": 0.8, "seed": 3, "bad_words": ["a"], "min_tokens": 9},
    "priorities": {"temperature": 0},
}


@pytest.fixture(autouse=True)
def small_shares(monkeypatch):
    """Prompts are divided over the steps in flight, short as they are."""
    monkeypatch.setattr(PipelineLimit, "least_share", 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=4))


@pytest.fixture(scope="module")
def one(folder):
    return LLM(folder, **COMMON, num_gpu_blocks_override=60, scheduling_policy="priority")


@pytest.fixture(scope="module", params=SETTINGS)
def staged(folder, request):
    given = {"pipeline_parallel_size": 2} | COMMON | SETTINGS[request.param]
    llm = LLM(folder, **given, scheduling_policy="priority")
    yield llm
    llm.llm_engine.engine.shutdown()


def ids(llm, prompts=PROMPTS, priorities=None, **params):
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | params)
    outputs = llm.generate(prompts, params, use_tqdm=False, priority=priorities)
    return [list(each.token_ids) for output in outputs for each in output.outputs]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_stages_give_the_tokens_of_one_rank(one, staged, kind):
    priorities = [3, 1, 2, 1, 0, 2] if kind == "priorities" else None
    want = ids(one, **KINDS[kind])
    assert ids(staged, priorities=priorities, **KINDS[kind]) == want
    assert ids(staged, **KINDS[kind]) == want, "prompts found in the prefix cache"


def test_some_sequences_were_preempted(staged):
    """By the tests before."""
    engine = staged.llm_engine.engine
    if staged.llm_engine.config.cache.num_blocks == TIGHT["num_gpu_blocks_override"]:
        assert engine.stats().preemptions > 0
    engine.check()


def test_logprobs_and_those_of_prompts_come_from_the_last_stage(one, staged):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    for a, b in zip(*(llm.generate(PROMPTS[2:3], params, use_tqdm=False) for llm in (one, staged))):
        for x, y in [*zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True)]:
            assert {i: each.logprob for i, each in x.items()} == pytest.approx(
                {i: each.logprob for i, each in y.items()}, abs=1e-5
            )
        assert [list(x) for x in a.outputs[0].logprobs] == [list(x) for x in b.outputs[0].logprobs]


def test_beams_and_embeddings(one, staged):
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    beams = [
        [each.tokens for each in llm.beam_search([{"prompt": TEXT}], params)[0].sequences]
        for llm in (one, staged)
    ]
    assert beams[0] == beams[1]
    vectors = [[out.outputs.embedding for out in llm.embed(PROMPTS)] for llm in (one, staged)]
    for a, b in zip(*vectors, strict=True):
        assert b == pytest.approx(a, abs=1e-5)


def test_values_of_this_process_alone_are_refused(staged):
    with pytest.raises(RequestError, match="tensor_parallel_size=1"):
        staged.generate("a", SamplingParams(logits_processors=[lambda ids, row: row]))
    with pytest.raises(RequestError, match="use one rank"):
        staged.apply_model(repr)


def test_a_call_that_raises_and_sleep(one, staged):
    with pytest.raises(AttributeError):
        staged.llm_engine.engine.executor.call("nothing")
    staged.sleep(level=1)
    staged.wake_up()
    assert ids(staged, temperature=0) == ids(one, temperature=0)


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.setattr(rank_monitor, "FAILURE_GRACE_S", 0.6)
    monkeypatch.setattr(rank_monitor, "MAX_STOPPED_S", 0.6)
    with of_ranks() as made:
        yield made


def staged_llm(folder, **settings):
    return LLM(folder, **COMMON | TIGHT | {"pipeline_parallel_size": 2} | settings)


@pytest.mark.parametrize("depth", [3, *tiers.long(1, 2)])
def test_a_stage_that_fails_a_step_alone_does_not_hold_up_the_others(one, folder, faults, depth):
    """Before it has taken what the stage before sends, and after: steps in flight behind it are
    dropped too, and the requests are computed again."""
    llm = staged_llm(folder, steps_in_flight=depth)
    group = llm.llm_engine.engine.executor.group
    want = ids(one, temperature=0)
    for point in ("rank.forward", "rank.sample"):
        faults.arm(Fault(point, "raise", at=4))
        assert ids(llm, temperature=0) == want
        assert faults.fired
    assert group.monitor.failure is None
    assert llm.llm_engine.engine.stats().failed_steps == 2
    llm.llm_engine.engine.shutdown()


FAILURES = {
    "kill": "was killed by signal 9",
    "stop": "was stopped by a signal",
    "hang": r"has not finished step [^;]*; [^;]*\((sent|received)\)",  # it waits for no other
}


@pytest.mark.parametrize(
    ("point", "do", "stages"),
    [
        ("rank.forward", "kill", 2),
        *tiers.long(
            *[("rank.sample", do, stages) for do in ("kill", "stop") for stages in (2, 3)],
            *[("rank.forward", do, 3) for do in ("kill", "stop", "hang")],
            ("rank.sample", "hang", 3),
        ),
    ],
)
def test_a_stage_that_ends_is_named(folder, faults, point, do, stages):
    llm = staged_llm(folder, pipeline_parallel_size=stages, rank_timeout_seconds=2)
    executor = llm.llm_engine.engine.executor
    faults.arm(Fault(point, do, at=5))
    which = stages - 1 if point == "rank.sample" else "[12]"
    with pytest.raises(EngineDead, match=rf"^rank {which} \(process \d+, cpu\) {FAILURES[do]}"):
        ids(llm, temperature=0)
    executor.shutdown()
    assert all(process.returncode is not None for process in executor.group.monitor.processes)


UNCUT = ("gemma4",)
CUT = [one for one in VARIANTS if not one.startswith(UNCUT)]


@pytest.mark.parametrize("variant", tiers.long(*CUT))
def test_every_architecture_in_stages(variant, tmp_path):
    """Daily, tests/cpu/models/test_decoder.py runs the stages of some one after another."""
    config = peer(variant, tmp_path).config.get_text_config()
    write_ascii_tokenizer(tmp_path, config.vocab_size)
    prompts = [{"prompt_token_ids": prompt_of(n, config.vocab_size)} for n in (1, 7, 40, 90)]
    settings = COMMON | {"max_model_len": 128, "max_num_batched_tokens": 32, "block_size": 8}
    want = ids(LLM(str(tmp_path), **settings), prompts, temperature=0)
    for tensor in (1, 2):
        try:
            llm = LLM(
                str(tmp_path), **settings, pipeline_parallel_size=2, tensor_parallel_size=tensor
            )
        except ConfigError as error:
            if "tensor_parallel_size 2 does not divide" not in str(error):
                raise
        else:
            assert ids(llm, prompts, temperature=0) == want
            llm.llm_engine.engine.shutdown()


def test_layers_that_share_keys_and_values_are_not_cut(tmp_path):
    peer("gemma4_text", tmp_path)
    with pytest.raises(ConfigError, match="layers share keys and values"):
        LLM(str(tmp_path), **COMMON, pipeline_parallel_size=2, skip_tokenizer_init=True)
