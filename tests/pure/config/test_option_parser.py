"""The command line that is made from the options."""

import pytest

from quire.config.command_line.option_parser import OptionParser, add_options, options_from
from quire.errors import ConfigError


def parse(*argv):
    parser = OptionParser(prog="quire x")
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--port", type=int, default=8000)
    add_options(parser)
    args = parser.parse_args(list(argv))
    return options_from(args).non_default(), args.port


def test_underscores_and_dashes_are_equal():
    assert parse("--max_model_len=16K") == parse("--max-model-len", "16K")
    assert parse("m", "--max_model_len=16K") == ({"model": "m", "max_model_len": 16384}, 8000)


def test_flags_have_a_no_form():
    assert parse("--no-enable-prefix-caching")[0] == {"enable_prefix_caching": False}
    assert parse("--enable-prefix-caching", "--no_enable_prefix_caching")[0] == {
        "enable_prefix_caching": False
    }


def test_dicts_take_json_or_dotted_keys():
    same = {"hf_overrides": {"rope_scaling": {"factor": 2}}}
    assert parse("--hf-overrides", '{"rope_scaling": {"factor": 2}}')[0] == same
    assert parse("--hf-overrides.rope_scaling.factor", "2")[0] == same


def test_short_and_old_names_work():
    assert parse("-tp", "1", "--worker-use-ray", "--enforce-eager", "--swap-space", "2")[0] == {
        "enforce_eager": True,
        "swap_space": 2.0,
    }
    assert parse("--device-memory-utilization", "0.5")[0] == {"gpu_memory_utilization": 0.5}


def test_an_unknown_flag_names_the_nearest(capsys):
    with pytest.raises(SystemExit):
        parse("--max-modle-len", "3")
    assert "did you mean --max-model-len" in capsys.readouterr().err


def test_a_refused_name_is_refused_here_too():
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        parse("--kv-cache-dtype", "nvfp4")


def test_a_file_gives_flags_and_the_command_line_wins(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: a\nmax_model_len: 8k\ntrust-remote-code: true\nenable_prefix_caching: false\n"
        "served_model_name: [x, y]\nhf_overrides: {a: {b: 1}}\nport: 9\nseed:\n"
    )
    assert parse("b", "--config", str(path), "--max-model-len=9k") == (
        {
            "model": "b",
            "trust_remote_code": True,
            "max_model_len": 9000,
            "hf_overrides": {"a": {"b": 1}},
            "served_model_name": ("x", "y"),
            "enable_prefix_caching": False,
        },
        9,
    )


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", None])
def test_a_bad_file_is_named(tmp_path, text):
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="--config"):
        parse("--config", str(path))
