"""BGE-M3, ColBERT and SPLADE: layers beside those of sentence-transformers, through LLM."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from quire import LLM
from quire.errors import QuireError
from tests import tiers
from tests.cpu.pooling.folders import encoder_folder, st_folder

QUIET = {"dtype": "float32", "use_tqdm_on_load": False}
TEXTS = ["the time of day", "they were out " * 6, "now"]


def data(outputs):
    return [one.outputs.data for one in outputs]


def hidden(theirs, output):
    """Hidden states of transformers for the tokens of one of our outputs."""
    with torch.inference_mode():
        return theirs(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]


def spread(rows):
    """Cosines among texts."""
    rows = functional.normalize(torch.stack(rows), dim=-1)
    return (rows @ rows.T).max() - (rows @ rows.T).min()


def linear_file(path, outputs, inputs, seed):
    layer = torch.nn.Linear(inputs, outputs)
    torch.manual_seed(seed)
    torch.nn.init.normal_(layer.weight, std=0.15)
    torch.nn.init.normal_(layer.bias, std=0.15)
    torch.save(layer.state_dict(), path)
    return layer


@pytest.fixture(scope="module")
def bge_m3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bge") / "m3"
    theirs = st_folder(folder, "xlm_roberta", ["cls"], normalize=True)
    layers = [
        linear_file(folder / "colbert_linear.pt", 64, 64, 3),
        linear_file(folder / "sparse_linear.pt", 1, 64, 7),
    ]
    return theirs, layers, LLM(str(folder), **QUIET)


@pytest.mark.slow("the first of them imports sentence-transformers")
def test_bge_m3_has_dense_vectors_weights_and_vectors_of_tokens(bge_m3):
    theirs, (colbert, sparse), llm = bge_m3
    dense = llm.embed(TEXTS, use_tqdm=False)
    got = np.array([one.outputs.embedding for one in dense])
    np.testing.assert_allclose(got, theirs.encode(TEXTS), atol=1e-5)
    vectors = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
    weights = llm.encode(TEXTS, pooling_task="token_classify", use_tqdm=False)
    for vector, weight in zip(vectors, weights, strict=True):
        states = hidden(theirs[0].auto_model, vector)
        with torch.inference_mode():
            want = functional.normalize(colbert(states), dim=-1)
            torch.testing.assert_close(vector.outputs.data, want, atol=1e-5, rtol=1e-4)
            want = torch.relu(sparse(states))
        torch.testing.assert_close(weight.outputs.data, want, atol=1e-5, rtol=1e-4)
    found = torch.cat(data(weights))
    assert (found > 0).any()
    assert (found == 0).any()
    assert spread([one.mean(0) for one in data(vectors)]) > 0.3


def test_a_layer_of_bge_m3_of_another_shape_stops_the_start(tmp_path):
    st_folder(tmp_path / "m3", "xlm_roberta", ["cls"], normalize=True)
    linear_file(tmp_path / "m3" / "sparse_linear.pt", 2, 64, 4)
    with pytest.raises(QuireError, match=r"sparse_linear\.pt: the layer .* got bias \[2\]"):
        LLM(str(tmp_path / "m3"), **QUIET)


@pytest.mark.parametrize("variant", ["bert", *tiers.long("modernbert")])
def test_a_folder_of_colbert_itself(variant, tmp_path):
    theirs = encoder_folder(tmp_path, variant)
    path = tmp_path / "model.safetensors"
    matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(5)) * 0.15
    names = {f"bert.{name}": value for name, value in load_file(path).items()}
    save_file((names if variant == "bert" else load_file(path)) | {"linear.weight": matrix}, path)
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | {"architectures": ["HF_ColBERT"]}))
    metadata = {"dim": 32, "query_maxlen": 32, "doc_maxlen": 60, "attend_to_mask_tokens": True}
    metadata |= {"query_token_id": "[UNK]", "doc_token_id": "[SEP]"}
    (tmp_path / "artifact.metadata").write_text(json.dumps(metadata))
    llm = LLM(str(tmp_path), **QUIET)
    for one in llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False):
        want = functional.normalize(hidden(theirs, one) @ matrix.T, dim=-1)
        torch.testing.assert_close(one.outputs.data, want, atol=1e-5, rtol=1e-4)


SPLADE = ["bert", *tiers.long("roberta", "distilbert", "mpnet", "modernbert", "electra")]


@pytest.mark.parametrize("variant", SPLADE)
def test_splade_is_that_of_the_sparse_encoder(variant, tmp_path):
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    encoder = tmp_path / "transformers"
    encoder_folder(encoder, variant, "lm")
    pooling = SpladePooling(pooling_strategy="max")
    theirs = SparseEncoder(modules=[MLMTransformer(str(encoder)), pooling], device="cpu").eval()
    theirs.save(str(tmp_path / "splade"))
    want = theirs.encode(TEXTS, convert_to_sparse_tensor=False)
    llm = LLM(str(tmp_path / "splade"), **QUIET)
    got = np.array([one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)])
    np.testing.assert_allclose(got, torch.as_tensor(want).numpy(), atol=1e-4)
    assert (got > 0).any()
