"""What cannot be served exactly is refused by the table, and by the probe if the table is silent."""

import json
import sys

import pytest

from quire.cli import main
from quire.config.architectures import CLASSES, REFUSED, refusal_of
from quire.errors import ConfigError
from quire.models.build import read_model_config
from quire.models.fallback import config as fallback_config
from quire.models.fallback import probe
from tests import tiers
from tests.cpu.models.fallback.test_exact import TYPES as SERVED
from tests.cpu.models.fallback.tiny_models import tiny_config

TYPES = sorted(name for names in REFUSED.values() for name in names.split())
NO_TINY_CONFIG = {"dots3_note", "dots3_note_text", "gemma4_assistant", "gemma4_unified_assistant"}
NO_TINY_CONFIG |= {"xlnet"}
EVERYDAY = {
    "bart": "positions from its cache",
    "bert": "both directions",
    "bloom": "own attention",
    "deepseek_v32": "an indexer",
    "doge": "a mask of its own",
    "falcon_h1": "recurrent beside attention in each layer",
    "inkling_text": "a bias by position",
    "jamba": "recurrent layers",
    "lfm2": "convolutions",
    "llama4_text": "chunks",
    "zaya": "convolution inside attention",
}


def test_every_causal_class_of_transformers_is_in_the_table():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    assert set(KNOWN) <= set(CLASSES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", TYPES)
def test_the_reason_is_given_before_anything_is_loaded(model_type, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails
    with pytest.raises(ConfigError) as error:
        read_model_config({"model_type": model_type}, impl="transformers")
    assert str(error.value).endswith(refusal_of(model_type))
    assert repr(model_type) in str(error.value)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "model_type",
    [*EVERYDAY, *tiers.long(*(one for one in TYPES if one not in {*EVERYDAY, *NO_TINY_CONFIG}))],
)
def test_the_probe_refuses_by_itself(model_type, monkeypatch):
    monkeypatch.setattr(fallback_config, "check_class", lambda model_type: None)
    hf = json.loads(tiny_config(model_type).to_json_string()) | {"model_type": model_type}
    with pytest.raises(ConfigError, match=r"cannot be|not supported|describe|read it") as error:
        read_model_config(hf, impl="transformers")
    assert "\n" not in str(error.value)


MIXING = ["falcon_h1", "lfm2", "qwen3_next", "zaya"]
MIXING_TOO = "bailing_hybrid bamba jamba kimi_linear lfm3 minimax nemotron_h olmo_hybrid zamba"


@pytest.fixture
def unknown(monkeypatch):
    """No type is known, and no layer by its name."""
    monkeypatch.setattr(fallback_config, "CLASSES", {})
    monkeypatch.setattr(fallback_config, "check_class", lambda model_type: None)
    monkeypatch.setattr(probe, "_check_layers", lambda model, recorder: None)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("model_type", [*MIXING, *tiers.long(*MIXING_TOO.split())])
def test_an_unknown_class_whose_tokens_mix_outside_of_attention_is_refused(model_type):
    hf = json.loads(tiny_config(model_type).to_json_string()) | {"model_type": model_type}
    with pytest.raises(ConfigError, match="by other ways than attention"):
        read_model_config(hf, impl="transformers")


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("model_type", ["gemma3n_text", "jetmoe", *tiers.long(*SERVED)])
def test_an_unknown_class_whose_tokens_meet_in_attention_is_served(model_type):
    hf = json.loads(tiny_config(model_type).to_json_string()) | {"model_type": model_type}
    assert read_model_config(hf, impl="transformers")[1].probe.calls


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"] * 2}),
        ("minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2}),
        ("mistral", {"is_encoder_decoder": True}),
    ],
)
def test_a_part_of_an_architecture_is_refused_at_the_start(model_type, more):
    hf = json.loads(tiny_config(model_type, **more).to_json_string()) | {"model_type": model_type}
    with pytest.raises(ConfigError, match=r"recurrent state|block_indices|encoder-decoder"):
        read_model_config(hf, impl="transformers")


@pytest.mark.parametrize("name", ["qwem3", "llama_three", "gemma_2b"])
def test_an_unknown_type_has_near_names(name):
    with pytest.raises(ConfigError, match=f"type '{name}' are known to neither.*; did you mean "):
        read_model_config({"model_type": name})


@pytest.mark.parametrize("command", ["explain", "plan"])
@pytest.mark.parametrize(
    ("config", "words", "says"),
    [
        (
            {"architectures": ["ZambaForCausalLM"]},
            (),
            "'zamba' are not supported: layers keep a rec",
        ),
        ({"model_type": "umt5"}, (), "'umt5' are not supported: it is an encoder-decoder"),
        ({"model_type": "llama"}, ("--model-impl", "transformer"), "did you mean transformers?"),
    ],
)
def test_a_command_ends_with_one_sentence(command, config, words, says, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([command, str(tmp_path), "--device", "cpu", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "config", [{"model_type": "qwem3"}, {"architectures": ["Qwem3ForCausalLM"]}]
)
def test_a_mistyped_architecture_has_near_names(config, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["explain", str(tmp_path), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "known to neither quire nor transformers" in error
    assert "did you mean qwen3" in error
