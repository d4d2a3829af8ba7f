"""Encoder-decoder models on every path of the engine: shared, preempted, swapped, sharded."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.memory.memory_plan import blocks_per_sequence
from quire.core.params import BeamSearchParams, StructuredOutputsParams
from quire.models._encoder_decoder import EncoderDecoder
from tests.cpu.encoder_decoder.seq2seq import BART, T5, source_of, write_model
from tests.cpu.tiny_models import write_tokenizer

pytestmark = [
    pytest.mark.slow("imports transformers, and makes models of it"),
    pytest.mark.sampled(3),
]

SOURCES = [source_of(length) for length in (40, 5, 17, 60, 33, 16, 2, 51)]
FREE = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name, hf in (("t5", T5), ("bart", BART)):
        found[name] = tmp_path_factory.mktemp(name)
        write_model(found[name], hf)
    return found


@pytest.fixture
def encoded(monkeypatch):
    """The lengths of the sources of each run of an encoder."""
    runs, encode = [], EncoderDecoder.encode

    def counted(self, source):
        runs.append(source.starts.diff().tolist())
        encode(self, source)

    monkeypatch.setattr(EncoderDecoder, "encode", counted)
    return runs


def llm_of(folder, **settings):
    settings = {"dtype": "float32", "num_gpu_blocks_override": 200, **settings}
    return LLM(str(folder), **settings)


def tokens(answers):
    return [[list(one.token_ids) for one in answer.outputs] for answer in answers]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_source_is_encoded_once_for_samples_beams_and_later_requests(folders, name, encoded):
    llm = llm_of(folders[name])
    pool = llm.llm_engine.engine._scheduler._kvs[0].pool
    source = {"encoder_prompt": SOURCES[0]}
    llm.generate(source, SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=8))
    assert encoded == [[40]]
    # three blocks of the source; the decoders' tokens fill none, so nothing else is kept
    assert pool.cached == 3
    llm.beam_search([source], BeamSearchParams(beam_width=4, max_tokens=6))
    llm.generate([source] * 3, FREE)
    assert encoded == [[40]]
    llm.generate({**source, "cache_salt": "mine"}, FREE)
    assert encoded == [[40], [40]]
    assert llm.reset_prefix_cache()
    llm.generate([source, {"encoder_prompt": SOURCES[1]}, source], FREE)
    assert encoded[2:] == [[40, 5]]


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_answers_are_the_same(folders, name, mode, encoded):
    want = tokens(llm_of(folders[name]).generate(SOURCES, FREE))
    encoded.clear()
    llm = llm_of(folders[name], num_gpu_blocks_override=16, preemption_mode=mode, swap_space=0.01)
    answers = llm.generate(SOURCES, FREE)
    assert tokens(answers) == want
    stats = llm.llm_engine.engine.stats()
    assert stats.preemptions > 0
    count = sum(map(len, encoded))
    assert count == len(SOURCES) if mode == "swap" else count >= len(SOURCES)


def test_chunks_of_a_decoder_prompt_change_nothing(folders):
    decoder = [0, *source_of(40, seed=2)]
    prompts = [{"encoder_prompt": one, "decoder_prompt": decoder} for one in SOURCES]
    want = tokens(llm_of(folders["t5"]).generate(prompts, FREE))
    assert tokens(llm_of(folders["t5"], max_num_batched_tokens=7).generate(prompts, FREE)) == want


def test_two_steps_in_flight_change_nothing(folders):
    want = tokens(llm_of(folders["bart"]).generate(SOURCES, FREE))
    assert tokens(llm_of(folders["bart"], steps_in_flight=2).generate(SOURCES, FREE)) == want


def test_tapes_replay_decode_steps(folders):
    want = tokens(llm_of(folders["t5"], enforce_eager=True).generate(SOURCES, FREE))
    llm = llm_of(folders["t5"])
    assert tokens(llm.generate(SOURCES, FREE)) == want
    tapes = llm.llm_engine.engine._executor.runner.worker._tapes
    assert any(tapes._tapes.values())
    assert not tapes._not_recordable
    assert tapes._tapes


@pytest.mark.usefixtures("forked")
@pytest.mark.slow("starts two ranks")
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_two_ranks_answer_as_one(folders, name):
    want = llm_of(folders[name]).generate(SOURCES, FREE)
    got = llm_of(folders[name], device="cpu", tensor_parallel_size=2).generate(SOURCES, FREE)
    assert tokens(got) == tokens(want)


def test_an_answer_can_be_constrained(tmp_path):
    write_model(tmp_path, BART | {"vocab_size": 400, "eos_token_id": 2, "forced_eos_token_id": 2})
    write_tokenizer(tmp_path)
    wanted = StructuredOutputsParams(choice=["yes", "perhaps"])
    params = SamplingParams(temperature=0.0, max_tokens=9, structured_outputs=wanted)
    for answer in llm_of(tmp_path).generate(["Hello", "What is the weather?"], params):
        assert answer.outputs[0].text in ("yes", "perhaps")


def test_the_plan_counts_blocks_of_sources(folders):
    llm = llm_of(folders["t5"], num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 20)
    config = llm.llm_engine.config
    layers, block, numbers = 2, 16, 2 * 4 * 8  # of keys and values of a token
    assert [group.cross for group in config.cache.groups] == [False, True]
    assert config.cache.block_bytes == layers * block * numbers * 4
    assert config.cache.num_blocks == (1 << 20) // config.cache.block_bytes
    assert config.encoder.max_len == 128
    plan = llm.llm_engine.engine._scheduler._kvs[0]
    need = plan.max_blocks(_request(128), 128)
    assert need == 128 // 16 + 128 // 16
    shape = config.cache.groups, _Shape(), 128
    assert blocks_per_sequence(*shape) == need


def _request(source):
    from quire.core.types import Request, StopConditions

    return Request("a", (0,), StopConditions(1), encoder_prompt=(5,) * source)


class _Shape:
    block_size, max_num_batched_tokens, max_encoder_len = 16, 512, 128


def test_sources_alone_and_packed_give_the_same_bits(folders):
    """Of the encoder's output, as the cross attention of the decoder reads it."""
    llm = llm_of(folders["t5"])
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=5, ignore_eos=True)
    together = llm.generate(SOURCES, params)
    llm.reset_prefix_cache()
    for source, answer in zip(SOURCES, together):
        (alone,) = llm.generate([source], params)
        assert alone.outputs[0].logprobs == answer.outputs[0].logprobs
    assert torch.isfinite(torch.tensor(together[0].outputs[0].cumulative_logprob or 0.0))


def test_a_step_of_no_request_runs_between_answers(folders):
    """A health probe's row has no source: its cross attention sees nothing."""
    llm = llm_of(folders["t5"])
    want = tokens(llm.generate(SOURCES, FREE))
    engine = llm.llm_engine.engine
    plan = engine._scheduler.plan_dummy_step()
    engine._executor.submit(plan).wait()
    engine._scheduler.finish_dummy_step(plan)
    assert tokens(llm.generate(SOURCES, FREE)) == want
