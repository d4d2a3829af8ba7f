"""Times of words: those that transformers finds in the weights of cross attention."""

import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.types import ALIGN, Pooling
from quire.errors import ConfigError
from quire.text.speech import SpeechTokens
from quire.text.transcript import Piece
from quire.text.word_times import token_times, words_of
from tests import tiers
from tests.cpu.encoder_decoder import speech
from tests.cpu.encoder_decoder.speech import EOT, FIRST_TIME, IDS, RATE, SOT

pytestmark = pytest.mark.slow("imports transformers, and makes models of it")

HEADS = [[0, 1], [1, 0], [1, 3]]
START = [SOT, IDS["<|en|>"], IDS["<|transcribe|>"]]
AUDIOS = [speech.recording(length, seed) for seed, length in enumerate((2.5, 30, 11.3))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def theirs(folder):
    model = speech.write_model(folder)
    model.generation_config.alignment_heads = HEADS
    model.generation_config.save_pretrained(folder)
    return model


def llm_of(folder, **settings):
    return LLM(str(folder), **{"dtype": "float32", "num_gpu_blocks_override": 800, **settings})


def answers_of(seed, count):
    """Tokens of text and of times, as an answer has them."""
    draw = np.random.default_rng(seed)
    text = draw.integers(33, 127, count)
    at = draw.choice(count, max(count // 5, 1), replace=False)
    text[at] = FIRST_TIME + np.sort(draw.integers(0, 1500, len(at)))
    return text.tolist()


def positions_of(audio):
    return len(audio) // 160 // 2


def aligned(llm, audios, answers, *, alone=False):
    """The matrix of each, run together."""
    engine, inputs = llm.llm_engine.engine, llm.llm_engine.inputs
    found = {}
    for i, (audio, answer) in enumerate(zip(audios, answers)):
        prompt = {"prompt_token_ids": START, "multi_modal_data": {"audio": (audio, RATE)}}
        one = inputs.process(prompt, SamplingParams(max_tokens=1), request_id=f"a{i}").request
        how = Pooling(ALIGN, dimensions=positions_of(audio), skip_tokens=len(START))
        engine.add(
            replace(one, prompt=(*START, *answer), pooling=how, forced=None,
                    read_prefix_cache=False)
        )  # fmt: skip
        while alone and not engine.idle:
            found |= {u.request_id: u for u in engine.step() if u.finish}
    while not engine.idle:
        found |= {u.request_id: u for u in engine.step() if u.finish}
    made = [found[f"a{i}"].pooled for i in range(len(answers))]
    return [np.frombuffer(one.data, np.float32).reshape(one.shape) for one in made]


class Outputs(types.SimpleNamespace):
    def __contains__(self, name):
        return name in vars(self)


@torch.inference_mode()
def expected(model, audio, answer):
    """transformers' times of the tokens."""
    ids = torch.tensor([[*START, *answer, EOT]])
    out = model(
        input_features=speech.features_of(audio), decoder_input_ids=ids[:, :-1],
        output_attentions=True,
    )  # fmt: skip
    given = Outputs(cross_attentions=(out.cross_attentions,), sequences=ids)
    times = model._extract_token_timestamps(
        given, HEADS, num_frames=2 * positions_of(audio), num_input_ids=len(START)
    )
    return times[0, len(START) : -1].tolist()


@pytest.mark.parametrize(
    "settings",
    [{}, *tiers.long({"max_num_batched_tokens": 16, "enable_chunked_prefill": True})],
)
def test_times_of_tokens_are_those_of_transformers(folder, theirs, settings):
    answers = [answers_of(i, n) for i, n in enumerate((20, 55, 4))]
    llm = llm_of(folder, **settings)
    want = [expected(theirs, audio, one) for audio, one in zip(AUDIOS, answers)]
    assert len({tuple(one) for one in want}) == 3
    for alone in (False, True):
        for one, matrix, times in zip(answers, aligned(llm, AUDIOS, answers, alone=alone), want):
            assert matrix.shape == (len(one), positions_of(AUDIOS[answers.index(one)]))
            assert token_times(matrix) == pytest.approx(times, abs=1e-6)


class Tokens:
    """The tokenizer of transformers' functions."""

    eos_token_id = EOT

    def __init__(self, decode):
        self.decode = lambda ids, decode_with_timestamps: decode(ids)


TEXTS = (
    ' Hello, it is 5 o\'clock (or so)... he said: "no!"',
    "ab c¿d — größe 中文 字。 x ",
    " ,",
    "no",
)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_transformers(folder, theirs, text, language):
    from transformers.models.whisper.tokenization_whisper import _collate_word_timestamps

    tokenizer = llm_tokenizer(folder)
    tokens = SpeechTokens.from_tokenizer(tokenizer, EOT, multilingual=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    times = [round(0.14 * i + 0.5, 2) for i in range(len(ids))]
    got = words_of(Piece(0.0, 100.0, ids, 0.0, 0.0), times, tokens, tokenizer.decode, language)
    name = {"en": "english", "zh": "chinese"}[language]
    pairs = list(zip([0.0, *times], times))
    found = _collate_word_timestamps(Tokens(tokenizer.decode), ids, pairs, name, False)
    want = [(one["text"], *one["timestamp"]) for one in found if one["text"].strip()]
    assert [(one.text, one.start, one.end) for one in got] == want


def llm_tokenizer(folder):
    return llm_of(folder).get_tokenizer()


def test_words_do_not_cross_time_stamps_and_stay_in_their_piece(folder, theirs):
    tokenizer = llm_tokenizer(folder)
    tokens = SpeechTokens.from_tokenizer(tokenizer, EOT, multilingual=True)
    text = lambda s: tokenizer.encode(s, add_special_tokens=False)  # noqa: E731
    ids = [FIRST_TIME, *text("ab"), FIRST_TIME + 50, FIRST_TIME + 50, *text("cd"), EOT]
    times = [0.0, 0.5, 0.9, 1.0, 1.0, 1.4, 9.0, 9.0]
    found = words_of(Piece(30.0, 35.0, ids, 0.0, 0.0), times, tokens, tokenizer.decode, "en")
    assert [(one.text, one.start, one.end) for one in found] == [
        ("ab", 30.0, 30.9),
        ("cd", 31.0, 35.0),
    ]


@pytest.mark.parametrize("heads", [[], [[2, 0]], [[0, 4]], [[0]], "all"])
def test_heads_that_a_model_has_not(folder, theirs, heads):
    from quire.config.encoder_facts import SpeechFacts

    given = speech.WHISPER | {"alignment_heads": heads}
    with pytest.raises(ConfigError, match="alignment_heads"):
        SpeechFacts.from_hf(given)
    assert SpeechFacts.from_hf(speech.WHISPER).alignment_heads == tuple((1, i) for i in range(4))
