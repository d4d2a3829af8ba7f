"""`quire serve` as people start it: a process of its own, the printed command, a clean end."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from quire.cli.serve import main
from quire.errors import ConfigError
from tests.server.harness import make_tokenizer

SHAPE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(made)
    config = {**SHAPE, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    (made / "config.json").write_text(json.dumps(config))
    return made


@contextmanager
def serving(*words):
    """The process and the command it printed."""
    command = [sys.executable, "-m", "quire", "serve", *map(str, words), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("  curl "):
                yield process, line.strip()
                break
        else:
            raise AssertionError("".join(said))
    finally:
        process.kill()
        process.communicate()


def run_printed(line):
    got = subprocess.run(
        [*shlex.split(line), "-sS", "--max-time", "60"], capture_output=True, text=True, check=True
    )
    return json.loads(got.stdout)


def test_the_printed_command_works_and_sigterm_ends_the_server_cleanly(folder):
    with serving(
        folder,
        "--load-format",
        "dummy",
        "--kv-cache-memory-bytes",
        "16MiB",
        "--served-model-name",
        "t",
    ) as (process, line):
        answer = run_printed(f"{line} --no-buffer")
        assert answer["model"] == "t"
        assert answer["choices"][0]["message"]["role"] == "assistant"
        url = re.search(r"http://[0-9.:]+", line)[0]
        body = {"prompt": "a", "max_tokens": 480, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)  # what runs may end
        assert rest[-2] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-4]
        assert process.wait(20) == 0


def test_a_taken_port_is_told_before_anything_is_loaded(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            main([str(folder), "--port", str(port)])
        assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "many"], "port"),
        (["--port", "70000"], "port"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout"),
        (["--uvicorn-log-level", "loud"], "uvicorn_log_level"),
        (["--default-chat-template-kwargs", "[1]"], "default_chat_template_kwargs"),
    ],
)
def test_a_bad_flag_is_refused_by_its_name(words, said):
    with pytest.raises(ConfigError, match=said):
        main(["embedded", *words])


def test_an_unknown_flag_names_the_nearest(capsys):
    with pytest.raises(SystemExit):
        main(["embedded", "--prot", "80"])
    assert "--port" in capsys.readouterr().err
