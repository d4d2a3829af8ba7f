"""Encoder-decoder models on the GPU give the answers of transformers, with graphs and without."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.params import BeamSearchParams
from quire.kernels import encoder_attention, paged_attention  # noqa: F401 - they register
from quire.kernels.framework.op import OPS
from tests.cpu.encoder_decoder.seq2seq import (
    VARIANTS,
    generate,
    logprobs,
    source_of,
    write_model,
)

SOURCES = [source_of(length) for length in (1, 5, 17, 60, 33, 128)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0)
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """(transformers' model on the CPU, folder)."""
    folder = tmp_path_factory.mktemp(request.param)
    return write_model(folder, VARIANTS[request.param]), folder


def llm_of(folder, **settings):
    settings = {"dtype": "float32", "num_gpu_blocks_override": 400, "max_num_seqs": 32, **settings}
    return LLM(str(folder), **settings)


@pytest.mark.parametrize("eager", [False, True])
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(pair, eager):
    theirs, folder = pair
    llm = llm_of(folder, enforce_eager=eager)
    prompts = [{"encoder_prompt": one} for one in SOURCES]
    decoder = [theirs.generation_config.decoder_start_token_id, *source_of(30, seed=4)]
    prompts += [{"encoder_prompt": one, "decoder_prompt": decoder} for one in SOURCES]
    for i, answer in enumerate(llm.generate(prompts, GREEDY)):
        source = SOURCES[i % len(SOURCES)]
        got = list(answer.outputs[0].token_ids)
        assert got == generate(theirs, source, 20, None if i < len(SOURCES) else decoder)[0]
        want = logprobs(theirs, source, [*answer.prompt_token_ids, *got])
        first = len(answer.prompt_token_ids) - 1
        for at, (token, entry) in enumerate(zip(got, answer.outputs[0].logprobs)):
            assert abs(entry[token].logprob - want[first + at, token].item()) < TOLERANCE


def test_a_source_is_encoded_once_and_preempted_answers_are_the_same(pair):
    _, folder = pair
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    want = [one.outputs[0].token_ids for one in llm_of(folder).generate(SOURCES, params)]
    for mode in ("recompute", "swap"):
        llm = llm_of(folder, num_gpu_blocks_override=18, preemption_mode=mode, swap_space=0.01)
        got = [one.outputs[0].token_ids for one in llm.generate(SOURCES, params)]
        assert got == want
        assert llm.llm_engine.engine.stats().preemptions


def test_four_beams_equal_those_of_transformers(pair):
    theirs, folder = pair
    params = BeamSearchParams(beam_width=4, max_tokens=7, ignore_eos=True)
    how = {"eos_token_id": None, "forced_eos_token_id": None, "num_return_sequences": 4}
    llm = llm_of(folder)
    for source in SOURCES[1:4]:
        (found,) = llm.beam_search([{"encoder_prompt": source}], params)
        want = generate(theirs, source, 7, num_beams=4, **how)
        assert [one.tokens[1:] for one in found.sequences] == want


def test_bfloat16_answers(pair):
    _, folder = pair
    for answer in llm_of(folder, dtype="bfloat16").generate(SOURCES, GREEDY):
        assert answer.outputs[0].token_ids


@pytest.mark.parametrize("name", ["encoder_attention", "paged_attention"])
def test_ops_agree_with_their_references(name):
    torch.manual_seed(0)
    op, taken = OPS[name], 0
    for case in op.cases(torch.device("cuda")):
        if name == "paged_attention" and case.get("position_bias") is None:
            continue
        want = op.reference(**case)
        out = op.gpu.outputs(*case.values())
        assert out is not NotImplemented
        op.gpu.launch(out, **case)
        tolerance = 1e-4 if out.dtype == torch.float32 else op.atol
        torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
        taken += 1
    assert taken >= 2
