"""The commands that run a model in the terminal, and those that explain."""

import io
import json
import pathlib

import pytest

from quire.cli import COMMANDS, main
from tests.cpu.tiny_models import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("cli") / "llama"))


def run(capsys, *argv):
    status = main(list(argv))
    said = capsys.readouterr()
    return status, said.out, said.err


def test_help_names_every_command(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(f"  {name} " in out for name in COMMANDS)
    assert run(capsys)[0] == 2


def test_an_unknown_command_gets_the_nearest(capsys):
    status, _, err = run(capsys, "genrate")
    assert status == 2
    assert "did you mean generate" in err


def test_the_version_is_printed(capsys):
    assert run(capsys, "--version")[1].strip()


def test_bad_options_are_one_line(capsys, folder):
    status, _, err = run(capsys, "generate", "x", "--model", folder, "--quantization", "awq")
    assert status == 2
    assert err.startswith("quire generate: error: --quantization awq")
    assert run(capsys, "explain", "/no/such/folder")[0] == 2


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("--hf-overrides", "{bad"), "--hf-overrides must be a JSON object, got '{bad', which is"),
        (("--gpu-memory", "40Gib"), "got '40Gib'; did you mean 40GiB?"),
        (("--dtype", "flaot16"), "got 'flaot16'; did you mean float16?"),
        (("--max-model-len", "9000000"), "--max-model-len 9000000 "),
        (("--max-model-len", "9000000"), """--hf-overrides '{"max_position_embeddings": 9000000}'"""),
        (("-tp", "1000"), "--tensor-parallel-size 1000 cannot cut this model"),
        (("--kv-cache-memory-bytes", "1KiB"), "What would fit: --kv-cache-memory-bytes "),
        (("--no-enable-chunked-prefill", "--inter-token-target-ms", "5"),
         "--no-enable-chunked-prefill"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_in_words_of_the_command_line(capsys, folder, words, answer):
    status, _, err = run(capsys, "explain", folder, *words)
    assert status == 2
    assert answer in err, err


def test_a_prompt_that_is_refused_is_not_printed_before_the_error(capsys, folder):
    status, out, err = run(capsys, "generate", "x " * 5000, "--model", folder)
    assert status == 1
    assert out == ""
    assert err.startswith("quire generate: error: ")


def test_a_folder_without_a_tokenizer_is_named_with_what_helps(capsys, folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((pathlib.Path(folder) / name).read_bytes())
    status, _, err = run(capsys, "generate", "x", "--model", str(tmp_path))
    assert status == 2
    assert f"there is no tokenizer in {tmp_path}: copy" in err
    assert "--skip-tokenizer-init" in err


def test_chat_prints_reasoning_apart_from_the_answer(capsys):
    status, out, err = run(capsys, "chat", "embedded", "-q", "What is 12 + 30?", "--temperature=0")
    assert status == 0
    assert out == "12 + 30 = 42.\n"
    assert err.startswith("Thinking:\n")
    assert "<think>" not in err


def test_generate_streams_one_prompt(capsys, folder):
    argv = ["generate", "Hello", "--model", folder, "--max-tokens", "4", "--temperature", "0"]
    status, out, err = run(capsys, *argv, "--stats")
    assert status == 0
    assert out.startswith("Hello")
    assert "first token after" in err
    assert "tok/s" in err
    _, batch, _ = run(capsys, *argv, "--json")
    assert out == "Hello" + json.loads(batch)["texts"][0] + "\n"


def test_generate_runs_several_prompts_as_a_batch(capsys, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("The"))
    argv = ["Hello", "-", "--model", folder, "--max-tokens", "3", "--json", "--stats"]
    status, out, err = run(capsys, "generate", *argv)
    assert status == 0
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["Hello", "The"]
    assert "tok/s in" in err


def test_chat_keeps_the_conversation_and_runs_commands(capsys, folder, monkeypatch):
    lines = [
        "hi", "/set temperature 0", "/set max_tokens 3", "/stats", "again \\", "and more", "/retry",
        "/set nonsense 1", "/set top_p x", "/system be kind", "/retry", "/clear", "/help", "", "/exit", "never",
    ]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    status, out, err = run(capsys, "chat", folder, "--max-tokens", "2")
    assert status == 0
    assert len(out.split("/help")[0].splitlines()) >= 3
    assert err.count("first token after") == 2
    assert "no message to answer again" in err
    assert "got 'nonsense'" in err
    assert "top_p must be a number" in err


def test_quick_chat_answers_once(capsys, folder):
    argv = ["chat", folder, "-q", "hi", "--max-tokens", "2", "--stats", "--no-thinking"]
    status, _, err = run(capsys, *argv)
    assert status == 0
    assert "2 tokens in" in err


def test_a_message_that_is_too_long_is_refused_and_forgotten(capsys, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x " * 2000 + "\nhi\n"))
    status, out, err = run(capsys, "chat", folder, "--max-tokens", "2")
    assert status == 0
    assert "maximum context length" in err
    assert len(out) > 1


def test_explain_gives_values_and_reasons(capsys, folder):
    status, out, _ = run(capsys, "explain", folder, "--hf-token", "secret")
    assert status == 0
    assert "(the checkpoint's)" in out
    assert "k-123" not in out
    _, out, _ = run(capsys, "explain", folder, "--json")
    found = json.loads(out)
    assert found["config"]["scheduler.max_num_batched_tokens"] == 2048
    assert any(why["field"] == "cache.num_blocks" for why in found["why"])


def test_explain_takes_the_flags_of_the_server(capsys, folder, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    words = ["--port", "9", "--api-key", "secret", "--json"]
    found = json.loads(run(capsys, "explain", folder, *words)[1])
    assert found["config"]["server.port"] == 9
    assert "secret" not in str(found)
    assert found["config"]["cache.num_blocks"] * found["config"]["cache.block_bytes"] <= 2**30
    reasons = {why["field"]: why["reason"] for why in found["why"]}
    assert reasons["server.port"] == "requested"
    assert reasons["cache.num_blocks"] == "cpu_kvcache_space"


def test_env_shows_the_effect_of_foreign_variables(capsys, monkeypatch):
    for name, value in (
        ("VLLM_API_KEY", "k-123"),
        ("VLLM_DP_MASTER_IP", "1.2.3.4"),
        ("VLLM_ZZ", "1"),
    ):
        monkeypatch.setenv(name, value)
    out = run(capsys, "env")[1]
    assert "k-123" not in out
    assert "1.2.3.4: no effect" in out
    assert "1: unknown name" in out


def test_env_reports_versions_and_variables(capsys):
    status, out, _ = run(capsys, "env")
    assert status == 0
    assert "torch" in out
    assert "cache_dir" in out
    assert set(json.loads(run(capsys, "collect-env", "--json")[1])) == {
        "machine", "packages", "variables",
    }  # fmt: skip


def test_an_answer_is_not_cut_at_the_default_of_completions(capsys):
    status, out, _ = run(
        capsys, "chat", "-q", "What is the capital of France?", "--temperature", "0"
    )
    assert status == 0
    assert len(out) > 20
    assert "Paris" in out


def test_run_batch_answers_with_a_model_of_this_process(capsys, folder, tmp_path):
    body = {"prompt": "Hello", "max_tokens": 3, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in").write_text(json.dumps(line) + "\nnot json\n")
    words = [
        "-i",
        str(tmp_path / "in"),
        "-o",
        str(tmp_path / "out"),
        "--enable-prompt-tokens-details",
    ]
    status, _, err = run(capsys, "run-batch", folder, *words, "--max-model-len", "64")
    assert status == 0, err
    good, bad = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert good["response"]["body"]["usage"]["completion_tokens"] == 3
    assert "prompt_tokens_details" in good["response"]["body"]["usage"]
    assert bad["error"]
