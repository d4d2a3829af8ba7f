"""Every encoder has the hidden states and the heads of transformers' model of the same weights."""

import functools
import json

import pytest
import torch

from quire.config.model_identity import resolve_identity
from quire.kernels.native.library import available
from quire.models.build import read_model_config
from tests.cpu.encoders.tiny_encoders import LABELS, VARIANTS, hidden_of, ours, texts_of, write_peer

pytestmark = pytest.mark.sampled(3)

TOLERANCE = 1e-5
BF16_DRIFT = 1e-3  # 1 - cosine of the mean state, at worst


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(variant, head) -> (transformers' model, our model, our config, folder); a few are kept."""

    @functools.lru_cache(maxsize=4)
    def pair(variant, head="none"):
        folder = tmp_path_factory.mktemp(f"{variant}_{head}")
        theirs = write_peer(folder, variant, head)
        return theirs, *ours(folder, head), folder

    return pair


def lengths_of(config):
    return (1, 2, 33, config.max_len, 7)


def typed(theirs, config, texts):
    """Token types of each text, as of a pair; None if the model has one type."""
    if getattr(theirs.config, "type_vocab_size", 1) < 2:
        return None
    return [[0] * (len(text) // 2) + [1] * (len(text) - len(text) // 2) for text in texts]


@torch.inference_mode()
def their(theirs, ids, types=None):
    """The output of transformers' model for one text."""
    extra = {} if types is None else {"token_type_ids": torch.tensor([types])}
    return theirs(input_ids=torch.tensor([ids]), **extra)


@pytest.mark.parametrize("variant", VARIANTS, scope="class")
class TestVariant:
    @pytest.mark.slow("the first imports transformers")
    def test_hidden_states_equal_those_of_transformers(self, variant, pairs):
        theirs, model, config, _ = pairs(variant)
        texts = texts_of(lengths_of(config), config.vocab)
        for types in (None, typed(theirs, config, texts)):
            got = hidden_of(model, texts, types)
            for at, ids in enumerate(texts):
                want = their(theirs, ids, types and types[at]).last_hidden_state[0]
                worst = (got[at] - want).abs().max().item()
                assert worst < TOLERANCE, f"{len(ids)} tokens: {worst}"

    def test_a_text_has_the_same_states_alone_and_in_company(self, variant, pairs):
        theirs, model, config, _ = pairs(variant)
        texts = texts_of(lengths_of(config), config.vocab)
        types = typed(theirs, config, texts)
        got = hidden_of(model, texts, types)
        for at, text in enumerate(texts):
            (alone,) = hidden_of(model, [text], types and [types[at]])
            assert (got[at] - alone).abs().max().item() <= (0 if available() else 1e-6)
            (untyped,) = hidden_of(model, [text])
            (zeros,) = hidden_of(model, [text], [[0] * len(text)])
            assert torch.equal(untyped, zeros)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("head", ["classify", "token_classify"])
    def test_heads_equal_those_of_transformers(self, variant, head, pairs):
        theirs, model, config, _ = pairs(variant, head)
        texts = texts_of((2, 33, 5), config.vocab)
        types = typed(theirs, config, texts)
        for at, states in enumerate(hidden_of(model, texts, types)):
            want = their(theirs, texts[at], types and types[at]).logits[0]
            with torch.inference_mode():
                got = model.classify(states[:1] if head == "classify" else states)
            assert got.shape == (1 if head == "classify" else len(texts[at]), LABELS)
            assert got.dtype == torch.float32
            assert (got - want).abs().max().item() < TOLERANCE

    def test_logits_of_tokens_equal_those_of_transformers(self, variant, pairs):
        theirs, model, config, _ = pairs(variant, "lm")
        (text,) = texts_of((33,), config.vocab)
        with torch.inference_mode():
            got = model.logits(hidden_of(model, [text])[0])
        assert (got - their(theirs, text).logits[0]).abs().max().item() < 1e-4

    def test_bfloat16_drifts_little(self, variant, pairs, record_property):
        _, model, config, folder = pairs(variant)
        half, _ = ours(folder, dtype=torch.bfloat16)
        texts = texts_of(lengths_of(config), config.vocab)
        pooled = [
            torch.stack([states.float().mean(0) for states in hidden_of(one, texts)])
            for one in (model, half)
        ]
        drift = (1 - torch.cosine_similarity(*pooled)).max().item()
        record_property("bf16_drift", drift)
        print(f"bf16 drift {variant}: {drift:.5f}")
        assert drift < BF16_DRIFT

    def test_config_reads_alike_as_written_and_as_saved(self, variant, pairs):
        _, _, _, folder = pairs(variant)
        saved = json.loads((folder / "config.json").read_text())
        written = VARIANTS[variant] | {"dtype": "float32"}
        got, want = (read_model_config(resolve_identity(hf)) for hf in (saved, written))
        assert got == want
