"""LLM.embed, classify, score, encode and reward against sentence-transformers and transformers."""

import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import quire.llm.pooling
from quire import LLM, PoolingParams, RequestError, SamplingParams, TooLong
from quire.text.score_prompts import QWEN3_INSTRUCTION
from tests.cpu.pooling.folders import encoder_folder, st_folder, texts
from tests.cpu.tiny_models import SHAPES, write_model

pytestmark = pytest.mark.sampled(2)

QUIET = {"dtype": "float32", "use_tqdm_on_load": False}
QUERY, DOCUMENTS = (
    "what is the time of day",
    ["the time", "only now and then", "they were out " * 9],
)


def vectors(outputs):
    return np.array([one.outputs.embedding for one in outputs])


def scores(outputs):
    return [one.outputs.score for one in outputs]


# -- embeddings ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """(sentence-transformers' model, ours) with prompts, a Dense layer and no normalization."""
    folder = tmp_path_factory.mktemp("embedder") / "bert"
    theirs = st_folder(
        folder, "bert", dense=[(24, torch.nn.Tanh())],
        prompts={"query": "the ", "document": "of and "}, default_prompt_name="document",
    )  # fmt: skip
    return theirs, LLM(str(folder), **QUIET)


@pytest.mark.slow("the first of them imports sentence-transformers")
def test_embeddings_are_those_of_sentence_transformers(embedder):
    theirs, llm = embedder
    given = texts(30)
    got = llm.embed(given, truncate_prompt_tokens=-1, use_tqdm=False)
    want = theirs.encode(given, prompt_name="document")
    np.testing.assert_allclose(vectors(got), want, atol=2e-5)
    assert got[0].outputs.hidden_size == 24
    query = llm.embed(given[:5], pooling_params=PoolingParams(prompt_name="query"), use_tqdm=False)
    np.testing.assert_allclose(
        vectors(query), theirs.encode(given[:5], prompt_name="query"), atol=2e-5
    )


def test_a_text_has_the_same_vector_in_any_company(embedder):
    _, llm = embedder
    given = texts(30)[:9]
    together = vectors(llm.embed(given, use_tqdm=False))
    alone = vectors([llm.embed(one, use_tqdm=False)[0] for one in given])
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_scores_compare_a_query_with_documents(embedder):
    theirs, llm = embedder
    want = theirs.similarity(theirs.encode_query([QUERY]), theirs.encode_document(DOCUMENTS))[
        0
    ].tolist()
    got = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    assert scores(got) == pytest.approx(want, abs=1e-5)
    alone = [llm.score(QUERY, one, use_tqdm=False)[0].outputs.score for one in DOCUMENTS]
    assert scores(got) == pytest.approx(alone, abs=1e-6)
    tokens = llm.get_tokenizer()
    assert got[0].prompt_token_ids == tokens.encode("the " + QUERY) + tokens.encode(
        "of and " + DOCUMENTS[0]
    )


def test_encode_returns_a_tensor_of_the_models_own_task(embedder):
    _, llm = embedder
    (vector,) = llm.encode(DOCUMENTS[0], use_tqdm=False)
    (tokens,) = llm.encode(DOCUMENTS[0], pooling_task="token_embed", use_tqdm=False)
    assert isinstance(vector.outputs.data, torch.Tensor)
    assert (
        vector.outputs.data.tolist() == llm.embed(DOCUMENTS[0], use_tqdm=False)[0].outputs.embedding
    )
    assert tokens.outputs.data.shape == (len(tokens.prompt_token_ids), 24)
    vector.outputs.data.add_(1)  # the caller's own


def test_one_bad_prompt_changes_nothing(embedder):
    _, llm = embedder
    with pytest.raises(TooLong, match=r"^prompts\[1\]: .*truncate_prompt_tokens"):
        llm.embed(["a", "the " * 200], use_tqdm=False)
    with pytest.raises(RequestError, match="tokenization_kwargs must not hold 'x'"):
        llm.embed("a", tokenization_kwargs={"x": 1})
    (one,) = llm.embed(
        "the of and to in", tokenization_kwargs={"truncate_prompt_tokens": 4}, use_tqdm=False
    )
    assert len(one.prompt_token_ids) == 4


def test_an_error_or_ctrl_c_ends_all_requests_of_a_call(embedder):
    _, llm = embedder

    def interrupt(update):
        raise KeyboardInterrupt

    inputs = list(llm.llm_engine.pooling_inputs.iter_prompts(["the of and"] * 300))
    requests = [request for one in inputs for request in one.requests]
    with pytest.raises(KeyboardInterrupt):
        llm.llm_engine.pool(requests, interrupt)
    assert llm.llm_engine.engine.empty
    with pytest.raises(RequestError, match="is in use"):
        llm.llm_engine.pool([requests[0], requests[0]])
    assert llm.llm_engine.engine.empty
    assert len(llm.embed(["a", "b"], use_tqdm=False)) == 2


def test_progress_is_shown(embedder, capsys):
    _, llm = embedder
    llm.embed(["a", "b"])
    assert "Processed prompts: 100%" in capsys.readouterr().err


def test_calls_of_other_kinds_of_models_say_how_to_start_them(embedder):
    _, llm = embedder
    with pytest.raises(ValueError, match="--runner pooling --convert classify"):
        llm.classify("a")
    with pytest.raises(ValueError, match="embed"):
        llm.generate("a")
    with pytest.raises(ValueError, match="embed"):
        llm.chat([{"role": "user", "content": "a"}])


def test_a_long_text_is_the_average_of_its_parts(tmp_path):
    theirs = st_folder(tmp_path / "long", "bert", normalize=True)
    limit = 20
    llm = LLM(
        str(tmp_path / "long"), max_model_len=limit, **QUIET,
        pooler_config={"enable_chunked_processing": True, "max_embed_len": 90},
    )  # fmt: skip
    text = texts(30)[8]  # 60 words
    ids = theirs.tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = [ids[i : i + limit - 2] for i in range(0, len(ids), limit - 2)]
    assert len(parts) > 2
    raw = [
        theirs[0].auto_model(torch.tensor([[2, *part, 3]])).last_hidden_state[0].mean(0)
        for part in parts
    ]
    weights = torch.tensor([len(part) + 2.0 for part in parts])
    want = torch.nn.functional.normalize((torch.stack(raw) * weights[:, None]).sum(0), dim=0)
    (got,) = llm.embed(text, use_tqdm=False)
    np.testing.assert_allclose(got.outputs.embedding, want.detach().numpy(), atol=1e-5)
    with pytest.raises(TooLong, match="length is 90 tokens"):
        llm.embed("the " * 100, use_tqdm=False)


# -- labels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "types"), [("bert", True), ("bert", False), ("roberta", False)]
)
def test_scores_are_those_of_a_cross_encoder(variant, types, tmp_path):
    from sentence_transformers import CrossEncoder

    folder = tmp_path / variant
    encoder_folder(folder, variant, "classify", num_labels=1)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["model_input_names"] = ["input_ids", "attention_mask", *["token_type_ids"] * types]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = CrossEncoder(str(folder), device="cpu")
    llm = LLM(str(folder), **QUIET)
    want = theirs.predict([(QUERY, one) for one in DOCUMENTS]).tolist()
    assert scores(llm.score(QUERY, DOCUMENTS, use_tqdm=False)) == pytest.approx(want, abs=1e-5)
    queries = ["now", QUERY, "now"]
    want = theirs.predict(list(zip(queries, DOCUMENTS))).tolist()
    assert scores(llm.score(queries, DOCUMENTS, use_tqdm=False)) == pytest.approx(want, abs=1e-5)
    assert len({round(one, 3) for one in want}) == 3
    long = "the of " * 100
    want = theirs.predict([(QUERY, long)]).tolist()
    cut = llm.score(QUERY, long, truncate_prompt_tokens=-1, use_tqdm=False)
    assert scores(cut) == pytest.approx(want, abs=1e-5)
    raw = llm.score(
        QUERY, DOCUMENTS, pooling_params=PoolingParams(activation=False), use_tqdm=False
    )
    want = theirs.predict(
        [(QUERY, one) for one in DOCUMENTS], activation_fn=torch.nn.Identity()
    ).tolist()
    assert scores(raw) == pytest.approx(want, abs=1e-4)


def test_labels_are_those_of_transformers(tmp_path):
    theirs = encoder_folder(tmp_path, "bert", "classify", num_labels=3)
    llm = LLM(str(tmp_path), **QUIET)
    got = llm.classify(DOCUMENTS, use_tqdm=False)
    ids = [llm.get_tokenizer().encode(one) for one in DOCUMENTS]
    want = [theirs(torch.tensor([one])).logits.softmax(-1)[0].tolist() for one in ids]
    assert [one.outputs.probs for one in got] == [pytest.approx(one, abs=1e-5) for one in want]
    assert got[0].outputs.num_classes == 3
    with pytest.raises(ValueError, match="num_labels == 1"):
        llm.score("a", "b")


# -- decoders -----------------------------------------------------------------------------------


def test_a_reranker_that_is_a_decoder_is_asked_in_its_template(tmp_path, caplog):
    folder = tmp_path / "Qwen3-Reranker-tiny"
    write_model(folder, "qwen3", max_position_embeddings=2048, vocab_size=500)
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary.add_tokens(["yes", "no"])
    vocabulary.save(str(folder / "tokenizer.json"))
    with caplog.at_level(logging.INFO, "quire"):
        llm = LLM(str(folder), runner="pooling", convert="classify", **QUIET)
    assert "prompts are written for Qwen3-Reranker" in caplog.text
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = llm.get_tokenizer()
    no, yes = (tokens.convert_tokens_to_ids(one) for one in ("no", "yes"))
    got = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    for document, one in zip(DOCUMENTS, got):
        prompt = tokens.decode(one.prompt_token_ids)
        assert (
            f"<Instruct>: {QWEN3_INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}" in prompt
        )
        logits = theirs(torch.tensor([one.prompt_token_ids])).logits[0, -1]
        want = torch.sigmoid(logits[yes] - logits[no]).item()
        assert one.outputs.score == pytest.approx(want, abs=1e-5)
    again = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    assert all(one.num_cached_tokens > 50 for one in again)
    assert scores(again) == pytest.approx(scores(got), abs=1e-6)


def test_a_model_that_generates_embeds_its_last_token(tmp_path):
    folder = write_model(tmp_path / "llama", "llama")
    llm = LLM(str(folder), **QUIET)
    from transformers import AutoModel

    theirs = AutoModel.from_pretrained(folder, dtype=torch.float32)
    got = llm.embed(DOCUMENTS, use_tqdm=False)
    for one in got:
        state = theirs(torch.tensor([one.prompt_token_ids])).last_hidden_state[0, -1]
        want = torch.nn.functional.normalize(state, dim=0).tolist()
        assert one.outputs.embedding == pytest.approx(want, abs=1e-5)
    assert llm.generate("Hello", use_tqdm=False)[0].finished
    with pytest.raises(ValueError, match="--runner pooling --convert classify"):
        llm.score("a", "b")
    with pytest.raises(ValueError, match="--runner pooling --convert classify"):
        llm.classify("a")


def test_generation_goes_on_while_prompts_are_embedded(tmp_path):
    llm = LLM(str(write_model(tmp_path / "llama", "llama")), **QUIET)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    want = llm.generate("Hello", greedy, use_tqdm=False)[0].outputs[0].token_ids
    llm.enqueue("Hello", greedy, use_tqdm=False)
    llm.embed(["a b c"] * 3, use_tqdm=False)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs[0].token_ids == want


# -- late interaction ---------------------------------------------------------------------------


@pytest.mark.slow("the first of them imports sentence-transformers")
@pytest.mark.parametrize("attend", [True, False])
def test_scores_of_a_colbert_model_are_those_of_sentence_transformers(attend, tmp_path):
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    encoder_folder(tmp_path / "bert", "bert")
    transformer = Transformer(
        str(tmp_path / "bert"), document_length=24,
        query_expansion={"strategy": "fixed", "attend": attend, "length": 16},
    )  # fmt: skip
    width = transformer.get_embedding_dimension()
    dense = Dense(
        width, 24, bias=False, activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings", module_output_name="token_embeddings",
    )  # fmt: skip
    torch.nn.init.normal_(dense.linear.weight, std=width**-0.5)
    modules = [
        transformer, dense, MultiVectorMask(skiplist_words=["the", "x"]),
        Normalize(module_input_name="token_embeddings"),
    ]  # fmt: skip
    theirs = MultiVectorEncoder(
        modules=modules, device="cpu", prompts={"query": "of ", "document": ""}
    )
    theirs.save(str(tmp_path / "colbert"))
    theirs = MultiVectorEncoder(str(tmp_path / "colbert"), device="cpu")
    llm = LLM(str(tmp_path / "colbert"), **QUIET)
    queries, documents = theirs.encode_query([QUERY]), theirs.encode_document(DOCUMENTS)
    (query,) = llm.encode(QUERY, PoolingParams(prompt_name="query"), use_tqdm=False)
    np.testing.assert_allclose(query.outputs.data, queries[0].cpu(), atol=2e-5)
    assert query.outputs.data.shape[0] == 16
    for one, want in zip(llm.embed(DOCUMENTS, use_tqdm=False), documents):
        np.testing.assert_allclose(one.outputs.data, want.cpu(), atol=2e-5)
    want = theirs.similarity(queries, documents)[0].tolist()
    assert scores(llm.score(QUERY, DOCUMENTS, use_tqdm=False)) == pytest.approx(want, abs=1e-4)


def test_a_checkpoint_of_colbert_itself(tmp_path):
    from sentence_transformers import MultiVectorEncoder

    bert = encoder_folder(tmp_path, "bert")
    tensors = {f"bert.{name}": tensor for name, tensor in bert.state_dict().items()}
    tensors["linear.weight"] = torch.randn(16, bert.config.hidden_size) * 0.2
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    stated = {"dim": 16, "query_maxlen": 14, "doc_maxlen": 20, "mask_punctuation": True}
    stated |= {"query_token_id": "[PAD]", "doc_token_id": "[UNK]"}  # any two tokens
    (tmp_path / "artifact.metadata").write_text(json.dumps(stated))
    theirs = MultiVectorEncoder(str(tmp_path), device="cpu")
    llm = LLM(str(tmp_path), **QUIET)
    (query,) = llm.encode(QUERY, PoolingParams(prompt_name="query"), use_tqdm=False)
    np.testing.assert_allclose(query.outputs.data, theirs.encode_query([QUERY])[0], atol=2e-5)
    given = [*DOCUMENTS, "the, time. of day"]
    for one, want in zip(llm.embed(given, use_tqdm=False), theirs.encode_document(given)):
        np.testing.assert_allclose(one.outputs.data, want, atol=2e-5)


# -- reward -------------------------------------------------------------------------------------


def reward_model(folder, architecture, labels):
    """A decoder of transformers and the head of its rewards, saved to the folder."""
    from transformers import AutoModelForCausalLM

    write_model(folder, "qwen2")
    size = SHAPES["qwen2"]["hidden_size"]
    torch.manual_seed(5)
    head = torch.nn.Sequential(
        torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, labels)
    )
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"score.{name}": value for name, value in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    return lambda ids: head(base(torch.tensor([ids])).last_hidden_state[0]).detach()


def test_a_reward_is_that_of_the_last_token(tmp_path):
    theirs = reward_model(tmp_path, "Qwen2ForRewardModel", 1)
    llm = LLM(str(tmp_path), task="reward", **QUIET)
    for one in llm.reward(DOCUMENTS, use_tqdm=False):
        want = theirs(one.prompt_token_ids)[-1]
        torch.testing.assert_close(one.outputs.data, want, atol=1e-4, rtol=1e-4)
    (own,) = llm.encode(DOCUMENTS[0], use_tqdm=False)
    assert own.outputs.data.shape == (1,)


def test_rewards_of_steps_are_those_of_their_tokens(tmp_path):
    theirs = reward_model(tmp_path, "Qwen2ForProcessRewardModel", 2)
    llm = LLM(str(tmp_path), **QUIET)
    tag = llm.get_tokenizer().encode("the")[0]
    params = PoolingParams(step_tag_id=tag, returned_token_ids=[1])
    (whole,) = llm.reward("the time of the day", use_tqdm=False)
    (steps,) = llm.reward("the time of the day", pooling_params=params, use_tqdm=False)
    want = theirs(whole.prompt_token_ids).softmax(-1)
    torch.testing.assert_close(whole.outputs.data, want, atol=1e-4, rtol=1e-4)
    rows = [i for i, token in enumerate(whole.prompt_token_ids) if token == tag]
    assert 0 < len(rows) < len(want)
    torch.testing.assert_close(steps.outputs.data, want[rows][:, [1]], atol=1e-4, rtol=1e-4)


def test_a_bad_prompt_behind_many_ends_its_call_and_names_its_place(embedder, monkeypatch):
    _, llm = embedder
    many = [[5, 6, 7]] * 600 + [[5, 10**6]]
    for checked_first in (False, True):
        if checked_first:
            monkeypatch.setattr(quire.llm.pooling, "MAX_UNCHECKED_PROMPTS", 600)
        with pytest.raises(RequestError, match=r"prompts\[600\]: .* holds 1000000"):
            llm.embed(many, use_tqdm=False)
        assert llm.llm_engine.engine.empty
    found = llm.embed(many[:600], use_tqdm=False)
    assert len({one.request_id for one in found}) == 600
    assert {one.outputs.embedding[0] for one in found} == {found[0].outputs.embedding[0]}
