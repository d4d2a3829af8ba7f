"""A tutorial's blocks about serving LoRA adapters, as people copy them: commands, requests, answers.

What differs from the page: the address, the port, and the folder that it calls /path/to.
tests/cpu/test_seeds.py runs its block about LLM.
"""

import json
import os
import shlex
import subprocess
import threading

import pytest

from quire import env
from tests.cpu.lora_folders import write_adapter
from tests.cpu.tiny_models import write_hub, write_model
from tests.server.running import SMALL, serving

MODEL = "meta-llama/Llama-2-7b-hf"
COMMIT = "0dfa347e8877a4d4ed19ee56c140fa518470028c"
HUB = ".cache/huggingface/hub"
SERVE = r"""vllm serve meta-llama/Llama-2-7b-hf \
        --enable-lora \
        --lora-modules sql-lora=$HOME/.cache/huggingface/hub/models--yard1--llama-2-7b-sql-lora-test/snapshots/0dfa347e8877a4d4ed19ee56c140fa518470028c/
"""
ASK = r"""curl http://localhost:8000/v1/completions \
        -H "Content-Type: application/json" \
        -d '{
            "model": "sql-lora",
            "prompt": "San Francisco is a",
            "max_tokens": 7,
            "temperature": 0
        }' | jq
"""
ALLOW = "export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
LOAD = r"""curl -X POST http://localhost:8000/v1/load_lora_adapter \
    -H "Content-Type: application/json" \
    -d '{
        "lora_name": "sql_adapter",
        "lora_path": "/path/to/sql-lora-adapter"
    }'
"""
UNLOAD = r"""curl -X POST http://localhost:8000/v1/unload_lora_adapter \
    -H "Content-Type: application/json" \
    -d '{
        "lora_name": "sql_adapter"
    }'
"""
PAIR = """--lora-modules sql-lora=$HOME/.cache/huggingface/hub/models--yard1--llama-2-7b-sql-lora-test/snapshots/0dfa347e8877a4d4ed19ee56c140fa518470028c/"""
OBJECT = """--lora-modules '{"name": "sql-lora", "path": "/path/to/lora", "base_model_name": "meta-llama/Llama-2-7b"}'"""
MODELS = "curl http://localhost:8000/v1/models"
PAGE_CARDS = """[
            {
            "id": "meta-llama/Llama-2-7b-hf",
            "object": "model",
            "created": 1715644056,
            "owned_by": "vllm",
            "root": "~/.cache/huggingface/hub/models--meta-llama--Llama-2-7b-hf/snapshots/01c7f73d771dfac7d292323805ebc428287df4f9/",
            "parent": null,
            "permission": []
            },
            {
            "id": "sql-lora",
            "object": "model",
            "created": 1715644056,
            "owned_by": "vllm",
            "root": "~/.cache/huggingface/hub/models--yard1--llama-2-7b-sql-lora-test/snapshots/0dfa347e8877a4d4ed19ee56c140fa518470028c/",
            "parent": "meta-llama/Llama-2-7b-hf",
            "permission": []
            }
        ]"""

pytestmark = pytest.mark.slow("servers and peft")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home folder whose hub cache has the page's model and adapter; /path/to is in it too."""
    root = tmp_path_factory.mktemp("home")
    write_hub(root / HUB, {MODEL: "llama"})
    base = write_model(root / "base", "llama")
    snapshot = root / HUB / "models--yard1--llama-2-7b-sql-lora-test/snapshots" / COMMIT
    write_adapter(base, snapshot, targets=["q_proj", "v_proj"], r=8)
    (root / "path" / "to").mkdir(parents=True)
    for name in ("lora", "sql-lora-adapter"):
        (root / "path" / "to" / name).symlink_to(snapshot)
    return root


def words(text, home):
    """Of a command of the page, as a shell cuts it."""
    text = text.replace("$HOME", str(home)).replace("/path/to/", f"{home}/path/to/")
    return shlex.split(text.replace("\\\n", " "))


def curl(running, home, text):
    """The body of an answer."""
    text = text.replace("http://localhost:8000", running.url).replace("| jq", "")
    command = [*words(text, home), "-sS", "--max-time", "60"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def running(home):
    name, value = ALLOW.removeprefix("export ").split("=")
    command = words(SERVE, home)
    assert command[:2] == ["vllm", "serve"]
    assert words(PAIR, home) == command[-2:]
    variables = {name: value, "HOME": str(home), "HF_HUB_OFFLINE": "1"}
    variables["QUIRE_CACHE"] = str(env.read().cache_dir)  # with compiled kernels
    variables |= {"HF_HOME": "", "HF_HUB_CACHE": ""} if "HF_HOME" in os.environ else {}
    with serving(*command[2:], *SMALL, forked=False, **variables) as found:
        threading.Thread(target=found.process.stdout.read, daemon=True).start()
        yield found


def test_the_completion_of_the_page(running, home):
    body = json.loads(curl(running, home, ASK))
    assert body["model"] == "sql-lora"
    assert body["usage"]["completion_tokens"] <= 7
    base = json.loads(curl(running, home, ASK.replace("sql-lora", MODEL)))
    assert base["choices"][0]["text"] != body["choices"][0]["text"]


def test_loading_and_unloading_as_on_the_page(running, home):
    ask = ASK.replace("sql-lora", "sql_adapter")
    assert json.loads(curl(running, home, ask))["error"]["code"] == 404
    loaded = curl(running, home, LOAD)
    assert loaded == "Success: LoRA adapter 'sql_adapter' added successfully."
    assert json.loads(curl(running, home, ask))["model"] == "sql_adapter"
    again = json.loads(curl(running, home, LOAD))["error"]
    assert (again["code"], again["type"]) == (400, "InvalidUserInput")
    unloaded = curl(running, home, UNLOAD)
    assert unloaded == "Success: LoRA adapter 'sql_adapter' removed successfully."
    gone = json.loads(curl(running, home, UNLOAD))["error"]
    assert (gone["code"], gone["type"]) == (404, "NotFoundError")


def test_the_lineage_of_the_page(running, home):
    body = json.loads(curl(running, home, MODELS))
    assert body["object"] == "list"
    for shown, found in zip(json.loads(PAGE_CARDS), body["data"], strict=True):
        for field in ("id", "object", "parent"):
            assert found[field] == shown[field]
        assert shown.keys() <= found.keys()
        assert found["permission"][0]["object"] == "model_permission"
        assert isinstance(found["created"], int)
    shown = json.loads(PAGE_CARDS)[1]["root"].replace("~", str(home))
    assert found["root"] == shown.rstrip("/")


def test_the_new_form_of_modules(home):
    base = home / "base"
    with serving(base, *words(OBJECT, home), *SMALL, "--served-model-name", "x") as found:
        threading.Thread(target=found.process.stdout.read, daemon=True).start()
        cards = json.loads(curl(found, home, MODELS))["data"]
    assert [(one["id"], one["parent"]) for one in cards] == [
        ("x", None),
        ("sql-lora", "meta-llama/Llama-2-7b"),
    ]
