"""Texts of many prompts are tokenized together, and each as alone."""

import pytest

from quire import LLM, SamplingParams
from quire.errors import RequestError, TooLong
from quire.llm import text_feed
from quire.llm.text_feed import TextFeed
from quire.text.input_processor import InputProcessor
from quire.text.tokenizing.tokenizer import Tokenizer
from tests.pure.text import made

TEXTS = ["Hello", "the night of the fox", "", "naïve café 東京 🦊", " a\n\nb\t", "x" * 300]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm():
    return LLM("embedded", max_num_seqs=4, max_model_len=256, use_tqdm_on_load=False)


@pytest.fixture
def encoded(monkeypatch):
    """Texts that are tokenized alone."""
    found, encode = [], Tokenizer.encode

    def watched(self, text, *args, **kwargs):
        found.append(text)
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    return found


def ids_of(outputs):
    return [(one.prompt, one.prompt_token_ids, one.outputs[0].token_ids) for one in outputs]


@pytest.mark.parametrize("add_special_tokens", [False, True])
@pytest.mark.parametrize("chars", [1, 20, 1 << 20])
def test_each_text_has_the_ids_it_has_alone(monkeypatch, chars, add_special_tokens):
    monkeypatch.setattr(text_feed, "BATCH_CHARS", chars)
    tokenizer = made.face("llama")
    inputs = InputProcessor(tokenizer, max_model_len=400, vocab_size=1000)
    prompts = [*TEXTS, {"prompt": "a dict", "cache_salt": "s"}, "last"]
    feed = TextFeed(inputs, prompts, [], add_special_tokens=add_special_tokens)
    found = [feed.ids(i) for i in range(len(prompts))]
    texts = [one["prompt"] if isinstance(one, dict) else one for one in prompts]
    alone = [tokenizer.encode(text, add_special_tokens) for text in texts]
    assert all(ids in (None, own) for ids, own in zip(found, alone, strict=True))
    assert (None in found) == (chars < 1 << 20), "one alone in its batch is left to its request"


def test_what_is_no_plain_text_is_left_out(llm):
    prompts = [
        [5, 6],
        "a",
        {"prompt": "b", "prompt_token_ids": [7]},
        {"prompt_token_ids": [8]},
        "c",
    ]
    feed = TextFeed(llm.llm_engine.inputs, prompts, [], add_special_tokens=True)
    assert [feed.ids(i) is not None for i in range(5)] == [False, True, False, False, True]


def test_answers_are_those_of_each_prompt_alone(llm, encoded):
    prompts = [*(one for one in TEXTS if 0 < len(one) < 200), [5, 6], {"prompt": "a dict"}]
    together = ids_of(llm.generate(prompts, GREEDY, use_tqdm=False))
    assert not encoded
    assert together == [ids_of(llm.generate(one, GREEDY, use_tqdm=False))[0] for one in prompts]
    assert encoded


def test_conversations_are_tokenized_together(llm, encoded):
    chats = [[{"role": "user", "content": text}] for text in ("Hello", "Who are you?")]
    together = ids_of(llm.chat(chats, GREEDY, use_tqdm=False))
    assert not encoded
    assert together == [ids_of(llm.chat(one, GREEDY, use_tqdm=False))[0] for one in chats]


@pytest.mark.parametrize("bad", ["\ud800", "word " * 5000, ""])
def test_a_text_that_is_refused_is_refused_for_what_it_has(llm, bad):
    with pytest.raises(RequestError) as alone:
        llm.generate(bad, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError) as among:
        llm.generate(["good", bad, "good too"], GREEDY, use_tqdm=False)
    assert str(among.value) == str(alone.value)
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_text_that_is_too_long_is_not_tokenized(llm, monkeypatch):
    found, encode_batch = [], Tokenizer.encode_batch

    def watched(self, texts, *args):
        found.extend(texts)
        return encode_batch(self, texts, *args)

    monkeypatch.setattr(Tokenizer, "encode_batch", watched)
    with pytest.raises(TooLong):
        llm.generate(["good", "word " * 5000, "good too"], GREEDY, use_tqdm=False)
    assert found == ["good", "good too"]


def test_texts_that_are_cut_are_tokenized_by_their_requests(llm):
    params = SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=3)
    found = llm.generate(["one two three four five six", "a b c d e f"], params, use_tqdm=False)
    assert [len(one.prompt_token_ids) for one in found] == [3, 3]
    kwargs = {"truncation": True, "max_length": 2}
    found = llm.generate(["one two three", "a b c"], GREEDY, tokenization_kwargs=kwargs)
    assert [len(one.prompt_token_ids) for one in found] == [2, 2]
