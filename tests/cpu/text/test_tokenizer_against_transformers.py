"""quire's tokenizers agree with those of transformers on the same folder."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire.text.tokenizing.tokenizer import load_tokenizer
from tests.pure.text.made import MADE, NASTY, folder_of
from tests.pure.text.templates import CONVERSATIONS, TOOL

transformers = pytest.importorskip("transformers")


def both(folder, **kwargs):
    peer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    return load_tokenizer(folder, **kwargs), peer


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made = {}
    for name in MADE:
        made[name] = both(folder_of(tmp_path_factory.mktemp(name), name))
    return made


@pytest.fixture(scope="module")
def embedded():
    return both(Path(quire.__file__).parent / "embedded")


def assert_same(ours, peer, text):
    for special in (True, False):
        ids = peer.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids
        assert ours(text, add_special_tokens=special)["input_ids"] == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == peer.decode(
            ids, skip_special_tokens=skip
        )
    assert ours.tokenize(text) == peer.tokenize(text)
    assert ours.convert_ids_to_tokens(ids) == peer.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("text", NASTY)
def test_nasty_texts_are_read_alike(pairs, name, text):
    assert_same(*pairs[name], text)


@pytest.mark.parametrize("name", MADE)
@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_text_is_read_alike(pairs, name, text):
    assert_same(*pairs[name], text.encode("utf-8", "ignore").decode())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MADE)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_ids_are_decoded_alike(pairs, name, data):
    ours, peer = pairs[name]
    ids = data.draw(st.lists(st.integers(0, len(ours) - 1), max_size=12))
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == peer.decode(
            ids, skip_special_tokens=skip
        )


@pytest.mark.parametrize("name", MADE)
def test_the_facts_about_a_vocabulary_are_alike(pairs, name):
    ours, peer = pairs[name]
    assert len(ours) == len(peer)
    assert ours.vocab_size == peer.vocab_size
    assert ours.get_vocab() == peer.get_vocab()
    assert ours.eos_token == peer.eos_token
    assert ours.eos_token_id == peer.eos_token_id
    assert ours.all_special_ids == peer.all_special_ids
    assert ours.get_added_vocab() == peer.get_added_vocab()


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>"},
        {"add_bos_token": False, "bos_token": "<s>"},
        {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>"},
        {"bos_token": "<s>"},
        {
            "bos_token": {
                "content": "<begin>",
                "lstrip": False,
                "rstrip": True,
                "__type": "AddedToken",
            }
        },
        {"pad_token": "<pad>", "additional_special_tokens": ["<a>", "<b>"]},
        {"split_special_tokens": True},
        {"clean_up_tokenization_spaces": True},
    ],
    ids=lambda config: "-".join(config),
)
@pytest.mark.parametrize("name", ["llama", "byte_level", "unigram"])
def test_settings_beside_the_tokenizer_count_alike(tmp_path, name, config):
    ours, peer = both(folder_of(tmp_path, name, **config))
    for text in ("hello world , it 's", "<s>hello</s> <begin>  the <a><pad>x", "<|im_end|>x"):
        assert_same(ours, peer, text)
    assert ours.bos_token_id == peer.bos_token_id
    assert ours.pad_token_id == peer.pad_token_id
    assert sorted(ours.all_special_ids) == sorted(peer.all_special_ids)


def test_tokens_added_by_the_settings_are_added(tmp_path):
    flags = {"lstrip": False, "rstrip": False, "single_word": False}
    added = {
        "500": {"content": "<tool>", "normalized": False, "special": True, **flags},
        "501": {"content": "plain", "normalized": True, "special": False, **flags},
    }
    ours, peer = both(folder_of(tmp_path, "byte_level", added_tokens_decoder=added))
    assert_same(ours, peer, "a <tool>plain</tool> plain")
    assert ours.get_added_vocab() == peer.get_added_vocab()


def test_special_tokens_map_fills_what_the_config_leaves_open(tmp_path):
    folder = folder_of(tmp_path, "llama", eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert load_tokenizer(folder).eos_token_id == 2


def test_settings_of_a_training_run_do_not_cut_or_pad(tmp_path):
    folder = folder_of(tmp_path, "byte_level")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    raw["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    assert load_tokenizer(folder).encode("hello the world") == load_tokenizer(
        folder_of(tmp_path / "plain", "byte_level")
    ).encode("hello the world")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_truncation_keeps_the_special_tokens_as_transformers_does(pairs, side, most):
    ours, peer = pairs["llama"]
    peer.truncation_side = side
    text = "hello the world and hello"
    expected = peer(text, truncation=True, max_length=most)["input_ids"]
    assert ours.encode(text, True, True, most, truncation_side=side) == expected


def test_padding_is_alike(pairs):
    ours, peer = pairs["byte_level"]
    ours = load_tokenizer(ours.name_or_path)
    ours.pad_token = peer.pad_token = "<|endoftext|>"
    texts = ["hello", "hello the world"]
    for side in ("left", "right"):
        ours.padding_side = peer.padding_side = side
        expected = peer(texts, padding=True)
        assert ours(texts, padding=True).input_ids == expected["input_ids"]
        assert ours(texts, padding=True).attention_mask == expected["attention_mask"]


def test_threads_may_share_a_tokenizer(pairs):
    ours, _ = pairs["byte_level"]
    expected = [ours.encode(text) for text in NASTY]
    wrong = []

    def work():
        for _ in range(20):
            made = [ours.encode(text) for text in NASTY]
            made_cut = [ours.encode(text, True, True, 3) for text in NASTY]
            if made != expected or any(len(ids) > 3 for ids in made_cut):
                wrong.append(made)
            for ids in expected:
                ours.decode(ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("text", NASTY)
def test_the_embedded_models_tokenizer_is_read_alike(embedded, text):
    assert_same(*embedded, text)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}, {"enable_thinking": False}])
def test_the_embedded_models_conversations_are_alike(embedded, conversation, options):
    ours, peer = embedded
    messages = CONVERSATIONS[conversation]
    options = options | {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(messages, **options) == peer.apply_chat_template(
        messages, **options
    )


# -- tokenizers without a tokenizer.json -------------------------------------------------------


def test_vocab_and_merges_are_read_by_transformers(tmp_path, pairs):
    ours, _ = pairs["byte_level"]
    raw = json.loads(ours.backend.tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(raw["vocab"]), encoding="utf-8")
    merges = [" ".join(pair) for pair in raw["merges"]]
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8"
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "GPT2Tokenizer",
                "eos_token": "<|im_end|>",
                "unk_token": "<|endoftext|>",
            }
        )
    )
    old = load_tokenizer(tmp_path)
    assert old.eos_token_id == ours.eos_token_id
    text = "hello world, naïve 你好"
    assert old.encode(text) == ours.encode(text)
    assert old.decode(old.encode(text)) == text
    assert old.pieces is not None  # it goes the fast way


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory):
    spm = pytest.importorskip("sentencepiece")
    from tests.pure.text.made import CORPUS

    folder = tmp_path_factory.mktemp("spm")
    with open(folder / "tokenizer.model", "wb") as file:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 50), model_writer=file, vocab_size=400, model_type="bpe",
            byte_fallback=True, add_dummy_prefix=True, minloglevel=2,
        )  # fmt: skip
    config = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, "add_eos_token": False, "legacy": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("mode", ["auto", "slow"])
def test_a_sentencepiece_model_is_read_by_transformers(sentencepiece_folder, mode):
    from quire.text.tokenizing.detokenizer import Detokenizer

    tokenizer = load_tokenizer(sentencepiece_folder, mode=mode)
    ids = tokenizer.encode("hello world 🦊 the")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello world 🦊 the"
    stream = Detokenizer(tokenizer, ids[:1])
    assert "".join(stream.push([i]) for i in ids[1:]) + stream.finish() == "hello world 🦊 the"


SLOW = '''
from transformers import PreTrainedTokenizer


class LetterTokenizer(PreTrainedTokenizer):
    """Every letter a token."""

    def __init__(self, **kwargs):
        self.letters = ["<eos>", *"abcdefghijklmnopqrstuvwxyz "]
        kwargs["eos_token"] = "<eos>"
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return {c: i for i, c in enumerate(self.letters)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token)

    def _convert_id_to_token(self, index):
        return self.letters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()
'''


@pytest.fixture
def remote_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "letters.py").write_text(SLOW)
    config = {
        "auto_map": {"AutoTokenizer": ["letters.LetterTokenizer", None]},
        "tokenizer_class": "LetterTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_code_of_the_repository_needs_trust(remote_folder):
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load_tokenizer(remote_folder)


def test_a_tokenizer_in_python_has_the_same_face(remote_folder):
    from quire.text.tokenizing.detokenizer import Detokenizer

    tokenizer = load_tokenizer(remote_folder, trust_remote_code=True)
    assert not tokenizer.is_fast
    ids = tokenizer.encode("hello world")
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode([*ids, 0], skip_special_tokens=True) == "hello world"
    assert tokenizer.convert_ids_to_tokens(ids[:2]) == ["h", "e"]
    assert tokenizer.convert_tokens_to_ids("h") == ids[0]
    assert tokenizer.encode("hello", True, True, 2, truncation_side="left") == ids[3:5]
    stream = Detokenizer(tokenizer, ids[:3])
    assert "".join(stream.push([i]) for i in [*ids[3:], 0]) == "lo world"
    assert tokenizer.decode([10**6]) == ""
