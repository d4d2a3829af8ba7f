"""Commands and scripts of tutorials for vLLM, as people copy them, against this server.

Only the commands and the code are quoted. What differs from the page: the address, and the model
that answers to the page's names.
"""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading

import pytest

from quire.cli.serve_flags import parse
from tests.server.running import SMALL, serving

NAMES = (
    *("Qwen/Qwen2.5-1.5B-Instruct", "Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    *("qwen2.5-7b-131072", "deepseek-r1:7b"),
)

# -- commands that start a server -------------------------------------------------------------

SERVE = {
    "vllm serve Qwen/Qwen2.5-1.5B-Instruct": {},
    "vllm serve Qwen2.5-7B-Instruct --served-model-name qwen2.5-7b --api_key muyu "
    "--host 192.168.110.131 --port 9000 --trust_remote_code --tensor_parallel_size 2 "
    "--device cuda": {
        "api_key": ("muyu",),
        "host": "192.168.110.131",
        "port": 9000,
        "tensor_parallel_size": 2,
        "device": "cuda",
        "trust_remote_code": True,
    },
    "vllm serve Qwen2___5-7B --served-model-name qwen2.5-7b --api_key muyu "
    "--host 192.168.110.131 --port 9000 --trust_remote_code": {"api_key": ("muyu",)},
    "vllm serve Qwen2___5-7B --max_model_len 150000": {"max_model_len": 150000},
    "vllm serve Qwen2___5-7B --max_model_len 90000 --served-model-name qwen2.5-7b-131072 "
    "--api_key muyu --host 192.168.110.131 --port 9000 --trust_remote_code": {
        "max_model_len": 90000
    },
    "vllm serve Qwen2___5-7B --max_model_len 100000 --gpu_memory_utilization 0.90 "
    "--max_num_seqs 16": {"gpu_memory_utilization": 0.9, "max_num_seqs": 16},
    "vllm serve Qwen2___5-7B --max_model_len 50000 --served-model-name qwen2.5-7b-131072 "
    "--gpu_memory_utilization 0.90 --max_num_seqs 1024 --tensor-parallel-size 2 --api_key muyu "
    "--host 192.168.110.131 --port 9000 --trust_remote_code": {"max_num_seqs": 1024},
    "vllm serve NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123": {
        "dtype": "auto",
        "api_key": ("token-abc123",),
    },
    "vllm serve SOME_MODEL --chat-template ./path-to-chat-template.jinja": {},
    # the words that a tutorial explains one by one
    'vllm serve SOME_MODEL --speculative-model "[ngram]" --num_speculative_tokens 5 '
    "--ngram_prompt_lookup_max 4 --use-v2-block-manager": {
        "speculative_config": {
            "model": "[ngram]",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 4,
        }
    },
    "vllm serve mistralai/Mistral-7B-Instruct-v0.3 --trust-remote-code "
    "--enable-chunked-prefill --max_num_batched_tokens 1024": {"max_num_batched_tokens": 1024},
    "vllm serve facebook/opt-13b --tensor-parallel-size 4": {"tensor_parallel_size": 4},
    "vllm serve gpt2 --tensor-parallel-size 4 --pipeline-parallel-size 2": {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
    },
    "vllm serve /path/to/the/model/in/the/container --tensor-parallel-size 8 "
    "--pipeline-parallel-size 2": {"tensor_parallel_size": 8, "pipeline_parallel_size": 2},
    "vllm serve SOME_MODEL --use-v2-block-manager --num-scheduler-steps 8": {},
    "vllm serve DeepSeek-R1-Distill-Qwen-7B --max_model_len 50000 "
    "--served-model-name deepseek-r1:7b --gpu_memory_utilization 0.90 --tensor-parallel-size 2 "
    "--api_key muyu --host 192.168.110.131 --port 9000 --trust_remote_code --enable-reasoning "
    "--reasoning-parser deepseek_r1": {
        "reasoning_parser": "deepseek_r1",
        "tensor_parallel_size": 2,
    },
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice "
    "--tool-call-parser llama3_json "
    "--chat-template examples/tool_chat_template_llama3_json.jinja": {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "llama3_json",
    },
    "vllm serve meta-llama/Llama-2-7b-hf --enable-lora "
    "--lora-modules sql-lora=$HOME/snapshots/0dfa347e/": {
        "enable_lora": True,
        "lora_modules": ("sql-lora=$HOME/snapshots/0dfa347e/",),
    },
}
"""Command -> options that must come of it."""


def found_options(argv):
    """Every option of engine and server by name."""
    options, server = parse(argv)
    sections = [server, *(getattr(options, name) for name in options.__dataclass_fields__)]
    return {name: getattr(one, name) for one in sections for name in one.__dataclass_fields__}


@pytest.mark.parametrize("command", SERVE)
def test_a_command_of_a_tutorial_is_understood(command):
    _, serve, *argv = shlex.split(command)
    assert serve == "serve"
    options = found_options(argv)
    for name, value in SERVE[command].items():
        assert options[name] == value, name


def test_a_config_file_says_flags(tmp_path):
    text = """host: "127.0.0.1"\nport: 6379\nuvicorn-log-level: "info"\n"""
    (tmp_path / "config.yaml").write_text(text)
    options = found_options(["SOME_MODEL", "--config", str(tmp_path / "config.yaml")])
    assert (options["host"], options["port"]) == ("127.0.0.1", 6379)
    assert options["uvicorn_log_level"] == "info"


# -- commands and scripts that ask one --------------------------------------------------------


@pytest.fixture(scope="module")
def page_server(forked):
    """`python -m vllm.entrypoints.openai.api_server --model <model>`, by the other name."""
    script = ["-m", "quire.as_vllm", "-m", "vllm.entrypoints.openai.api_server"]
    flags = ["--model", "embedded", "--port", "0", "--kv-cache-memory-bytes", "64MiB"]
    command = [sys.executable, *script, *flags, "--served-model-name", *NAMES]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("  curl "):
                break
        else:
            raise AssertionError("".join(lines))
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield re.search(r"http://([0-9.:]+)", lines[-1])[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


ADDRESS = re.compile(r"(localhost:8000|0\.0\.0\.0:8000|192\.168\.110\.131:[89]000)")


def shell(address, command):
    """(status, body) of a curl line."""
    words = shlex.split(ADDRESS.sub(address, command).replace("\\\n", " "))
    words += ["-sS", "--max-time", "60", "-w", "\n%{http_code}"]
    got = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    body, _, status = got.rpartition("\n")
    return int(status), body


COMPLETION = """curl http://localhost:8000/v1/completions \\
    -H "Content-Type: application/json" \\
    -d '{
        "model": "Qwen/Qwen2.5-1.5B-Instruct",
        "prompt": "San Francisco is a",
        "max_tokens": 7,
        "temperature": 0
    }'"""
CHAT = """curl http://localhost:8000/v1/chat/completions \\
    -H "Content-Type: application/json" \\
    -d '{
        "model": "Qwen/Qwen2.5-1.5B-Instruct",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Who won the world series in 2020?"}
        ]
    }'"""
LORA = """curl http://localhost:8000/v1/completions \\
    -H "Content-Type: application/json" \\
    -d '{
        "model": "sql-lora",
        "prompt": "San Francisco is a",
        "max_tokens": 7,
        "temperature": 0
    }'"""
LOAD = """curl -X POST http://localhost:8000/v1/load_lora_adapter \\
-H "Content-Type: application/json" \\
-d '{
    "lora_name": "sql_adapter",
    "lora_path": "/path/to/sql-lora-adapter"
}'"""
UNLOAD = """curl -X POST http://localhost:8000/v1/unload_lora_adapter \\
-H "Content-Type: application/json" \\
-d '{
    "lora_name": "sql_adapter"
}'"""


def test_models_are_listed(page_server):
    status, body = shell(page_server, "curl http://localhost:8000/v1/models")
    assert status == 200
    assert [card["id"] for card in json.loads(body)["data"]] == list(NAMES)


def test_the_completion_line(page_server):
    status, body = shell(page_server, COMPLETION)
    got = json.loads(body)
    assert status == 200
    assert got["usage"]["completion_tokens"] <= 7
    assert got["choices"][0]["text"]


def test_the_chat_line(page_server):
    status, body = shell(page_server, CHAT)
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"]


def test_the_metrics_line(page_server):
    status, body = shell(page_server, "curl http://0.0.0.0:8000/metrics")
    assert status == 200
    assert re.search(r"^\w+:iteration_tokens_total_(sum|bucket)\{", body, re.M)


@pytest.mark.parametrize(("line", "status"), [(LORA, 404), (LOAD, 403), (UNLOAD, 403)])
def test_lines_about_adapters_are_answered_clearly(page_server, line, status):
    got, body = shell(page_server, line)
    assert got == status
    assert json.loads(body)["error"]["message"]


def run(address, script):
    """What a script prints, and its names."""
    said, names = io.StringIO(), {}
    with contextlib.redirect_stdout(said):
        exec(compile(ADDRESS.sub(address, script), "page", "exec"), names)
    names["client"].close()
    return said.getvalue(), names


OPENING = """
from openai import OpenAI

openai_api_key = "EMPTY"
openai_api_base = "http://localhost:8000/v1"
client = OpenAI(
    api_key=openai_api_key,
    base_url=openai_api_base,
)
"""
MUYU = """
from openai import OpenAI

client = OpenAI(
    base_url="http://192.168.110.131:9000/v1",
    api_key="muyu",
)
"""
SCRIPTS = {
    "a completion": OPENING
    + """
completion = client.completions.create(model="Qwen/Qwen2.5-1.5B-Instruct",
                                      prompt="San Francisco is a")
print("Completion result:", completion)
""",
    "a joke": OPENING
    + """
chat_response = client.chat.completions.create(
    model="Qwen/Qwen2.5-1.5B-Instruct",
    messages=[
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Tell me a joke."},
    ]
)
print("Chat response:", chat_response)
""",
    "who are you": """
from openai import OpenAI
client = OpenAI(
    base_url="http://192.168.110.131:8000/v1",
    api_key="sk-xxx",
)

completion = client.chat.completions.create(
model="Qwen2.5-7B-Instruct",
messages=[
    {"role": "user", "content": "你好，请你介绍一下你自己"},
]
)

print(completion.choices[0].message)
""",
    "sampling parameters in extra_body": MUYU
    + """
completion = client.chat.completions.create(
    model="qwen2.5-7b",
    messages=[
        {"role": "user", "content": "你好，请你介绍一下你自己"},
    ],
    extra_body={
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 10,
        "max_tokens": 10,
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "stop": ["\\n"]
    }
)

print(completion.choices[0].message.content)
assert completion.usage.completion_tokens <= 10
""",
    "a long answer": MUYU
    + """
completion = client.chat.completions.create(
    model="qwen2.5-7b-131072",
    messages=[
        {"role": "user", "content": "你好，请你介绍一下你自己"},
    ],
    extra_body={
        "temperature": 0.5,
        "max_tokens": 2048,
    }
)

print(completion.choices[0].message.content)
""",
    "reasoning": MUYU
    + """
models = client.models.list()
models
model = [one.id for one in models.data][4]

messages = [
    {"role": "user", "content": "9.11 and 9.8, 哪个更大?"}
    ]

response = client.chat.completions.create(model=model, messages=messages)

reasoning_content = response.choices[0].message.reasoning_content
content = response.choices[0].message.content

print("reasoning_content:", reasoning_content)
print("content:", content)
assert content

response = client.chat.completions.create(
    model=model,
    messages=messages,
    extra_body={
        "temperature": 0.6,
        "chat_template_kwargs": {"thinking": True}
        }
    )
""",
    "a stream with reasoning": MUYU
    + """
model = client.models.list().data[0].id
messages = [
    {"role": "user", "content": "9.11 and 9.8, 哪个更大?"}
    ]
stream = client.chat.completions.create(model=model,
                                        messages=messages,
                                        stream=True)

printed_reasoning_content = False
printed_content = False
said = ""

for chunk in stream:
    reasoning_content = None
    content = None
    if hasattr(chunk.choices[0].delta, "reasoning_content"):
        reasoning_content = chunk.choices[0].delta.reasoning_content
    elif hasattr(chunk.choices[0].delta, "content"):
        content = chunk.choices[0].delta.content

    if reasoning_content is not None:
        if not printed_reasoning_content:
            printed_reasoning_content = True
            print("reasoning:", end="", flush=True)
        print(reasoning_content, end="", flush=True)
    elif content is not None:
        if not printed_content:
            printed_content = True
            print("text:", end="", flush=True)
        print(content, end="", flush=True)
        said += content
assert said
""",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_runs_as_it_is(page_server, script):
    said, _ = run(page_server, script)
    assert said.strip()


# -- thoughts and calls, where the server was told how the model writes them ------------------

TOOL_SERVER = (
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice "
    "--tool-call-parser llama3_json "
    "--chat-template examples/tool_chat_template_llama3_json.jinja"
)
REASONING_SERVER = next(one for one in SERVE if "--reasoning-parser" in one)
TOOL_SCRIPT = """
from openai import OpenAI
import json

client = OpenAI(base_url="http://localhost:8000/v1", api_key="dummy")

def get_weather(location: str, unit: str):
    return f"Getting the weather for {location} in {unit}..."
tool_functions = {"get_weather": get_weather}

tools = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "City and state, e.g., 'San Francisco, CA'"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}
            },
            "required": ["location", "unit"]
        }
    }
}]

response = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What's the weather like in San Francisco?"}],
    tools=tools,
    tool_choice="auto"
)

tool_call = response.choices[0].message.tool_calls[0].function
print(f"Function called: {tool_call.name}")
print(f"Arguments: {tool_call.arguments}")
print(f"Result: {get_weather(**json.loads(tool_call.arguments))}")
"""


@contextlib.contextmanager
def started(command):
    """The server of a command, with the embedded model in place of the one that is named."""
    _, serve, _, *words = shlex.split(command)
    assert serve == "serve"
    flags = iter(words)
    kept = []
    for word in flags:
        name = word.removeprefix("--").replace("-", "_")
        if name in MACHINE:
            next(flags) if name not in SWITCHES else None
        else:
            kept.append(word)
    with serving("embedded", *SMALL, *kept) as running:
        yield running.url.removeprefix("http://")


MACHINE = {"max_model_len", "gpu_memory_utilization", "tensor_parallel_size", "host", "port"}
"""Flags about the machine of the page, which has other memory, devices and addresses."""
SWITCHES = {"trust_remote_code", "enable_reasoning", "enable_auto_tool_choice"}


def test_the_script_with_tools_runs_where_the_parser_is_the_models(reading_server):
    """The page's model writes llama3_json; the embedded one does not, and its own is found."""
    said, _ = run(reading_server.url.removeprefix("http://"), TOOL_SCRIPT)
    assert said.startswith("Function called: get_weather\nArguments: {")
    assert "Result: Getting the weather for San Francisco" in said


def test_the_command_with_tools_serves_as_written():
    """This model knows nothing of that template: it is made to call."""
    script = TOOL_SCRIPT.replace('tool_choice="auto"', 'tool_choice="required", max_tokens=300')
    with started(TOOL_SERVER) as address:
        said, names = run(address, script)
    assert said.startswith("Function called: get_weather")
    assert "llama3_json" in TOOL_SERVER
    assert set(json.loads(names["tool_call"].arguments)) == {"location", "unit"}


def test_the_scripts_with_reasoning_run_as_written():
    with started(REASONING_SERVER) as address:
        for name in ("reasoning", "a stream with reasoning"):
            script = SCRIPTS[name].replace(
                "for one in models.data][4]", "for one in models.data][0]"
            )
            said, _ = run(address, script)
            assert said.strip()
            if name == "reasoning":
                assert "reasoning_content: None" not in said
