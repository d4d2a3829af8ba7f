"""speculative_config: its keys, the words of older releases, and the folders of drafters."""

import json
import logging
import struct
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from quire.config import speculation
from quire.config.decisions import DecisionLog
from quire.config.drafters import drafter_of, read_drafter
from quire.config.engine_config import SpeculationSection
from quire.config.facts import model_facts
from quire.config.memory.memory_plan import EngineShape
from quire.config.memory.state_layout import StateFacts
from quire.config.options import Options
from quire.config.speculation import find_drafter, resolve_speculation
from quire.errors import ConfigError

HF = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 400,
    "max_position_embeddings": 256,
}  # fmt: skip
SHAPE = EngineShape(
    dtype="float32", cache_dtype="float32", block_size=16, max_model_len=256,
    max_num_batched_tokens=64, max_num_seqs=8, tensor=2,
)  # fmt: skip
ALL = (*speculation.HOST_METHODS, *speculation.MODEL_METHODS)


@pytest.fixture(autouse=True)
def all_methods(monkeypatch):
    monkeypatch.setattr(speculation, "built_methods", lambda: list(ALL))


def folder(path, hf, tensors=(), file="config.json"):
    path.mkdir(parents=True, exist_ok=True)
    (path / file).write_text(json.dumps(hf))
    if tensors:
        header = json.dumps({name: {"dtype": "F32", "shape": [], "data_offsets": [0, 0]}
                             for name in tensors}).encode()  # fmt: skip
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def section(given, *, hf=HF, generates=True, find=None, name="target", **facts):
    options = Options.from_flat(given).speculation

    def lookup(model, revision):
        return find / model

    found = find_drafter(options, lookup, name=name, hf=hf)
    model = replace(model_facts(hf), drafter=found, name=name, **facts)
    return resolve_speculation(options, model, SHAPE, DecisionLog([]), generates=generates)


def config(**keys):
    return {"speculative_config": keys}


# -- keys ---------------------------------------------------------------------------------------


def test_nothing_given_leaves_the_defaults():
    assert section({}) == section({"speculative_config": {}}) == SpeculationSection()
    assert section({"speculative_config": None}) == SpeculationSection()


def test_predictions_are_not_drafted_where_layers_keep_a_state():
    assert section({}, states=(StateFacts(conv=(8, 3)),)).max_drafts == 0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"method": "ngram"}, {"max_drafts": 8}),
        ({"method": "ngram_gpu", "num_speculative_tokens": 4}, {"max_drafts": 4}),
        ({"model": "[ngram]", "prompt_lookup_max": 4}, {"lookup_min": 4, "lookup_max": 4}),
        ({"method": "ngram", "prompt_lookup_min": 2}, {"lookup_min": 2, "lookup_max": 2}),
        (
            {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "adaptive": False},
            {"lookup_min": 2, "lookup_max": 4, "adaptive": False},
        ),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 12,
             "suffix_decoding_max_cached_requests": 0, "suffix_decoding_max_spec_factor": 2,
             "suffix_decoding_min_token_prob": 0.5},
            {"method": "suffix", "max_drafts": 24, "suffix_depth": 12, "suffix_requests": 0,
             "suffix_factor": 2.0, "suffix_min_probability": 0.5},
        ),
        ({"method": "ngram", "max_model_len": 100}, {"max_len": 100}),
        ({"method": "ngram", "max_model_len": 1000}, {"max_len": None}),
        (
            {"method": "ngram", "num_speculative_tokens": 7,
             "num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 64, 2]]},
            {"max_drafts": 5},
        ),
    ],
)  # fmt: skip
def test_keys_are_honoured(keys, expected):
    assert section(config(**keys)) == replace(
        SpeculationSection(method="ngram"), **expected
    )  # fmt: skip


def test_shortcuts_are_keys():
    given = {"spec_method": "ngram", "spec_tokens": 3}
    assert section(given) == section(config(method="ngram", num_speculative_tokens=3))
    assert section({"spec_model": "[ngram]"}) == section(config(method="ngram"))
    with pytest.raises(ConfigError, match=r"spec_tokens=3 and num_speculative_tokens .* differ"):
        section(given | config(num_speculative_tokens=4))


def test_old_words_become_keys_with_a_note_of_the_new_form(caplog):
    old = {
        "speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4,
        "use_v2_block_manager": True,
    }  # fmt: skip
    with caplog.at_level(logging.INFO, "quire"):
        found = section(old)
    assert found == section(config(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4))
    assert 'use speculative_config={"model": "[ngram]", "num_speculative_tokens": 5' in caplog.text
    assert section({"speculative_mode": "[ngram]"}) == section(config(method="ngram"))
    with pytest.raises(ConfigError, match=r"num_speculative_tokens .* differ"):
        section({"num_speculative_tokens": 5} | config(num_speculative_tokens=4))


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"draft_sample_method": "probabilistic"}, "texts are the same"),
        ({"disable_by_batch_size": 8}, "follows measured acceptance"),
        ({"enforce_eager": True}, "in quire's own way"),
        ({"disable_logprobs": True}, "logprobs are those of the target"),
        ({"posterior_alpha": 0.3}, "texts are the same"),
        ({"model": "some/model"}, "no effect with ngram"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 5]]}, "by its greatest number"),
    ],
)
def test_keys_without_an_effect_are_noted(keys, note, caplog):
    with caplog.at_level(logging.INFO, "quire"):
        assert section(config(method="ngram", **keys)).method == "ngram"
    assert note in caplog.text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompt_lookup": 4}, "no key 'prompt_lookup'; did you mean prompt_lookup_m"),
        ({"num_speculative_tokens": 4}, "needs a method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "must be >= 1, got 0"),
        ({"method": "ngram", "num_speculative_tokens": "x"}, "must be a whole number"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "<= prompt_lookup_max"),
        ({"method": "ngram", "tensor_parallel_size": 2}, "the key is draft_tensor_parallel_size"),
        ({"method": "ngram", "draft_tensor_parallel_size": 3}, "must be 1 or 2"),
        ({"method": "dflash"}, "method 'dflash' is not supported; supported are ngram"),
        ({"method": "mlp_speculator"}, "not supported; use a head of EAGLE-3"),
        ({"method": "eagle3"}, "needs a model: the drafter's folder"),
        ({"method": "mtp"}, "needs a model whose checkpoint has layers"),
        ({"method": "ngram", "quantization": "fp8"}, "quantization='fp8' is not supported"),
        ({"method": "ngram", "speculative_token_tree": "[(0,)]"}, "drafts are chains"),
        ({"method": "ngram", "rejection_sample_method": "typical_acceptance_sampler"}, "never change"),
        ({"method": "ngram", "rejection_sample_method": "synthetic",
          "synthetic_acceptance_length": 2}, "for benchmarks of methods with weights"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, r"must be in \[0, 1\]"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 2]]}, "must be a list of"),
        ({"method": "ngram", "ignored": []}, "no key 'ignored'"),
    ],
)  # fmt: skip
def test_errors_name_what_is_allowed(keys, message):
    with pytest.raises(ConfigError, match=message):
        section(config(**keys))


def test_a_method_without_a_drafter_names_those_that_there_are(monkeypatch):
    monkeypatch.setattr(speculation, "built_methods", lambda: ["ngram"])
    with pytest.raises(
        ConfigError, match=r"method 'suffix' is not supported; supported are ngram$"
    ):
        section(config(method="suffix"))


def test_drafters_of_other_packages_are_methods(monkeypatch):
    monkeypatch.undo()
    assert {*speculation.HOST_METHODS, "draft_model"} <= set(speculation.built_methods())
    entry = EntryPoint("mine", "somewhere", "quire.core.drafters")
    monkeypatch.setattr(speculation, "find_entry_points", lambda group: [entry])
    assert speculation.built_methods()[-1] == "mine"
    assert section(config(method="mine", num_speculative_tokens=3)).max_drafts == 3


def test_a_model_that_pools_has_no_drafts():
    with pytest.raises(ConfigError, match="this model pools"):
        section(config(method="ngram"), generates=False)


# -- folders ------------------------------------------------------------------------------------

EAGLE3 = {**HF, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100}
KINDS = [
    ("eagle3", EAGLE3, ()),
    ("eagle3", {**HF, "architectures": ["Eagle3Qwen3ForCausalLM"]}, ()),
    ("eagle3", {**HF, "num_hidden_layers": 1}, ("d2t", "midlayer.hidden_norm.weight")),
    ("eagle3", {"speculators_model_type": "eagle3", "transformer_layer_config": HF}, ()),
    ("eagle", {**HF, "architectures": ["EagleLlamaForCausalLM"]}, ()),
    ("eagle", {**HF, "num_hidden_layers": 1}, ("fc.weight", "layers.0.mlp.up_proj.weight")),
    ("medusa", {"medusa_num_heads": 3}, ()),
    ("medusa", {"model_type": "medusa", "vocab_size": 400}, ()),
    ("mtp", {**HF, "model_type": "deepseek_mtp"}, ()),
    ("draft_model", HF, ("model.embed_tokens.weight", "model.norm.weight")),
]


@pytest.mark.parametrize(("method", "hf", "tensors"), KINDS)
def test_files_show_the_method(method, hf, tensors, tmp_path):
    assert drafter_of(folder(tmp_path / "some", hf, tensors)) == method


def test_a_name_counts_only_where_the_files_show_nothing(tmp_path):
    head = folder(tmp_path / "EAGLE-llama2-chat-7B", {**HF, "num_hidden_layers": 1})
    assert drafter_of(head) == "eagle"
    whole = folder(tmp_path / "eagle-tales-1b", HF)
    assert drafter_of(whole) == "draft_model"


def test_a_drafter_is_found_by_its_files(tmp_path):
    folder(tmp_path / "head", EAGLE3)
    found = section(config(model="head", num_speculative_tokens=3), find=tmp_path)
    assert (found.method, found.max_drafts) == ("eagle3", 3)
    assert found.draft_model == str(tmp_path / "head")
    with pytest.raises(ConfigError, match="are those of method 'eagle3', not 'medusa'"):
        section(config(model="head", method="medusa"), find=tmp_path)


def test_speculators_state_how_many_drafts(tmp_path):
    folder(tmp_path / "head", {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": HF,
        "speculators_config": {
            "proposal_methods": [{"speculative_tokens": 4}],
            "verifier": {"name_or_path": "some/target"},
        },
    })  # fmt: skip
    assert section(config(model="head"), find=tmp_path).max_drafts == 4
    assert read_drafter(tmp_path / "head").verifier == "some/target"


def test_vocabularies_must_be_equal(tmp_path):
    folder(tmp_path / "small", {**HF, "vocab_size": 399})
    with pytest.raises(ConfigError, match="has 399 tokens, and that of target has 400"):
        section(config(model="small"), find=tmp_path)


def test_a_shorter_drafter_bounds_the_sequences_with_drafts(tmp_path):
    folder(tmp_path / "small", {**HF, "max_position_embeddings": 128})
    assert section(config(model="small"), find=tmp_path).max_len == 128
    assert section(config(model="small", max_model_len=64), find=tmp_path).max_len == 64


def test_a_target_with_layers_of_its_own(tmp_path):
    hf = {**HF, "num_nextn_predict_layers": 2}
    for keys in ({"method": "mtp"}, {"method": "deepseek_mtp"}, {"model": "target"}):
        found = section(config(**keys), hf=hf)
        assert (found.method, found.max_drafts, found.draft_model) == ("mtp", 2, None)
    assert section(config(method="mtp", num_speculative_tokens=4), hf=hf).max_drafts == 4
    with pytest.raises(ConfigError, match="must be a multiple of 2"):
        section(config(method="mtp", num_speculative_tokens=3), hf=hf)


def test_acceptance_of_benchmarks(tmp_path):
    folder(tmp_path / "head", EAGLE3)

    def rates(**keys):
        given = {"model": "head", "num_speculative_tokens": 3, **keys}
        return section(
            config(**given, rejection_sample_method="synthetic"), find=tmp_path
        ).synthetic_rates

    assert rates(synthetic_acceptance_rates=[0.9, 0.5, 0.25]) == (0.9, 0.5, 0.25)
    found = rates(synthetic_acceptance_length=2.5)
    assert sum(found) == pytest.approx(1.5)
    assert found[1] == pytest.approx(found[0] ** 2)
    assert rates(synthetic_acceptance_length=1) == pytest.approx((0, 0, 0), abs=1e-9)
    for wrong in (
        {"synthetic_acceptance_rates": [0.5, 0.9, 0.1]},
        {"synthetic_acceptance_rates": [0.5]},
        {"synthetic_acceptance_length": 5},
        {},
    ):
        with pytest.raises(ConfigError, match="synthetic_acceptance"):
            rates(**wrong)
