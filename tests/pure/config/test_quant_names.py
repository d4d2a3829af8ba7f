"""Names of quantization methods, and the files and fields that state one."""

import json

import pytest

from quire.config.facts import read_hf_config
from quire.config.quant.gptq import GptqFormat
from quire.config.quant.names import UNREAD
from quire.config.quant.read import read_quantization
from quire.errors import ConfigError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
SQUEEZE = {"quant_method": "squeezellm", "wbits": 4}
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}


def read(config, requested=None):
    return read_quantization({"quantization_config": config}, requested)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (GPTQ, "gptq gptq_marlin auto_gptq marlin moe_wna16 inc auto-round auto_round"),
        (AWQ, "awq awq_marlin auto_awq cpu_awq moe_wna16 inc auto-round"),
        (SQUEEZE, "squeezellm"),
        (AUTO, "auto-round inc gptq gptq_marlin"),
    ],
)
def test_names_of_the_stored_format_change_nothing(config, names):
    for name in names.split():
        assert read(config, name) == read(config), name


@pytest.mark.parametrize(
    ("config", "name"),
    [(GPTQ, "awq"), (GPTQ, "fp8"), (AWQ, "gptq_marlin"), (SQUEEZE, "marlin"), (AUTO, "awq")],
)
def test_another_name_is_an_error_that_names_both(config, name):
    stored = read(config).quant_method
    with pytest.raises(ConfigError, match=rf"quantization='{name}', .*\({stored}\)"):
        read(config, name)


@pytest.mark.parametrize("name", ["awq", "gptq_marlin", "squeezellm"])
def test_the_name_of_a_stored_format_fits_no_plain_checkpoint(name):
    with pytest.raises(ConfigError, match=f"quantization='{name}', .* is not quantized"):
        read_quantization({}, name)


@pytest.mark.parametrize("name", [*UNREAD, "AQLM"])
def test_methods_that_are_not_read_are_refused_by_name_with_what_to_do(name):
    with pytest.raises(ConfigError, match=f"quantization is '{name}', which quire does not read; "):
        read_quantization({}, name)
    with pytest.raises(ConfigError, match=rf"config\.json: .*quant_method is '{name}', which"):
        read({"quant_method": name})


@pytest.mark.parametrize("value", [5, ["gptq"], {}, "gptx"])
def test_other_values_of_quant_method_are_refused(value):
    with pytest.raises(ConfigError, match="quantization method"):
        read(GPTQ | {"quant_method": value} if value != {} else {"bits": 4})


def test_newer_files_have_the_method_under_another_name():
    renamed = {**GPTQ, "method": "gptq"}
    del renamed["quant_method"]
    assert read(renamed) == read(GPTQ)


def folder_with(tmp_path, name, value, **fields):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    (tmp_path / name).write_text(json.dumps(value))
    return read_quantization(read_hf_config(tmp_path))


def without_method(config):
    return {key: value for key, value in config.items() if key != "quant_method"}


def test_settings_in_a_file_beside_config_json(tmp_path):
    found = folder_with(tmp_path, "quantize_config.json", without_method(GPTQ))
    assert found == read(GPTQ)


@pytest.mark.parametrize("config", [without_method(AWQ), SQUEEZE])
def test_a_file_that_two_methods_share(config, tmp_path):
    found = folder_with(tmp_path, "quant_config.json", config)
    assert found == read({"quant_method": "awq"} | config)


@pytest.mark.parametrize("nested", [False, True])
def test_config_json_goes_before_the_file(nested, tmp_path):
    own = {"quantization_config": AWQ}
    fields = {"text_config": {"model_type": "llama", "num_hidden_layers": 1, **own}}
    found = folder_with(tmp_path, "quantize_config.json", GPTQ, **(fields if nested else own))
    assert found == read(AWQ)


@pytest.mark.parametrize("content", ["[1]", '{"quant_method": 3}', "{", '{"quant_method": "gptx"}'])
def test_a_broken_file_is_an_error(content, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "quantize_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"quantize_config|gptx"):
        read_quantization(read_hf_config(tmp_path))


def test_auto_round_is_the_format_that_its_packing_names():
    assert read(AUTO) == read(AUTO | {"packing_format": "auto_round:auto_gptq"})
    assert read(AUTO).default == read(GPTQ).default
    assert read(AUTO | {"packing_format": "auto_round:auto_awq"}).default.symmetric
    packed = AUTO | {"packing_format": "auto_round:auto_awq", "sym": False}
    assert read(packed).default == read(AWQ).default


def test_rules_of_dynamic_exclude_first_then_the_first_match_decides():
    dynamic = {
        r".*\.down_proj": {"bits": 8, "desc_act": True},
        r"+:.*\.down": {"bits": 2, "group_size": -1},
        r"down": {"bits": 3},
        r"-:model\.layers\.0\.": {},
    }
    found = read(GPTQ | {"dynamic": dynamic})
    assert found.format_of(["model.layers.0.mlp.down_proj"]) is None
    eight = found.format_of(["model.layers.1.mlp.down_proj"])
    assert (eight.bits, eight.group, eight.act_order) == (8, 128, True)
    two = found.format_of(["model.layers.1.mlp.downward"])
    assert (two.bits, two.group, two.act_order) == (2, 0, False)
    assert found.format_of(["model.layers.1.mlp.up_proj"]) == read(GPTQ).default


def test_settings_of_single_layers_by_name_and_pattern():
    extra = {
        "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32},
        "model.layers.1.self_attn": {"bits": 16, "data_type": "float"},
        r".*\.up_proj": {"sym": False, "bits": 3},
        "lm_head": {"bits": 4},
    }
    found = read(AUTO | {"extra_config": extra})
    eight = GptqFormat(bits=8, group=32, symmetric=True, zero_offset=1, head=True)
    assert found.format_of(["model.layers.0.mlp.down_proj"]) == eight
    assert found.format_of(["model.layers.1.self_attn.q_proj"]) is None
    assert found.format_of(["model.layers.5.mlp.up_proj"]).bits == 3
    assert not found.format_of(["model.layers.5.mlp.up_proj"]).symmetric
    assert found.format_of(["lm_head"]).head
    assert found.format_of(["model.layers.0.mlp.gate_proj"]) == found.default
    assert read(AUTO).format_of(["lm_head"]) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("packing_format", "auto_round:gguf"),
        ("data_type", "mx_fp"),
        ("act_bits", 8),
        ("extra_config", [1]),
        ("extra_config", {"x": 1}),
        ("extra_config", {"x": {"colour": 1}}),
        ("extra_config", {"x": {"act_bits": 8}}),
        ("extra_config", {"(a+)+": {"bits": 8}}),
        ("what_is_this", 1),
    ],
)
def test_fields_of_auto_round_that_are_not_understood_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=rf"config\.json: quantization_config.*{field}|{field}"):
        read(AUTO | {field: value})
