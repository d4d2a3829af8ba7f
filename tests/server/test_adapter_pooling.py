"""Adapters of pooling models by the name in `model`: embed, classify, score and rerank."""

import httpx
import pytest
import torch

from tests.cpu.pooling.folders import encoder_folder
from tests.cpu.test_lora_pooling import adapted, change_heads
from tests.server.running import SMALL, serving

pytestmark = pytest.mark.slow("starts servers, imports peft and sentence-transformers")

QUERY, TEXTS = "who will find the time", ["many people", "time and time again", "the number two"]


def write(root, head, task, **lora):
    """A model with an adapter, and what each computes of token ids: {name: function}."""
    base = root / "base"
    labels = {} if head == "none" else {"num_labels": 1}
    torch.manual_seed(3)
    model = adapted(
        encoder_folder(base, "bert", head, **labels),
        root / "tuned",
        task,
        change_heads,
        r=4,
        **lora,
    )
    return {"tuned": model, "base": encoder_folder(base, "bert", head, **labels)}


def tokens_of(root, *texts):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(root / "base")(*texts, return_tensors="pt")


def served(root, *flags):
    return serving(
        root / "base", *SMALL, "--served-model-name", "base", "--dtype", "float32",
        "--lora-modules", f"tuned={root / 'tuned'}", *flags,
    )  # fmt: skip


@torch.inference_mode()
def test_pairs_have_the_scores_of_their_adapter(tmp_path):
    models = write(tmp_path, "classify", "SEQ_CLS", target_modules=["query", "value"])
    with served(tmp_path) as running:
        for name in ("tuned", "base", "tuned"):
            want = [
                torch.sigmoid(models[name](**tokens_of(tmp_path, QUERY, text)).logits[0, 0]).item()
                for text in TEXTS
            ]
            given = {"model": name, "text_1": QUERY, "text_2": TEXTS}
            found = httpx.post(f"{running.url}/score", json=given).json()
            assert found["model"] == name
            assert [one["score"] for one in found["data"]] == pytest.approx(want, abs=1e-4)
            given = {"model": name, "query": QUERY, "documents": TEXTS}
            found = httpx.post(f"{running.url}/rerank", json=given).json()
            scores = {one["index"]: one["relevance_score"] for one in found["results"]}
            assert [scores[i] for i in range(3)] == pytest.approx(want, abs=1e-4)
            found = httpx.post(f"{running.url}/classify", json={"model": name, "input": QUERY})
            want = torch.sigmoid(models[name](**tokens_of(tmp_path, QUERY)).logits[0]).tolist()
            assert found.json()["data"][0]["probs"] == pytest.approx(want, abs=1e-4)


@pytest.mark.long("another server")
@torch.inference_mode()
def test_vectors_are_those_of_their_adapter(tmp_path):
    models = write(tmp_path, "none", "FEATURE_EXTRACTION", target_modules=["query", "value"])
    with served(tmp_path, "--runner", "pooling") as running:
        vectors = []
        for name in ("tuned", "base", "tuned"):
            given = {"model": name, "input": QUERY}
            found = httpx.post(f"{running.url}/v1/embeddings", json=given).json()
            vectors.append(found["data"][0]["embedding"])
            state = models[name](**tokens_of(tmp_path, QUERY)).last_hidden_state[0, 0]
            want = torch.nn.functional.normalize(state, dim=0).tolist()
            assert vectors[-1] == pytest.approx(want, abs=1e-4)
        assert vectors[0] == vectors[2] != vectors[1]
