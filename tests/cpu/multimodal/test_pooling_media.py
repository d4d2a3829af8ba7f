"""Images in prompts of models that embed and score, against the hidden states of transformers."""

import numpy as np
import pytest
import torch

from quire import LLM
from quire.errors import RequestError, Unsupported
from quire.text import marked_media
from tests.cpu.multimodal import families

OPTIONS = {
    "dtype": "float32",
    "kv_cache_memory_bytes": "32MiB",
    "max_model_len": 512,
    "block_size": 16,
    "runner": "pooling",
    "limit_mm_per_prompt": {"image": 2},
}
LABELS = ("w11", "w12")
RERANKER = {
    "architectures": ["LlavaForSequenceClassification"],
    "classifier_from_token": list(LABELS),
    "method": "from_2_way_softmax",
}
DOCUMENT_FIRST = (
    "{% for m in messages %}{% if m.role == 'document' %}w5 {{ m.content }} w6 {% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'query' %}{{ m.content }}{% endif %}"
    "{% endfor %} w7"
)


def photo(height=60, width=80, seed=0):
    return families.image(height, width, seed)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = families.made("llava", tmp_path_factory.mktemp("llava"))
    made.processor.save_pretrained(made.folder)
    return made


@pytest.fixture(scope="module")
def embeds(pair):
    return LLM(str(pair.folder), convert="embed", **OPTIONS)


@pytest.fixture(scope="module")
def ranks(pair):
    return LLM(str(pair.folder), convert="classify", hf_overrides=RERANKER, **OPTIONS)


@torch.inference_mode()
def states(pair, text, images):
    inputs = pair.processor(images=images or None, text=text, return_tensors="pt")
    return pair.theirs.model(**inputs).last_hidden_state[0], inputs


def vector(pair, text, images=()):
    last = states(pair, text, list(images))[0][-1]
    return (last / last.norm()).numpy()


@torch.inference_mode()
def relevance(pair, text, images):
    _, inputs = states(pair, text, images)
    no, yes = (pair.processor.tokenizer.convert_tokens_to_ids(one) for one in LABELS)
    logits = pair.theirs(**inputs).logits[0, -1]
    return torch.sigmoid(logits[yes] - logits[no]).item()


def item(*parts):
    """A text with images, in the form of scores."""
    content = [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": "image_pil", "image_pil": one}
        for one in parts
    ]
    return {"content": content}


def test_embeddings_of_prompts_with_images_are_those_of_transformers(pair, embeds):
    one, two = photo(), photo(100, 50, 1)
    given = [("w3 <image> w4", [one]), ("w9 w8", []), ("<image> w3 <image>", [two, one])] * 3
    prompts = [
        {"prompt": text, **({"multi_modal_data": {"image": images}} if images else {})}
        for text, images in given
    ]
    found = embeds.embed(prompts, use_tqdm=False)
    for output, (text, images) in zip(found, given, strict=True):
        want = vector(pair, text, images)
        assert np.abs(np.array(output.outputs.embedding) - want).max() < 1e-5
    assert len(found[0].prompt_token_ids) == len(states(pair, *given[0])[0])


def test_every_token_has_a_vector_and_an_image_is_not_cut(pair, embeds):
    prompt = {"prompt": "w3 <image> w4", "multi_modal_data": {"image": photo()}}
    (found,) = embeds.encode(prompt, pooling_task="token_embed", use_tqdm=False)
    want, _ = states(pair, "w3 <image> w4", [photo()])
    want = want / want.norm(dim=-1, keepdim=True)
    assert np.abs(np.asarray(found.outputs.data) - want.numpy()).max() < 1e-5
    with pytest.raises(RequestError, match="a prompt with media is not cut"):
        embeds.embed(prompt, truncate_prompt_tokens=9, use_tqdm=False)
    with pytest.raises(RequestError, match="512"):
        embeds.embed(prompt | {"prompt": "w3 <image> " + "w4 " * 600}, use_tqdm=False)
    many = {"prompt": "<image>" * 3, "multi_modal_data": {"image": [photo()] * 3}}
    with pytest.raises(RequestError, match="At most 2 image"):
        embeds.embed(["w3", many], use_tqdm=False)


def test_scores_of_embeddings_are_cosines(pair, embeds):
    one, two = photo(), photo(100, 50, 1)
    found = embeds.score(
        item("w3 ", one, " w4"), ["w9 w8", item(two), item(one, " w4")], use_tqdm=False
    )
    query = vector(pair, "w3 <image> w4", [one])
    others = [vector(pair, "w9 w8"), vector(pair, "<image>", [two])]
    others.append(vector(pair, "<image> w4", [one]))
    assert [one.outputs.score for one in found] == pytest.approx([query @ o for o in others], 1e-4)


def test_a_reranker_reads_images_of_both_sides(pair, ranks):
    one, two = photo(), photo(100, 50, 1)
    found = ranks.score(
        item("w3 ", one), [item(" w9 ", two), " w9", item(" ", two)],
        use_tqdm=False,
    )  # fmt: skip
    want = [
        relevance(pair, "w3 <image> w9 <image>", [one, two]),
        relevance(pair, "w3 <image> w9", [one]),
        relevance(pair, "w3 <image> <image>", [one, two]),
    ]
    assert [one.outputs.score for one in found] == pytest.approx(want, abs=1e-5)
    with pytest.raises(RequestError, match="At most 2 image"):
        ranks.score(item(one), item(two, two), use_tqdm=False)
    with pytest.raises(RequestError, match="max_tokens_per_doc"):
        ranks.score(item(one), "w3", max_tokens_per_doc=3, use_tqdm=False)


def test_a_template_may_write_the_document_first(pair, ranks):
    one, two = photo(), photo(100, 50, 1)
    (found,) = ranks.score(
        item("w3 ", one), item(two, " w9"), chat_template=DOCUMENT_FIRST, use_tqdm=False
    )
    want = relevance(pair, "w5 <image> w9 w6 w3 <image> w7", [two, one])
    assert found.outputs.score == pytest.approx(want, abs=1e-5)
    assert want != pytest.approx(
        relevance(pair, "w5 <image> w9 w6 w3 <image> w7", [one, two]), abs=1e-3
    )


def test_a_placeholder_in_a_text_is_no_image(pair, embeds, ranks):
    (found,) = ranks.score(item("w3 <image> ", photo()), " w4", use_tqdm=False)
    typed = pair.processor.tokenizer.encode("<image>", add_special_tokens=False)
    assert found.prompt_token_ids.count(typed[0]) == 16, "only those of the image"
    with pytest.raises(RequestError, match="1 placeholders"):
        embeds.embed(
            {"prompt": "<image>", "multi_modal_data": {"image": [photo()] * 2}}, use_tqdm=False
        )


def test_a_request_has_a_limit_of_items_and_of_bytes(embeds, monkeypatch):
    monkeypatch.setattr(marked_media, "MAX_ITEMS", 3)
    with pytest.raises(RequestError, match="3 images"):
        embeds.score(item(photo()), [item(photo())] * 3, use_tqdm=False)
    monkeypatch.setattr(marked_media, "MAX_TENSOR_BYTES", 1000)
    with pytest.raises(RequestError, match="send fewer at once"):
        embeds.score(item(photo()), ["w3"], use_tqdm=False)


def test_a_model_of_text_refuses_images():
    llm = LLM(dtype="float32", kv_cache_memory_bytes="8MiB", max_model_len=64)
    with pytest.raises(Unsupported, match="reads text only"):
        llm.embed({"prompt": "a", "multi_modal_data": {"image": photo()}}, use_tqdm=False)
