"""Tokenizers of encoders: BERT's from vocab.txt alone, and lower case of sentence-transformers."""

import json

import pytest

from quire.errors import ConfigError
from quire.text.tokenizing.tokenizer import load_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [
    *"abcdefghijklmnopqrstuvwxyzé.,'A日",
    "##a",
    "##b",
    "##l",
    "##o",
    "hel",
    "##lo",
    "wor",
    "##ld",
]
TEXTS = [
    "", "hello world", "Hello, World.", "Héllo wörld", "hello [MASK] world", "a  b\tc\n", "日本 a",
    "[CLS] abc [SEP]", "zzzz 'l", "hello\u00a0world\u200b", "A" * 120, "no\u0000thing",
]  # fmt: skip


def bert_folder(folder, pieces=(*SPECIAL, *PIECES), hf=None, **settings):
    (folder / "config.json").write_text(json.dumps(hf or {"model_type": "bert"}))
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.slow("the first of them imports transformers")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_lower_case": False, "tokenizer_class": "BertTokenizer"},
        {"strip_accents": False, "do_basic_tokenize": True, "never_split": None},
        {"tokenize_chinese_chars": False, "tokenizer_class": "DistilBertTokenizer"},
        {"mask_token": "hel", "additional_special_tokens": ["wor"]},
    ],
    ids=lambda s: next(iter(s), "none"),
)
def test_a_vocabulary_alone_is_berts_tokenizer(tmp_path, settings):
    from transformers import AutoTokenizer

    folder = bert_folder(tmp_path, **settings)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        pair = ours.backend.tokenizer.encode(text, "a b")
        other = theirs(text, "a b")
        assert pair.ids == other["input_ids"]
        assert pair.type_ids == other.get("token_type_ids", pair.type_ids)
    for name in ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id"), name
    assert len(ours) == len(theirs)
    ids = ours.encode("hello world")
    assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)


def test_a_vocabulary_that_is_not_berts(tmp_path):
    with pytest.raises(ConfigError, match=r"vocab.txt has no \[SEP\], which the tokenizer needs"):
        load_tokenizer(bert_folder(tmp_path, ["[UNK]", "[CLS]", "a"]))
    (tmp_path / "vocab.txt").write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="is not a tokenizer of BERT"):
        load_tokenizer(bert_folder(tmp_path, strip_accents="yes"))


@pytest.mark.slow("it imports sentence_transformers")
@pytest.mark.parametrize("cased", [True, False])
def test_lower_case_is_that_of_sentence_transformers(tmp_path, cased):
    from sentence_transformers.base.modules import Transformer
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                        intermediate_size=8)  # fmt: skip
    BertModel(config).save_pretrained(tmp_path)
    bert_folder(tmp_path, hf=config.to_dict(), do_lower_case=not cased, strip_accents=False)
    theirs = Transformer(str(tmp_path), do_lower_case=True)
    ours = load_tokenizer(tmp_path, lower_case=True)
    for text in TEXTS:
        if text:
            assert ours.encode(text) == theirs.tokenizer(text)["input_ids"], text
    if cased:
        assert load_tokenizer(tmp_path).encode("HEL") != ours.encode("HEL") == ours.encode("hel")
