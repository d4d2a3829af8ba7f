"""Tokenizers from metadata alone, against the libraries that made them."""

import json
import random

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from quire.errors import ConfigError
from quire.text.tokenizing import gguf_tokenizer
from quire.text.tokenizing.gguf_tokenizer import tokenizer_of
from quire.text.tokenizing.tokenizer import load_tokenizer

TEXTS = (
    "Hello world, it's 12345 o'clock.\n\n  Two  spaces\tand tabs",
    "Grüße aus Köln — 日本語 和 中文 🙂🙂",
    "def f(x):\n    return x ** 2  # comment\r\n",
    "", " ", "   lead", "trail   ", "I'LL we'Ve DON'T", "\u0000\u200b", "a<user>b <s> c</s>",
)  # fmt: skip
SPLITS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "qwen2": GGUF_PRE_TOKENIZER_SPLITS["qwen2"],
    "llama-bpe": GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"],
    "gpt-4o": GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"],
}


def corpus():
    words = random.Random(3).choices([*" ".join(TEXTS).split(), "the", "and", "of", "1999"], k=3000)
    return [" ".join(words[i : i + 12]) for i in range(0, len(words), 12)]


def write(folder, metadata):
    folder.mkdir()
    made, settings = tokenizer_of(metadata)
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


@pytest.mark.parametrize("pre", SPLITS)
def test_bytes(tmp_path, pre):
    source = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    split = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")
    source.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    source.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<s>", "</s>"],
    )  # fmt: skip
    source.train_from_iterator(corpus(), trainer)
    source.add_tokens([AddedToken("<user>", normalized=False)])
    vocab = source.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(source.to_str())["model"]["merges"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [{"<s>": 3, "</s>": 3, "<user>": 4}.get(t, 1) for t in tokens],
        "tokenizer.ggml.merges": [" ".join(one) for one in merges],
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["</s>"],
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    ours = write(tmp_path / "made", metadata)
    for text in TEXTS:
        ids = source.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.backend.decode(ids, True, True) == source.decode(ids)
    first = [vocab["<s>"]] if pre == "llama-bpe" else []
    assert ours.encode("the", add_special_tokens=True) == [*first, *source.encode("the").ids]
    metadata["tokenizer.ggml.add_bos_token"] = not first
    metadata["tokenizer.ggml.add_eos_token"] = True
    other = write(tmp_path / "other", metadata).encode("the", add_special_tokens=True)
    assert other == [*([] if first else [vocab["<s>"]]), *source.encode("the").ids, vocab["</s>"]]
    assert (
        "messages"
        in json.loads((tmp_path / "made/tokenizer_config.json").read_text())["chat_template"]
    )


def test_splits_are_those_that_transformers_has():
    ours = {name: one.patterns for name, one in gguf_tokenizer._SPLITS.items()}
    both = ours.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert len(both) >= 10
    for name in both:
        assert ours[name] == (GGUF_PRE_TOKENIZER_SPLITS[name],), name


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path, prefix):
    (tmp_path / "text").write_text("\n".join(corpus()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=420,
        model_type="bpe", byte_fallback=True, add_dummy_prefix=prefix, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        user_defined_symbols=["<user>"], character_coverage=0.99,
    )  # fmt: skip
    source = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    count = source.vocab_size()

    def kind(i):
        checks = (source.is_unknown, source.is_control, source.is_byte)
        found = [number for check, number in zip(checks, (2, 3, 6)) if check(i)]
        return found[0] if found else 4 if source.id_to_piece(i) == "<user>" else 1

    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [source.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [source.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(count)],
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.bos_token_id": source.bos_id(),
        "tokenizer.ggml.unknown_token_id": source.unk_id(),
    }
    ours = write(tmp_path / "made", metadata)
    for text in TEXTS:
        if "<" in text:
            continue  # special tokens in a text are tokens here, and text there
        ids = source.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text, add_special_tokens=True) == [source.bos_id(), *ids]
        assert ours.backend.decode(ids, True, True) == text
    user = source.piece_to_id("<user>")
    assert user in ours.encode("a<user>b", add_special_tokens=False)


GOOD = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "model is 'bert'; supported: gpt2, llama"),
        ({"tokenizer.ggml.pre": "new"}, "pre is 'new'; supported: .*qwen2"),
        ({"tokenizer.ggml.tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"no tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a", "ab"]}, "a token twice"),
        ({"tokenizer.ggml.token_type": [1]}, "one entry per token"),
        ({"tokenizer.ggml.merges": None}, r"no tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.merges": ["b a"]}, "makes no token"),
        ({"tokenizer.ggml.merges": ["a"]}, "makes no token|not two texts"),
        ({"tokenizer.ggml.merges": [3]}, "not two texts"),
        ({"tokenizer.ggml.model": "llama"}, "scores has not one entry"),
    ],
)
def test_what_is_refused(changes, message):
    tokenizer_of(GOOD)
    with pytest.raises(ConfigError, match=message):
        tokenizer_of(GOOD | changes)
