"""The command line of `quire serve`: every flag of vLLM, and its effect."""

import logging
import re
import shlex
from pathlib import Path

import pytest

from quire.cli.serve_flags import check_files, parse, serve_parser
from quire.config import vllm_options
from quire.config.command_line.argv_rewrite import BooleanFlag
from quire.config.command_line.option_parser import OptionParser, add_boolean_flag
from quire.config.options import option_specs
from quire.errors import ConfigError
from quire.server.options import ABOUT, GROUPS, ServerOptions

KNOWN = [
    line.split()
    for line in Path(__file__).with_name("known_flags.txt").read_text().splitlines()
    if not line.startswith("#")
]
PARSER = serve_parser()


def changed(words):
    options, server = parse(shlex.split(words))
    plain = ServerOptions()
    said = {
        n: getattr(server, n) for n in server.__slots__ if getattr(server, n) != getattr(plain, n)
    }
    return options.non_default() | said


def test_there_are_as_many_known_flags_as_there_should_be():
    assert len(KNOWN) > 380


@pytest.mark.parametrize(
    ("kind", "names"), [(kind, names) for kind, *names in KNOWN], ids=lambda v: v[0]
)
def test_every_flag_of_vllm_is_accepted_or_refused_by_name(kind, names):
    actions = [PARSER._option_string_actions[name] for name in names]
    for action in actions:
        assert isinstance(action, BooleanFlag) == (kind == "switch") or action.nargs == 0
        if kind == "switch":
            assert f"--no-{names[0][2:]}" in PARSER._option_string_actions or action.nargs == 0
        assert action.help, names


@pytest.mark.parametrize("name", sorted(vllm_options.option_names()))
def test_the_effect_of_a_foreign_name_is_one_sentence(name):
    fate = vllm_options.describe_effect(name)
    assert fate[0].isupper()
    assert fate.endswith(".")


def test_every_server_option_is_in_one_group_and_has_a_help_text():
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(ServerOptions.__slots__)
    assert set(ABOUT) == set(GROUPS)
    assert not set(names) & set(option_specs())


@pytest.mark.parametrize(
    "words",
    [
        "m --tensor-parallel-size 1 --pipeline-parallel-size 1 -dp 1",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "Qwen2.5-7B-Instruct --served-model-name q --api_key muyu --host 192.168.110.131 --port 9000 "
        "--trust_remote_code --tensor_parallel_size 2 --device cuda",
        "Qwen2___5-7B --max_model_len 100000 --gpu_memory_utilization 0.90 --max_num_seqs 16",
        "m --dtype auto --api-key token-abc123",
        "m --chat-template ./path-to-chat-template.jinja",
        "m --trust-remote-code --enable-chunked-prefill --max_num_batched_tokens 1024",
    ],
)
def test_sizes_with_suffixes_are_parsed(words):
    assert changed(words)


OLD = """m --use-v2-block-manager --num-scheduler-steps 8 --device cpu --enable-reasoning --task generate
    --guided-decoding-backend outlines --swap-space 16 --max-seq-len-to-capture 8192
    --disable-async-output-proc --scheduler-delay-factor 0.5 --worker-use-ray -O3"""


def test_flags_of_older_releases_are_accepted_and_logged(caplog):
    with caplog.at_level(logging.INFO, "quire"):
        structured = {"backend": "outlines"}
        assert changed(OLD) == {
            "model": "m",
            "task": "generate",
            "swap_space": 16.0,
            "device": "cpu",
            "structured_outputs_config": structured,
        }
    for name in ("use_v2_block_manager", "num_scheduler_steps", "enable_reasoning", "swap_space",
                 "guided_decoding_backend", "max_seq_len_to_capture", "optimization_level"):  # fmt: skip
        assert name in caplog.text, name


@pytest.mark.parametrize(
    "words",
    [
        "--qlora-adapter-name-or-path x",
        "--tool-strict-level function",
        "--grpc", "--tokens-only", "--cpu-offload-gb 4",
        "--rope-theta 1e6", "--kv-transfer-config '{\"kv_connector\": \"x\"}'",
        "--kv-cache-dtype fp8_inc", "--kv-cache-dtype int4_per_token_head",
        "--kv-cache-dtype-skip-layers 0 1",
    ],
)  # fmt: skip
def test_what_would_change_results_is_refused(words):
    with pytest.raises(ConfigError, match="not support"):
        parse(["m", *shlex.split(words)])


def test_features_may_be_set_to_off():
    off = (
        "m --no-enable-lora --reasoning-parser '' --tool-call-parser None -dp 1 --cpu-offload-gb 0"
    )
    assert changed(off) == {"model": "m"}


def test_lists_are_words_or_json():
    assert changed("m --allowed-origins a b") == changed('m --allowed-origins \'["a", "b"]\'')
    assert changed("m --api-key k --served-model-name x y")["api_key"] == ("k",)
    assert changed("m --middleware a:b --middleware c:d")["middleware"] == ("a:b", "c:d")


def test_a_flag_that_adds_up_may_be_repeated_in_silence(caplog):
    changed("m --middleware a:b --middleware c:d")
    assert caplog.text == ""


def test_an_opposite_whose_name_is_taken_is_left_out():
    parser = OptionParser(prog="x")
    parser.add_argument("--disable-cats", action="store_true", default=None, dest="mine")
    add_boolean_flag(parser.add_argument_group("g"), ["--enable-cats"], "cats", "Cats.")
    said = parser.parse_args(["--enable-cats", "--disable-cats"])
    assert (said.cats, said.mine) == (True, True)


def test_sizes_take_units():
    assert changed("m --max-body-bytes 64MiB")["max_body_bytes"] == 64 << 20
    assert changed("m --max-num-batched-tokens 8k --max-model-len 16K")["max_model_len"] == 16384


def test_minus_one_is_the_longest_that_fits():
    assert changed("m --max-model-len -1") == changed("m --max-model-len auto")


def test_none_and_nothing_mean_none():
    assert changed("m --chat-template None --max-log-len None --uds '' --hf-config-path=") == {
        "model": "m"
    }


def test_switches_take_a_word_too():
    assert changed("m --enable-prefix-caching=False --enforce-eager True --strict=yes") == {
        "model": "m", "enable_prefix_caching": False, "enforce_eager": True, "strict": True,
    }  # fmt: skip
    assert changed("--enforce-eager m") == {"model": "m", "enforce_eager": True}
    with pytest.raises(ConfigError, match="--strict is True or False"):
        parse(["--strict=maybe"])


def test_enable_and_disable_are_opposites():
    assert changed("--disable-chunked-prefill") == {"enable_chunked_prefill": False}
    assert changed("--enable-log-stats") == {}
    assert changed("--enable-log-requests --disable-log-requests") == {}


def test_a_flag_given_twice_is_logged_and_the_last_counts(caplog):
    assert changed("m --seed 1 --max_model_len 8 --max-model-len=9") == {
        "model": "m", "seed": 1, "max_model_len": 9,
    }  # fmt: skip
    assert caplog.text.count("given several times") == 1


def test_keys_of_a_dict_are_merged_into_its_json(caplog):
    words = """--hf-overrides '{"a": {"b": 1}, "c": [1]}' --hf-overrides.a.d=2 --hf-overrides.c+ 3 --hf-overrides.c+ 4"""
    assert changed(words)["hf_overrides"] == {"a": {"b": 1, "d": 2}, "c": [3, 4]}
    assert "several times" not in caplog.text
    with pytest.raises(ConfigError, match="give one of them"):
        parse(shlex.split("-cc 3 -cc.backend x"))


def test_levels_may_be_short(caplog):
    for words in ("-O2", "-O 2", "-O=2", "--optimization-level 2"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "quire"):
            changed(words)
        assert "optimization_level='2'" in caplog.text
    with caplog.at_level(logging.INFO, "quire"):
        changed("-O.mode=3")
    assert '{"mode": 3}' in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--port 70000", "port must be in"),
        ("--ssl-keyfile x", "need ssl_certfile"),
        ("--ssl-cert-reqs 2", "needs ssl_ca_certs"),
        ("--fingerprint-mode custom", "needs fingerprint_value"),
        ("--stream-interval 0", "stream_interval must be >= 1"),
        ("--log-format xml", "log_format must be 'text' or 'json'"),
        ("--api-server-count 2 --enable-responses-store", "keeps answers in one process"),
    ],
)
def test_bad_server_options_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse(["m", *shlex.split(words)])


def test_keys_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "a, b")
    assert changed("m")["api_key"] == ("a", "b")
    assert changed("m --api-key c")["api_key"] == ("c",)
    assert changed("m --api-key ''") == {"model": "m"}


def test_an_empty_key_is_reported(monkeypatch, caplog):
    """As --api-key "$KEY" gives it where KEY is not set: the server would be open without a word."""
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    assert changed("m") == {"model": "m"}
    assert changed("m --api-key k ''")["api_key"] == ("k",)
    assert not caplog.records
    assert changed("m --api-key ''") == {"model": "m"}
    assert "--api-key is empty" in caplog.text


def test_options_of_the_server_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "7")
    assert changed("m") == {"model": "m", "keep_alive_timeout": 7}
    assert changed("m --keep-alive-timeout 9")["keep_alive_timeout"] == 9


# -- files ------------------------------------------------------------------------------------


def test_a_list_at_the_end_of_a_file_does_not_swallow_the_model(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("port: 9\nserved_model_name: [x, y]\n")
    assert changed(f"--config {path} m") == {
        "port": 9,
        "served_model_name": ("x", "y"),
        "model": "m",
    }


def test_a_file_cannot_name_another(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("config: other.yaml\n")
    with pytest.raises(ConfigError, match="names another file"):
        parse(["m", "--config", str(path)])


def test_sections_of_a_file_may_be_nested(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model:\n  model: m\n  seed: 3\ncache:\n  block_size: 32\nstrict: true\nhf_token: true\n"
                    "compilation-config: {mode: 3}\ndisable-log-requests: true\n")  # fmt: skip
    assert changed(f"--config {path} --seed 4") == {
        "model": "m", "seed": 4, "block_size": 32, "strict": True, "hf_token": True,
    }  # fmt: skip


def test_a_key_that_a_file_has_twice_is_logged(tmp_path, caplog):
    path = tmp_path / "c.yaml"
    path.write_text("seed: 1\nmodel: {seed: 2, seed: 3}\n")
    assert changed(f"--config {path}") == {"seed": 3}
    assert "c.yaml has seed several times" in caplog.text


def test_an_unknown_key_of_a_file_names_the_nearest(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("max_modle_len: 3\n")
    with pytest.raises(
        ConfigError, match=r"c.yaml sets 'max_modle_len', .*did you mean max_model_len"
    ):
        parse(["--config", str(path)])


def test_the_later_of_two_files_counts(tmp_path):
    for name, port in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.yaml").write_text(f"port: {port}\nseed: {port}\n")
    words = f"--config {tmp_path}/a.yaml --config={tmp_path}/b.yaml --seed 9"
    assert changed(words) == {"port": 2, "seed": 9}


# -- help -------------------------------------------------------------------------------------


def help_of(capsys, word=""):
    with pytest.raises(SystemExit) as caught:
        parse([f"--help={word}" if word else "--help"])
    said = capsys.readouterr()
    return caught.value.code, said.out + said.err


def test_help_has_one_line_for_each_flag_of_ours(capsys):
    status, text = help_of(capsys)
    assert status == 0
    for name in [*option_specs(), *ServerOptions.__slots__]:
        assert f"  --{name.replace('_', '-')}" in text, name
    assert "use-v2-block-manager" not in text
    assert "--help=GROUP" in text


@pytest.mark.parametrize("word", ["cache", "Cache", "CacheConfig", "cache options"])
def test_help_shows_a_group(capsys, word):
    status, text = help_of(capsys, word)
    assert status == 0
    assert "--block-size" in text
    assert "--port" not in text


def test_help_searches_names_and_texts(capsys):
    assert "--ssl-certfile" in help_of(capsys, "TLS")[1]
    assert "--max-model-len" in help_of(capsys, "max_model_len")[1]
    assert "quire does this in its own way" in help_of(capsys, "num-scheduler-steps")[1]
    status, text = help_of(capsys, "max-modle-len")
    assert status == 2
    assert "did you mean max-model-len" in text


def test_help_of_a_word_shows_the_flags_that_are_named_so(capsys):
    text = help_of(capsys, "port")[1]
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  --")] == ["--port"]


def test_help_has_defaults_and_no_cut_lines(capsys):
    text = help_of(capsys)[1]
    assert "…" not in text
    assert "Port to listen on [8000]" in text
    for name in ("port", "metrics-prefix", "enable-log-deltas", "dtype"):
        (start,) = re.finditer(rf"^  --{name}\b", text, re.M)
        assert "[" in re.split(r"\n  --", text[start.end() :])[0], name


def test_help_all_has_the_names_of_other_engines_too(capsys):
    text = help_of(capsys, "all")[1]
    assert "--use-v2-block-manager" in text
    assert "Folder, Hugging Face name" in text


# -- what is found out before anything starts --------------------------------------------------


def check(*argv):
    check_files(parse(argv)[0].model)


def test_a_chat_template_that_cannot_be_used_is_refused(tmp_path):
    bad, good = tmp_path / "bad.jinja", tmp_path / "good.jinja"
    bad.write_text("{% if %}")
    good.write_text("{{ messages }}")
    check("m", "--chat-template", str(good))
    check("m", "--chat-template", "tool_use")
    for value, why in (
        (str(bad), "not valid"),
        ("/nope.jinja", "neither the text"),
        ("{{", "not valid"),
    ):
        with pytest.raises(ConfigError, match=why):
            check("m", "--chat-template", value)


def test_a_missing_folder_is_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    check(str(tmp_path))
    check("--model", f"~/{tmp_path.name}")
    for name in ("/no/such/model", "./nope", "~/nope/nope"):
        with pytest.raises(ConfigError, match="no model at"):
            check(name)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--otlp-traces-endpoint localhost:4317", "must be an HTTP URL"),
        ("--middleware x", "module:name"),
    ],
)
def test_names_that_cannot_be_right_are_refused(words, why):
    with pytest.raises(ConfigError, match=why):
        parse(["m", *words.split()])
