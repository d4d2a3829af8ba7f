"""Tokenizers of tekken.json: ids as tiktoken finds them, special tokens first, bad files refused."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.text.tokenizing.detokenizer import Detokenizer
from quire.text.tokenizing.tokenizer import load_tokenizer
from tests.pure.text.tekken import SPECIALS, reference, tekken, tokens, write_tekken

ALPHABET = "aabbthe ing on  \n\r12öß€日本語🙂.,<s>[INST]\t"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tekken(tmp_path_factory.mktemp("tekken")))


@given(st.text(st.sampled_from(ALPHABET), max_size=60))
def test_ids_are_those_of_tiktoken_and_decode_to_the_text(tokenizer, text):
    if any(name in text for name in tokenizer.backend.added_tokens.values()):
        return
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference(text)
    assert tokenizer.decode(ids) == text


@given(st.text(max_size=40))
def test_any_text_survives_the_detokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join([detokenizer.push(ids), detokenizer.finish()]) == text


def test_special_tokens_come_first_and_are_found_in_a_text(tokenizer):
    assert tokenizer.encode("<s>[INST]on[/INST]</s>", add_special_tokens=False) == [
        1, 3, SPECIALS + tokens().index(b"on"), 4, 2,
    ]  # fmt: skip
    assert tokenizer.encode("on")[0] == 1
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 11)
    assert tokenizer.convert_ids_to_tokens([20, 29]) == ["<SPECIAL_20>", "<SPECIAL_29>"]
    assert tokenizer.decode([1, 3, SPECIALS + 97, 2], skip_special_tokens=True) == "a"
    assert len(tokenizer) == SPECIALS + len(tokens())


def test_newer_files_name_their_special_tokens(tmp_path):
    named = [
        {"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(["<unk>", "<s>"])
    ]
    named.append({"rank": 5, "token_str": "[THINK]", "is_control": True})
    made = load_tokenizer(write_tekken(tmp_path, specials=8, special_tokens=named))
    assert made.convert_ids_to_tokens([1, 2, 5, 7]) == [
        "<s>",
        "<SPECIAL_2>",
        "[THINK]",
        "<SPECIAL_7>",
    ]
    assert made.encode("[THINK]a") == [1, 5, 8 + 97]


def test_a_vocabulary_is_cut_to_its_default_size(tmp_path):
    data = tekken()
    data["config"]["default_vocab_size"] -= 5
    (tmp_path / "tekken.json").write_text(json.dumps(data))
    assert len(load_tokenizer(tmp_path)) == SPECIALS + len(tokens()) - 5


def test_tokenizer_json_wins_unless_mistral_is_demanded(tmp_path):
    import quire.embedded

    write_tekken(tmp_path)
    tokenizer_json = quire.embedded.path() / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
    assert load_tokenizer(tmp_path).bos_token_id is None
    assert load_tokenizer(tmp_path, "mistral").bos_token_id == 1
    (tmp_path / "tekken.json").unlink()
    with pytest.raises(ConfigError, match=r"no tekken.json in .* tokenizer_mode=mistral reads"):
        load_tokenizer(tmp_path, "mistral")


def test_a_chat_template_beside_it_is_used_and_a_missing_one_is_named(tmp_path):
    write_tekken(tmp_path)
    messages = [{"role": "user", "content": "on"}]
    with pytest.raises(Exception, match="has no chat template"):
        load_tokenizer(tmp_path).apply_chat_template(messages)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    )
    made = load_tokenizer(tmp_path)
    assert made.apply_chat_template(messages, tokenize=False) == "<s>[INST]on[/INST]"
    assert made.apply_chat_template(messages)[:2] == [1, 3]


def changed(**more):
    data = tekken()
    for path, value in more.items():
        *path, last = path.split("__")
        at = data
        for key in path:
            at = at[int(key)] if key.isdigit() else at[key]
        at[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "is not a tokenizer of Mistral: KeyError"),
        ({"config": 5}, "is not a tokenizer of Mistral"),
        (changed(config__pattern="("), "is not a tokenizer of Mistral"),
        (changed(config__default_num_special_tokens=-1), "default_num_special_tokens is -1"),
        (changed(config__default_vocab_size=10**9), "default_vocab_size is 1000000000"),
        (changed(config__default_vocab_size=2000), "tokens; it must have all"),
        (changed(config__default_num_special_tokens=5), "ranks outside of 0 to 4"),
        (changed(vocab__3__token_bytes="?"), "token_bytes of rank 3 is not base64"),
        (changed(vocab__3__token_bytes=""), "different bytes"),
        (changed(vocab__3__rank=4), "different bytes"),
        (changed(vocab__3__token_bytes=base64.b64encode(b"a").decode()), "different bytes"),
        (changed(special_tokens=[{"rank": 0, "token_str": "a"}] * 2), "the same rank"),
        (tekken(special_tokens=[{"rank": i, "token_str": "b"} for i in (0, 1)]), "the same name"),
        (tekken(special_tokens=[{"rank": 0, "token_str": "a"}]), "spelled like another token"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused_in_one_sentence(tmp_path, data, words):
    (tmp_path / "tekken.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=words) as error:
        load_tokenizer(tmp_path)
    assert "tekken.json" in str(error.value)
