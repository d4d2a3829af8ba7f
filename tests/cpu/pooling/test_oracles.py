"""Vectors, scores and labels of tiny encoders equal those of sentence-transformers and transformers.

The long tier has every encoder with every method, with and without a Dense layer and a norm.
"""

import itertools

import numpy as np
import pytest
import torch

from quire import LLM
from tests import tiers
from tests.cpu.encoders.tiny_encoders import VARIANTS
from tests.cpu.pooling.folders import METHODS, encoder_folder, older_format, st_folder, texts

TOLERANCE = 1e-5
LEAST_SPREAD = 0.3
PRODUCT = list(itertools.product(METHODS, (False, True), (False, True)))
EVERYDAY = [
    ("bert", "cls", False, True),
    ("bert", "max", True, False),
    ("xlm_roberta", "mean", True, True),
    ("distilbert", "lasttoken", True, False),
    ("mpnet", "mean", False, True),
    ("albert_groups", "weightedmean", True, True),
    ("electra", "mean_sqrt_len_tokens", False, False),
]
ALL = [(variant, *case) for variant in VARIANTS for case in PRODUCT]


def llm_of(folder, **settings):
    return LLM(str(folder), dtype="float32", use_tqdm_on_load=False, **settings)


def vectors(llm, given):
    """Embeddings [n, D], all in one call; longer texts are cut as sentence-transformers does."""
    found = llm.embed(given, truncate_prompt_tokens=-1, use_tqdm=False)
    return np.array([one.outputs.embedding for one in found])


def spread(matrix):
    """The range of cosines among different rows."""
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(len(matrix), 1)]
    return cosines.max() - cosines.min()


def compare(theirs, llm):
    given = texts(theirs.max_seq_length)
    want = theirs.encode(given, show_progress_bar=False)
    got = vectors(llm, given)
    assert spread(want) > LEAST_SPREAD, "vectors that are all alike show nothing"
    scale = max(1.0, np.abs(want).max())
    np.testing.assert_allclose(got, want, atol=TOLERANCE * scale)
    return got


@pytest.mark.sampled(2)
@pytest.mark.slow("the first imports sentence-transformers")
@pytest.mark.parametrize(
    ("variant", "method", "dense", "normalize"),
    [*EVERYDAY, *tiers.long(*(case for case in ALL if case not in EVERYDAY))],
)
def test_vectors_are_those_of_sentence_transformers(variant, method, dense, normalize, tmp_path):
    layers = [(48, torch.nn.Tanh())] if dense else []
    theirs = st_folder(tmp_path / "st", variant, (method,), dense=layers, normalize=normalize)
    got = compare(theirs, llm_of(tmp_path / "st"))
    assert got.shape[1] == (48 if dense else 64)
    assert np.allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6) == normalize


@pytest.mark.parametrize("methods", ["cls max mean", *tiers.long("mean", " ".join(METHODS))])
def test_both_formats_of_folders_give_the_same_vectors(methods, tmp_path):
    methods = methods.split()
    layers = [(40, torch.nn.Tanh()), (24, torch.nn.Identity())]
    theirs = st_folder(tmp_path / "st", "bert", methods, dense=layers, normalize=True)
    newer = compare(theirs, llm_of(tmp_path / "st"))
    older_format(tmp_path / "st", methods)
    older = compare(theirs, llm_of(tmp_path / "st"))
    np.testing.assert_array_equal(newer, older)


def test_texts_are_cut_at_the_length_of_the_folder(tmp_path):
    theirs = st_folder(tmp_path / "st", "bert", max_seq_length=20)
    assert theirs.max_seq_length == 20
    compare(theirs, llm_of(tmp_path / "st"))


def test_a_text_has_the_same_vector_alone_and_in_company(tmp_path):
    theirs = st_folder(tmp_path / "st", "xlm_roberta", normalize=True)
    llm, given = llm_of(tmp_path / "st"), texts(theirs.max_seq_length)
    together = vectors(llm, given)
    alone = np.concatenate([vectors(llm, [text]) for text in given])
    np.testing.assert_allclose(together, alone, atol=1e-6)


CROSS = ["bert", "xlm_roberta"]
PAIRED = ["roberta", "distilbert", "electra", "albert", "ernie", "mpnet", "camembert"]


@pytest.mark.parametrize("variant", [*CROSS, *tiers.long(*PAIRED)])
def test_scores_are_those_of_a_cross_encoder(variant, tmp_path):
    from sentence_transformers import CrossEncoder

    encoder_folder(tmp_path, variant, "classify", num_labels=1)
    theirs, llm = CrossEncoder(str(tmp_path), device="cpu"), llm_of(tmp_path)
    query, *documents = texts(60)[3:9]
    pairs = [(query, document) for document in documents]
    want = theirs.predict(pairs, show_progress_bar=False)
    got = [one.outputs.score for one in llm.score(query, documents, use_tqdm=False)]
    assert np.ptp(want) > 0.05, "scores that are all alike show nothing"
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


ACTIVATIONS = {
    "single_label_classification": lambda logits: logits.softmax(-1),
    "multi_label_classification": torch.sigmoid,
    "regression": lambda logits: logits,
}
LABELLED = ["bert", "roberta", *tiers.long(*(one for one in VARIANTS if one not in CROSS))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", LABELLED)
@pytest.mark.parametrize("problem", ACTIVATIONS)
def test_labels_are_those_of_transformers(variant, problem, tmp_path):
    theirs = encoder_folder(tmp_path, variant, "classify", problem_type=problem)
    llm, given = llm_of(tmp_path), texts(50)[:9]
    tokens = llm.get_tokenizer()
    found = llm.classify(given, use_tqdm=False)
    for text, one in zip(given, found, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([tokens.encode(text)])).logits[0]
        want = ACTIVATIONS[problem](logits)
        np.testing.assert_allclose(one.outputs.probs, want, atol=TOLERANCE)


@pytest.mark.parametrize("variant", LABELLED)
def test_labels_of_tokens_are_those_of_transformers(variant, tmp_path):
    theirs = encoder_folder(tmp_path, variant, "token_classify")
    llm, given = llm_of(tmp_path), texts(50)[:9]
    tokens = llm.get_tokenizer()
    found = llm.encode(given, pooling_task="token_classify", use_tqdm=False)
    for text, one in zip(given, found, strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([tokens.encode(text)])).logits[0].softmax(-1)
        np.testing.assert_allclose(one.outputs.data, want, atol=TOLERANCE)
