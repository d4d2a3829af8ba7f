"""Whisper offline gives the answers of transformers, with and without time stamps."""

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.facts import model_facts
from quire.core.params import BeamSearchParams
from quire.errors import RequestError
from quire.models._encoder_decoder import EncoderDecoder
from quire.models.build import read_model_config
from tests.cpu.encoder_decoder import speech
from tests.cpu.encoder_decoder.speech import EOT, IDS, NO_TIMES, PREVIOUS, PROMPT, RATE, SOT

pytestmark = [
    pytest.mark.slow("imports transformers, and makes models of it"),
    pytest.mark.sampled(2),
]

AUDIOS = [speech.recording(length, seed) for seed, length in enumerate((2.5, 30, 0.2, 11))]
START = [SOT, IDS["<|en|>"], IDS["<|transcribe|>"]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0)
FREE = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def theirs(folder):
    return speech.write_model(folder)


@pytest.fixture(scope="module")
def llm(folder, theirs):
    return llm_of(folder)


@pytest.fixture
def encoded(monkeypatch):
    """The number of sources of each run of the encoder."""
    runs, encode = [], EncoderDecoder.encode

    def counted(self, source):
        runs.append(len(source.media))
        encode(self, source)

    monkeypatch.setattr(EncoderDecoder, "encode", counted)
    return runs


def llm_of(folder, **settings):
    return LLM(str(folder), **{"dtype": "float32", "num_gpu_blocks_override": 800, **settings})


def prompt_of(audio, text=PROMPT):
    return {"prompt": text, "multi_modal_data": {"audio": (audio, RATE)}}


def tokens(answers):
    return [[list(one.token_ids) for one in answer.outputs] for answer in answers]


@torch.inference_mode()
def generate(model, audio, decoder, count, *, times, **how):
    """transformers' answer without the loops around it for long recordings: new tokens."""
    from transformers import GenerationMixin, LogitsProcessorList
    from transformers.generation import WhisperTimeStampLogitsProcessor

    rules = LogitsProcessorList()
    settings = model.generation_config
    if times:
        rules.append(WhisperTimeStampLogitsProcessor(settings, begin_index=len(decoder)))
    out = GenerationMixin.generate(
        model, speech.features_of(audio), decoder_input_ids=torch.tensor([decoder]),
        max_new_tokens=count, do_sample=False, logits_processor=rules, **how,
    )  # fmt: skip
    return out[:, len(decoder) :].tolist()


@pytest.mark.parametrize("times", [False, True])
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(theirs, llm, times):
    decoder = START if times else [*START, NO_TIMES]
    prompts = [
        {"prompt_token_ids": decoder, "multi_modal_data": {"audio": (one, RATE)}} for one in AUDIOS
    ]
    answers = llm.generate(prompts, GREEDY)
    assert len({tuple(one.outputs[0].token_ids) for one in answers}) > 1
    stamps = set()
    for audio, answer in zip(AUDIOS, answers):
        (want,), got = generate(theirs, audio, decoder, 24, times=times), answer.outputs[0]
        assert list(got.token_ids) == want
        assert answer.prompt_token_ids == decoder
        assert answer.encoder_prompt_token_ids is None
        stamps |= {token for token in want if token >= speech.FIRST_TIME}
        expected = speech.logprobs(theirs, audio, [*decoder, *want])[len(decoder) - 1 :]
        for i, (token, entry) in enumerate(zip(want, got.logprobs)):
            assert abs(entry[token].logprob - expected[i, token].item()) < 1e-4
    assert len(stamps) > 8


def test_text_follows_on_time_stamps(tmp_path_factory):
    """A model whose time stamps are unlikely: words stand between them."""
    folder = tmp_path_factory.mktemp("words")
    theirs = speech.write_model(folder)
    with torch.no_grad():
        theirs.model.decoder.embed_tokens.weight[speech.FIRST_TIME :] *= 0.4
    theirs.save_pretrained(folder)
    answers = llm_of(folder).generate(
        [prompt_of(one, PROMPT.removesuffix("<|notimestamps|>")) for one in AUDIOS], GREEDY
    )
    kinds = set()
    for audio, answer in zip(AUDIOS, answers):
        (want,) = generate(theirs, audio, START, 24, times=True)
        assert list(answer.outputs[0].token_ids) == want
        kinds |= {token >= speech.FIRST_TIME for token in want[2:]}
    assert kinds == {True, False}


def test_an_answer_with_time_stamps_is_resumed_after_preemption(folder, theirs, llm):
    prompts = [prompt_of(one, PROMPT.removesuffix("<|notimestamps|>")) for one in AUDIOS]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    want = tokens(llm.generate(prompts, params))
    tight = llm_of(folder, num_gpu_blocks_override=3 * 94 + 8, max_num_batched_tokens=8)
    assert tokens(tight.generate(prompts, params)) == want
    assert tight.llm_engine.engine.stats().preemptions > 0


def test_four_beams_equal_those_of_transformers(theirs, llm):
    params = BeamSearchParams(beam_width=4, max_tokens=7, ignore_eos=True)
    how = {"num_beams": 4, "num_return_sequences": 4, "eos_token_id": None}
    decoder = [*START, NO_TIMES]
    (found,) = llm.beam_search([prompt_of(AUDIOS[0])], params)
    want = generate(theirs, AUDIOS[0], decoder, 7, times=False, **how)
    assert [one.tokens[len(decoder) :] for one in found.sequences] == want


def test_a_recording_is_encoded_once(folder, llm, encoded):
    llm.reset_prefix_cache()
    prompt = prompt_of(AUDIOS[0])
    llm.generate(prompt, SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4))
    llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=3))
    llm.generate([prompt, prompt_of(AUDIOS[0].tolist())], FREE)
    assert encoded == [1]
    llm.generate([{**prompt, "cache_salt": "mine"}, prompt_of(AUDIOS[2])], FREE)
    assert sum(encoded) == 3


def test_forms_of_prompts_and_of_recordings(llm):
    want = tokens(llm.generate(prompt_of(AUDIOS[0]), GREEDY))
    source = {"prompt": "", "multi_modal_data": {"audio": [(AUDIOS[0], RATE)]}}
    assert (
        tokens(llm.generate({"encoder_prompt": source, "decoder_prompt": PROMPT}, GREEDY)) == want
    )
    stereo = np.stack([AUDIOS[0], AUDIOS[0]])
    assert tokens(llm.generate(prompt_of(stereo), GREEDY)) == want
    (answer,) = llm.generate(prompt_of(AUDIOS[0], "<|startofprev|> ab" + PROMPT), GREEDY)
    assert answer.prompt_token_ids[0] == PREVIOUS
    only = {"multi_modal_data": {"audio": AUDIOS[0]}}
    assert llm.generate(only, GREEDY)[0].prompt_token_ids == [SOT]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("hello", "this model reads audio"),
        ({"prompt": PROMPT}, "multi_modal_data must have 'audio' alone"),
        ({"prompt": PROMPT, "multi_modal_data": {"image": 1}}, "'audio' alone"),
        (prompt_of(AUDIOS[0], "hello"), "must have its start token"),
        (prompt_of(np.zeros(31 * RATE, np.float32)), "has 31.00 s, and the model reads 30 s"),
        (prompt_of(np.zeros(0, np.float32)), "not empty"),
        (prompt_of(np.array([np.nan, 1.0])), "not finite"),
        (prompt_of(np.zeros((40, 50), np.float32)), "40 channels"),
        (
            {"prompt": PROMPT, "multi_modal_data": {"audio": [(AUDIOS[0], RATE)] * 2}},
            r"At most 1 audio\(s\) may be provided in one prompt.",
        ),
        ({**prompt_of(AUDIOS[0]), "prompt_embeds": torch.zeros(1, 32)}, "prompt_embeds"),
    ],
)  # fmt: skip
def test_errors_of_prompts(llm, prompt, words):
    with pytest.raises(RequestError, match=words):
        llm.generate(prompt, GREEDY)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow("starts two ranks")
def test_two_ranks_answer_as_one(folder, llm):
    prompts = [prompt_of(one) for one in AUDIOS]
    two = llm_of(folder, device="cpu", tensor_parallel_size=2)
    assert tokens(two.generate(prompts, GREEDY)) == tokens(llm.generate(prompts, GREEDY))


def test_facts_are_those_of_the_model(folder, theirs):
    hf = theirs.config.to_dict()
    facts = model_facts(hf, forced=speech.GENERATION)
    _, config = read_model_config(hf)
    assert facts.layers == config.attention_layers()
    assert facts.max_len == config.max_len == speech.WHISPER["max_target_positions"]
    assert facts.encoder.max_len == 1500
    assert facts.encoder.speech.features == (80, 3000)
    assert facts.encoder.banned_first == (32, EOT)
