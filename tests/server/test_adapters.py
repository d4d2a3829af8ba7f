"""LoRA adapters of a server: names, routes that load and unload, keys, and an engine that dies."""

import json
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from quire.cli.serve_flags import parse
from quire.config.adapters import parse_modules
from quire.config.engine_config import StartupAdapter
from quire.errors import ConfigError
from quire.server.auth.api_keys import KeyOwner
from tests.cpu.lora_folders import Peft, base_model, write_adapter
from tests.server.broken_adapters import write_broken
from tests.server.running import SMALL, serving, wait_until

COUNT = 6
PROMPT = [7 + 3 * k % 90 for k in range(25)]
ASK = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True,
       "return_token_ids": True}  # fmt: skip
FLAGS = "--dtype float32 --max-loras 2 --max-lora-rank 8 --max-cpu-loras 4 --watchdog-seconds 0"


class Case:
    def __init__(self, root):
        self.root = root
        self.base = base_model(root)
        self.folders = [write_adapter(self.base, root / f"a{i}", i) for i in range(3)]
        peft = Peft(self.base)
        self.want = {None: peft.greedy(PROMPT, COUNT)[0]}
        for i, folder in enumerate(self.folders):
            self.want[i] = peft.greedy(PROMPT, COUNT, str(folder))[0]

    def copy(self, index, name):
        made = self.root / "runtime" / name
        shutil.copytree(self.folders[index], made, dirs_exist_ok=True)
        return str(made)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def running(case):
    modules = [
        f"first={case.folders[0]}",
        json.dumps({"name": "org/second", "path": str(case.folders[1]), "base_model_name": "base"}),
    ]
    command = [str(case.base), *SMALL, *FLAGS.split(), "--served-model-name", "tiny"]
    allowed = ["--lora-allowed-folders", str(case.root), "--enable-dev-routes"]
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with serving(*command, *allowed, "--lora-modules", *modules, **variables) as found:
        threading.Thread(target=found.process.stdout.read, daemon=True).start()
        yield found


@pytest.fixture(scope="module")
def http(running):
    with httpx.Client(base_url=running.url, timeout=60) as made:
        yield made


def tokens(http, model, **more):
    answer = http.post("/v1/completions", json=ASK | {"model": model} | more)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["model"] == model
    return body["choices"][0]["token_ids"]


def load(http, name, path, **more):
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def number(http, name):
    """A metric of quire."""
    text = http.get("/metrics").text
    return float(re.search(rf"^quire:{name}\{{.*\}} (\S+)", text, re.M)[1])


def unload(http, name):
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


pytestmark = pytest.mark.slow("a server, transformers and peft")


def test_a_model_name_selects_the_adapter(case, http):
    names = {"tiny": None, "first": 0, "org/second": 1}
    for _ in range(2):
        for name, index in names.items():
            assert tokens(http, name) == case.want[index], name
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda name: tokens(http, name), [*names] * 4))
    assert together == [case.want[index] for index in names.values()] * 4
    wrong = http.post("/v1/completions", json=ASK | {"model": "third"})
    assert wrong.status_code == 404
    assert "there is tiny, first, org/second" in wrong.json()["error"]["message"]


def test_models_are_listed_with_their_lineage(case, http):
    listed = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
    assert list(listed)[:3] == ["tiny", "first", "org/second"]
    assert listed["tiny"]["parent"] is None
    first, second = listed["first"], listed["org/second"]
    assert (first["root"], first["object"]) == (str(case.folders[0]), "model")
    assert first["parent"] == "tiny", "an id of the list"
    assert second["parent"] == "base"
    assert first["permission"][0]["object"] == "model_permission"
    assert http.get("/v1/models/org/second").json()["root"] == str(case.folders[1])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
        ("/tokenize", {"prompt": "Hello"}),
        ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [5, 6]}),
    ],
)
def test_other_routes_take_adapters(http, path, body):
    found = http.post(path, json=body | {"model": "first"})
    assert found.status_code == 200, found.text
    if path != "/tokenize":
        assert found.json()["model"] == "first"
    assert http.post(path, json=body | {"model": "nobody"}).status_code == 404


def test_streams_name_the_adapter(http):
    with http.stream("POST", "/v1/completions", json=ASK | {"model": "first", "stream": True}) as s:
        chunks = [json.loads(one[6:]) for one in s.iter_lines() if one.startswith("data: {")]
    assert {one["model"] for one in chunks} == {"first"}


def test_adapters_come_change_and_go(case, http):
    folder = case.copy(2, "live")
    answer = load(http, "live", folder)
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'live' added successfully.",
    )
    assert tokens(http, "live") == case.want[2]
    again = load(http, "live", folder)
    assert again.status_code == 400
    assert again.json()["error"]["type"] == "InvalidUserInput"
    assert "has already been loaded" in again.json()["error"]["message"]
    case.copy(0, "live")
    assert tokens(http, "live") == case.want[2], "the content that was loaded"
    assert load(http, "live", folder, load_inplace=True).status_code == 200
    assert tokens(http, "live") == case.want[0]
    gone = unload(http, "live")
    assert (gone.status_code, gone.text) == (
        200,
        "Success: LoRA adapter 'live' removed successfully.",
    )
    assert http.post("/v1/completions", json=ASK | {"model": "live"}).status_code == 404
    assert unload(http, "live").status_code == 404


def test_what_cannot_be_loaded_has_a_reason(case, http, tmp_path):
    rank = str(write_adapter(case.base, case.root / "rank", 5, ["q_proj"], 16))
    other = case.root / "other"
    shutil.copytree(case.folders[0], other)
    tensors = load_file(other / "adapter_model.safetensors")
    renamed = {name.replace("q_proj", "qq_proj"): one for name, one in tensors.items()}
    save_file(renamed, other / "adapter_model.safetensors")
    (case.root / "out").symlink_to(tmp_path)
    good = str(case.folders[0])
    for name, path, status, kind, message in [
        ("", good, 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."),
        ("x", "", 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."),
        ("tiny", good, 400, "InvalidUserInput", "name of the served model"),
        ("a\nb", good, 400, "InvalidUserInput", "printable"),
        ("x" * 300, good, 400, "InvalidUserInput", "256"),
        ("x", str(case.root / "none"), 404, "NotFoundError", "there is no adapter"),
        ("x", "/etc", 400, "BadRequestError", "not in a folder"),
        ("x", f"{case.root}/../..", 400, "BadRequestError", "not in a folder"),
        ("x", str(case.root / "out"), 400, "BadRequestError", "not in a folder"),
        ("x", str(case.root), 400, "BadRequestError", "it is not a LoRA adapter"),
        ("x", rank, 400, "BadRequestError", "max_lora_rank"),
        ("x", str(other), 400, "BadRequestError", "qq_proj"),
    ]:
        answer = load(http, name, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (status, kind), (name, path, error)
        assert message in error["message"]
        assert tokens(http, "first") == case.want[0]
    assert unload(http, "").status_code == 400
    assert "x" not in [one["id"] for one in http.get("/v1/models").json()["data"]]


def test_metrics_name_the_adapters(case, http):
    assert tokens(http, "first") == case.want[0]
    text = http.get("/metrics").text
    (line,) = [one for one in text.splitlines() if one.startswith("vllm:lora_requests_info{")]
    assert 'max_lora="2"' in line
    assert 'running_lora_adapters=""' in line
    loads = re.search(r"^quire:lora_slot_loads_total\{.*\} (\S+)", text, re.M)
    assert float(loads[1]) >= 1


def test_two_loads_of_one_name_at_once(case, http):
    folder = case.copy(2, "twice")
    with ThreadPoolExecutor(4) as threads:
        found = [a.status_code for a in threads.map(lambda _: load(http, "twice", folder), "1234")]
    assert sorted(found) == [200, 400, 400, 400]
    assert tokens(http, "twice") == case.want[2]
    assert unload(http, "twice").status_code == 200


def test_broken_adapters_are_refused_and_neighbours_keep_their_bits(case, http, tmp_path):
    """Neighbours: answers of the model and of an adapter that run meanwhile, with logprobs."""

    def answer(name):
        body = ASK | {"model": name, "max_tokens": 60, "logprobs": 2}
        (choice,) = http.post("/v1/completions", json=body).json()["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    want = {name: answer(name) for name in ("tiny", "first")}
    count, done = 0, threading.Event()

    def neighbour(name):
        rounds = 0
        while not done.is_set():
            assert answer(name) == want[name], name
            rounds += 1
        return rounds

    before = [one["id"] for one in http.get("/v1/models").json()["data"]]
    with ThreadPoolExecutor(2) as threads:
        neighbours = [threads.submit(neighbour, name) for name in want]
        try:
            for what, folder in write_broken(case.folders[0], case.root / "broken"):
                refused = load(http, f"broken {count}", str(folder))
                assert refused.status_code in (400, 404), (what, refused.text)
                assert len(refused.json()["error"]["message"]) < 2500, what
                count += 1
        finally:
            done.set()
        assert min(one.result() for one in neighbours) > 0
    assert count >= 30
    assert not Path("this-code-ran").exists()
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == before


def test_a_request_that_waits_keeps_what_is_unloaded(case, http):
    """All steps are paused: the request is in the queue when its adapter's name goes."""
    assert load(http, "brief", case.copy(2, "brief")).status_code == 200
    assert http.post("/pause", params={"mode": "keep"}).status_code == 200
    with ThreadPoolExecutor(2) as threads:
        try:
            waiting = threads.submit(tokens, http, "brief")
            assert wait_until(lambda: number(http, "num_requests_waiting") == 1)
            assert load(http, "brief", case.copy(1, "other"), load_inplace=True).status_code == 200
            second = threads.submit(tokens, http, "brief")
            assert wait_until(lambda: number(http, "num_requests_waiting") == 2)
            assert unload(http, "brief").status_code == 200
            assert http.post("/v1/completions", json=ASK | {"model": "brief"}).status_code == 404
        finally:
            http.post("/resume")
        assert waiting.result() == case.want[2]
        assert second.result() == case.want[1]


@pytest.mark.parametrize("level", ["0", "1"])
def test_adapters_are_loaded_while_the_engine_sleeps(case, http, level):
    name = f"slept{level}"
    assert tokens(http, "first") == case.want[0]
    assert http.post("/sleep", params={"level": level}).status_code == 200
    try:
        assert load(http, name, case.copy(2, name)).status_code == 200
        bad = load(http, "bad", str(case.root))
        assert bad.status_code == 400
    finally:
        assert http.post("/wake_up").status_code == 200
    assert tokens(http, name) == case.want[2]
    assert tokens(http, "first") == case.want[0]
    assert unload(http, name).status_code == 200


def test_adapters_outlive_their_engine(case, http, running):
    assert load(http, "kept", case.copy(2, "kept")).status_code == 200
    running.engine.kill()
    end = time.monotonic() + 120
    while time.monotonic() < end:
        answer = http.post("/v1/completions", json=ASK | {"model": "kept"})
        if answer.status_code == 200:
            break
        assert answer.status_code in (404, 503), answer.text
        time.sleep(0.2)
    assert answer.json()["choices"][0]["token_ids"] == case.want[2]
    assert tokens(http, "first") == case.want[0]


# -- without a server -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["a=/x,y=z"], [StartupAdapter("a", "/x,y=z")]),
        (['{"name": "a=b", "path": "/x", "base_model_name": "m"}'],
         [StartupAdapter("a=b", "/x", "m")]),
        (['[{"name": "a", "path": "/x"}, {"name": "b", "path": "/y"}]', "c=/z"],
         [StartupAdapter("a", "/x"), StartupAdapter("b", "/y"), StartupAdapter("c", "/z")]),
    ],
)  # fmt: skip
def test_forms_of_lora_modules(given, found):
    assert list(parse_modules(given)) == found
    options, _ = parse(["m", "--lora-modules", *given])
    assert list(parse_modules(options.lora.lora_modules)) == found


@pytest.mark.parametrize("given", ["a", "=x", "a=", "{", '{"name": "a"}', '{"name": 1, "path": 2}'])
def test_wrong_forms_of_lora_modules(given):
    with pytest.raises(ConfigError, match="lora_modules"):
        list(parse_modules([given]))


def test_a_key_may_load_adapters_only_if_its_routes_name_that():
    path = "/v1/load_lora_adapter"
    assert KeyOwner().may_access(path)
    assert KeyOwner(routes=("/v1/completions", path)).may_access(path)
    assert not KeyOwner(routes=("/v1/*", "*")).may_access(path)
    assert KeyOwner(routes=("/v1/*",)).may_access("/v1/models")
