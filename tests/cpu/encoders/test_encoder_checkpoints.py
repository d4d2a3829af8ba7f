"""Encoders read checkpoints of any age, of any head, and with ranks; they compute in kernels."""

import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.facts import model_facts
from quire.config.model_identity import resolve_identity
from quire.distributed.mesh import Mesh
from quire.errors import ConfigError, WeightError
from quire.kernels.native import library
from quire.models.base import LabelTokens
from quire.models.build import MODELS, build_model, read_model_config
from tests.cpu.encoders.tiny_encoders import VARIANTS, hidden_of, ours, texts_of, write_peer
from tests.cpu.models.test_forward_calls_kernels_only import MEMORY, VIEWS, Recorder
from tests.cpu.models.test_shards import Together

pytestmark = pytest.mark.sampled(4)

FILE = "model.safetensors"
LENGTHS = (2, 33, 5)


def states(folder, head="none", **settings):
    model, config = ours(folder, head, **settings)
    return torch.cat(hidden_of(model, texts_of(LENGTHS, config.vocab)))


def rewrite(folder, change):
    """Give the checkpoint's tensors other names, or others beside them."""
    tensors = {name: value.clone() for name, value in load_file(folder / FILE).items()}
    save_file(change(tensors), folder / FILE)


@pytest.mark.slow("the first imports transformers")
def test_names_as_converted_from_tensorflow(tmp_path):
    write_peer(tmp_path, "bert")
    want = states(tmp_path)

    def older(tensors):
        renamed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): value
            for name, value in tensors.items()
        }
        return renamed | {"embeddings.position_ids": torch.arange(130)[None]}

    rewrite(tmp_path, older)
    assert torch.equal(states(tmp_path), want)


@pytest.mark.parametrize("variant", ["bert", "roberta", "mpnet", "albert"])
def test_tensors_with_and_without_the_name_of_the_model(variant, tmp_path):
    write_peer(tmp_path, variant)
    want = states(tmp_path)
    rewrite(tmp_path, lambda all_: {f"{variant}.{name}": value for name, value in all_.items()})
    assert torch.equal(states(tmp_path), want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_that_are_not_served_are_skipped(variant, tmp_path):
    for head in ("lm", "classify", "token_classify"):
        write_peer(tmp_path, variant, head)
        assert states(tmp_path).isfinite().all()


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        ("bert", "classifier.weight, classifier.bias"),
        ("roberta", "classifier.dense.weight, classifier.dense.bias, classifier.out_proj.weight"),
        ("distilbert", "pre_classifier.weight, pre_classifier.bias, classifier.weight"),
        ("albert", "classifier.weight, classifier.bias"),
    ],
)
def test_a_missing_head_is_named(variant, names, tmp_path):
    write_peer(tmp_path, variant)
    with pytest.raises(WeightError, match=f"missing in the checkpoint: {names}"):
        ours(tmp_path, "classify")


def test_a_head_of_token_logits_is_refused(tmp_path):
    labels = LabelTokens((3, 4), True)
    model_type, config = read_model_config(VARIANTS["bert"], head="classify", label_tokens=labels)
    with pytest.raises(ConfigError, match="classifier_from_token needs a model that generates"):
        build_model(model_type, config, load_format="dummy", dtype=torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_facts_from_config_json_are_those_of_the_model(variant):
    hf = resolve_identity(VARIANTS[variant])
    facts, (model_type, config) = model_facts(hf), read_model_config(hf, head="none")
    assert facts.layers == config.attention_layers() == ()
    word_size = getattr(config, "word_size", config.hidden)
    sizes = (config.max_len, config.vocab, config.hidden, word_size)
    assert (facts.max_len, facts.vocab, facts.hidden, facts.embedding) == sizes
    with torch.device("meta"):
        model = MODELS.load(model_type).Model(config)
        if config.tied:
            model.set_head(config, [])
        if hf.get("share_att_key") is False:
            return  # further matrices, which the headers of a checkpoint count
    real = sum(value.numel() for value in model.parameters() if value.dim() > 1)
    assert facts.weights.matrices == pytest.approx(real, rel=0.06)


@pytest.mark.parametrize("head_dtype", ["float32", "model"])
def test_a_head_is_in_its_own_dtype(head_dtype, tmp_path):
    theirs = write_peer(tmp_path, "roberta", "classify")
    hf = VARIANTS["roberta"] | {"num_labels": 5}
    model_type, config = read_model_config(hf, head="classify", labels=5, head_dtype=head_dtype)
    model = build_model(model_type, config, folder=tmp_path, dtype=torch.bfloat16, progress=False)
    pooled = torch.randn(3, config.hidden)
    with torch.inference_mode():
        got, want = model.classify(pooled), theirs.classifier(pooled[:, None])
    assert got.dtype == torch.float32
    worst = (got - want).abs().max().item()
    assert (worst < 1e-5) == (head_dtype == "float32")
    assert worst < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_checkpoints_in_half_precision(dtype, tmp_path):
    theirs = write_peer(tmp_path, "bert", dtype=dtype)
    (text,) = texts_of((33,), 150)
    with torch.inference_mode():
        want = theirs(torch.tensor([text])).last_hidden_state[0]
    model, _ = ours(tmp_path)  # computed in float32
    assert (hidden_of(model, [text])[0] - want).abs().max().item() < 1e-5
    model, _ = ours(tmp_path, dtype=dtype)
    (got,) = hidden_of(model, [text])
    assert got.dtype == dtype
    assert torch.cosine_similarity(got.float(), want).min().item() > 0.98


@pytest.mark.skipif(not library.available(), reason="without compiled kernels the references run")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_forward_pass_computes_in_kernels_only(variant, dtype):
    model_type, config = read_model_config(resolve_identity(VARIANTS[variant]), head="none")
    model = build_model(model_type, config, load_format="dummy", dtype=dtype)
    texts, recorder = texts_of(LENGTHS, config.vocab), Recorder({"disentangled_attention"})
    hidden_of(model, texts)  # the first makes what stays the same

    def recorded(step):
        with recorder:
            return model(step)

    for types in (None, [[0] * len(text) for text in texts]):
        assert torch.cat(hidden_of(recorded, texts, types)).isfinite().all()
    assert "view" in recorder.names, "nothing was recorded"
    assert recorder.names <= VIEWS | MEMORY


RANKS = ["bert", "albert_groups", "mpnet", "distilbert", "electra", "modernbert", "gte", "eurobert"]


@pytest.mark.parametrize("variant", [*RANKS, "deberta_v2", "deberta_v2_own_matrices_types"])
def test_two_ranks_give_the_outputs_of_one(variant, tmp_path):
    write_peer(tmp_path, variant)
    want, together, got = states(tmp_path), Together(2), {}

    def rank_main(rank):
        got[rank] = states(tmp_path, mesh=Mesh(tp=2, rank=rank), comm=together.of(rank))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        torch.testing.assert_close(got[rank], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["bert", "albert_groups", "mpnet"])
def test_stages_one_after_another_compute_what_one_model_does(variant, tmp_path):
    write_peer(tmp_path, variant)
    want = states(tmp_path)
    first, config = ours(tmp_path, stage=range(1))
    last, _ = ours(tmp_path, stage=range(1, config.layers))

    def both(step):
        return last(replace(step, carried=first(step)))

    got = torch.cat(hidden_of(both, texts_of(LENGTHS, config.vocab)))
    assert torch.equal(got, want)
