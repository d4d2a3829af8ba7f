"""Tokenizers -> the bytes of every id, which grammars are compiled over."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import quire.embedded
from quire.engine.startup.vocabulary import build_vocabulary
from quire.errors import ConfigError
from quire.text.tokenizing.backends import TokenizersBackend
from quire.text.tokenizing.tokenizer import Tokenizer as Face
from quire.text.tokenizing.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def embedded():
    return load_tokenizer(Path(quire.embedded.__file__).parent)


def test_bytes_of_the_embedded_model_join_to_the_text(embedded):
    made = build_vocabulary(embedded, 4096, [2, 0])
    text = 'A {"b": 1} é日本😀\n\n  def f(): <x>\t'
    ids = embedded.encode(text, add_special_tokens=False)
    assert b"".join(made.tokens[i] for i in ids) == text.encode()
    assert len(made.tokens) == made.size == 4096
    assert {bytes([i]) for i in range(256)} <= set(made.tokens)


def test_marks_are_special_flagged_or_not(embedded):
    made = build_vocabulary(embedded, 4096, [2, 0])
    assert dict(made.special_tokens) == {i: embedded.backend.id_to_token(i) for i in range(9)}
    assert made.eos_token_ids == (2, 0)


def test_ids_without_logits_are_left_out(embedded):
    made = build_vocabulary(embedded, 100, [2, 0, 4000])
    assert len(made.tokens) == 100
    assert made.eos_token_ids == (2, 0)


def test_a_model_may_have_more_logits_than_its_tokenizer_ids(embedded):
    made = build_vocabulary(embedded, 5000, [2])
    assert len(made.tokens) == 4096
    assert made.mask_words == 157


def test_there_must_be_an_end(embedded):
    with pytest.raises(ValueError, match="end token"):
        build_vocabulary(embedded, 4096, [])


def sentencepiece_like():
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "<0x0A>": 3, "<0xE4>": 4, "▁": 5, "▁a": 6, "b": 7}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens([AddedToken(one, special=True) for one in ("<unk>", "<s>", "</s>")])
    made.add_tokens([AddedToken("[INST]", normalized=False), AddedToken("  ", normalized=False)])
    return Face(TokenizersBackend(made))


def test_pieces_with_a_byte_fallback_are_texts_or_bytes():
    made = build_vocabulary(sentencepiece_like(), 10, [2])
    assert made.tokens[3:8] == (b"\n", b"\xe4", b" ", b" a", b"b")
    assert dict(made.special_tokens) == {0: "<unk>", 1: "<s>", 2: "</s>", 8: "[INST]"}
    assert made.tokens[9] == b"  "


def test_word_pieces_are_what_they_add_behind_another():
    vocab = {"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "a": 4, "日": 5}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    made.add_special_tokens([AddedToken("[UNK]"), AddedToken("[SEP]")])
    tokens = build_vocabulary(Face(TokenizersBackend(made)), 6, [1]).tokens
    assert tokens[2:] == (b" play", b"ing", b" a", " 日".encode())


def test_holes_between_ids_stand_for_nothing():
    made = Tokenizer(models.WordLevel({"a": 0, "b": 3, "</s>": 4}, unk_token="a"))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("</s>")])
    assert build_vocabulary(Face(TokenizersBackend(made)), 8, [4]).tokens == (
        b"a",
        b"",
        b"",
        b"b",
        b"</s>",
    )


def of_words(folder, *words):
    made = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    made.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def test_words_without_plain_letters_are_published_after_one_with_letters_and_digits(tmp_path):
    found = build_vocabulary(of_words(tmp_path, "<unk>", "</s>", "w2", "w3"), 4, [1])
    assert found.tokens[3].strip() == b"w3"


def test_a_vocabulary_without_known_texts_is_refused_with_a_reason(tmp_path):
    with pytest.raises(ConfigError, match="no token of this tokenizer is plain letters"):
        build_vocabulary(of_words(tmp_path, "<unk>", "</s>", "##"), 3, [1])
