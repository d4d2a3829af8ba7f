"""Prompts with a suffix: the marks of each family, and what a vocabulary without them gets."""

import pytest
from tokenizers import AddedToken

from quire.core.params import SamplingParams
from quire.errors import RequestError, TooLong
from quire.text.fill_in_middle import FORMATS
from quire.text.input_processor import InputProcessor
from quire.text.tokenizing.backends import TokenizersBackend
from quire.text.tokenizing.tokenizer import Tokenizer
from tests.pure.text.made import byte_level, llama


def processor(build, form, max_model_len=64):
    tok = build()
    marks = [mark for mark in (form.prefix, form.suffix, form.middle) if mark]
    tok.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer = Tokenizer(TokenizersBackend(tok))
    size = tokenizer.max_token_id + 1
    return InputProcessor(tokenizer, max_model_len=max_model_len, vocab_size=size)


def ids_of(inputs, prompt):
    return list(inputs.process(prompt, SamplingParams(), request_id="r").request.prompt)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.family)
@pytest.mark.parametrize("build", [byte_level, llama])
def test_marks_of_the_family_are_around_prefix_and_suffix(build, form):
    inputs = processor(build, form)
    tokenizer = inputs.tokenizer
    ids = ids_of(inputs, {"prompt": "hello", "suffix": "world"})
    mark = tokenizer.convert_tokens_to_ids
    begins = [one for one in tokenizer.encode("") if one != tokenizer.eos_token_id]
    before = [mark(form.prefix), *tokenizer.encode("hello", False)]
    inner = ids[ids.index(mark(form.suffix)) + 1 :][: len(ids) - len(begins) - len(before) - 1]
    if form.middle:
        assert ids[-1] == mark(form.middle)
        assert ids[: len(begins) + len(before)] == begins + before
        inner = inner[:-1]
    else:
        assert ids[-len(before) :] == before
    assert tokenizer.decode(inner, skip_special_tokens=False).strip() == "world"
    assert "▁" not in tokenizer.convert_ids_to_tokens(inner)[0], "no space was added"
    prefix_ids = tokenizer.encode("hello", False)
    assert ids_of(inputs, {"prompt_token_ids": prefix_ids, "suffix": "world"}) == ids


def test_an_empty_suffix_is_none():
    inputs = processor(byte_level, FORMATS[0])
    assert ids_of(inputs, {"prompt": "hello", "suffix": ""}) == ids_of(inputs, "hello")


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "words"),
    [
        ({"prompt": "a", "suffix": 3}, {}, RequestError, "suffix must be text"),
        ({"prompt": "a", "suffix": "b"}, {"truncate_prompt_tokens": 3}, RequestError, "combined"),
        ({"prompt": "a", "suffix": "b " * 999}, {}, TooLong, "maximum context length"),
        ({"prompt_token_ids": [10**6], "suffix": "b"}, {}, RequestError, "token ids of this model"),
    ],
)
def test_what_cannot_be_a_prompt_with_a_suffix_is_refused(prompt, params, kind, words):
    inputs = processor(byte_level, FORMATS[0])
    with pytest.raises(kind, match=words):
        inputs.process(prompt, SamplingParams(**params), request_id="r")


def test_a_vocabulary_without_marks_is_refused_with_the_families():
    tokenizer = Tokenizer(TokenizersBackend(byte_level()))
    inputs = InputProcessor(tokenizer, max_model_len=64, vocab_size=1000)
    with pytest.raises(RequestError, match="Qwen-Coder, StarCoder") as caught:
        ids_of(inputs, {"prompt": "a", "suffix": "b"})
    assert caught.value.param == "suffix"
