"""Adapters that requests name without loading them, and adapters of tenants, at a real server."""

import hashlib
import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.cpu.lora_folders import Peft, base_model, write_adapter
from tests.server.running import SMALL, serving, wait_until

COUNT = 4
PROMPT = [7 + 3 * k % 90 for k in range(20)]
ASK = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True,
       "return_token_ids": True}  # fmt: skip
FLAGS = "--dtype float32 --max-loras 2 --max-lora-rank 8 --max-cpu-loras 4 --watchdog-seconds 0"
LOADS = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions", "/v1/models*"]

pytestmark = pytest.mark.slow("servers, transformers and peft")


def entry(name, **more):
    digest = hashlib.sha256(f"key of {name}".encode()).hexdigest()
    return {"name": name, "sha256": digest, **more}


class Case:
    def __init__(self, root):
        self.root = root
        self.base = base_model(root)
        self.resolved = root / "resolved"
        self.folders = [
            write_adapter(self.base, place, i, ["q_proj", "down_proj"])
            for i, place in enumerate([self.resolved / "sql", root / "a" / "one", root / "b" / "x"])
        ]
        peft = Peft(self.base)
        self.want = {None: peft.greedy(PROMPT, COUNT)[0]}
        for i, folder in enumerate(self.folders):
            self.want[i] = peft.greedy(PROMPT, COUNT, str(folder))[0]
        shutil.copytree(self.folders[0], self.resolved / "org" / "sql")
        (self.resolved / "out").symlink_to(self.folders[1])
        shutil.copytree(self.folders[0], self.resolved / "bad")
        config = json.loads((self.resolved / "bad" / "adapter_config.json").read_text())
        (self.resolved / "bad" / "adapter_config.json").write_text(json.dumps(config | {"r": 99}))
        self.keys = root / "keys.json"
        entries = [
            entry("a", routes=LOADS, max_adapters=2, adapter_folders=[str(root / "a")]),
            entry("b", routes=LOADS),
            entry("user"),
            entry("root", operator=True),
        ]
        self.keys.write_text(json.dumps({"keys": entries}))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("tenants"))


@pytest.fixture(scope="module")
def lines():
    """What the server logs."""
    return []


@pytest.fixture(scope="module")
def clients(case, lines):
    """By the name of a key."""
    command = [str(case.base), *SMALL, *FLAGS.split(), "--enable-lora", "--served-model-name", "t"]
    keys = ["--api-key-file", str(case.keys), "--lora-allowed-folders", str(case.root),
            "--enable-log-requests"]  # fmt: skip
    variables = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(case.resolved),
    }
    with serving(*command, *keys, **variables) as found:
        found.read_log(lines)
        made = {}
        for name in ("a", "b", "user", "root"):
            head = {"Authorization": f"Bearer key of {name}"}
            made[name] = httpx.Client(base_url=found.url, headers=head, timeout=60)
        yield made
        for one in made.values():
            one.close()


def ask(http, model, path="/v1/completions", **body):
    return http.post(path, json=(body or ASK) | {"model": model})


def tokens(http, model):
    answer = ask(http, model)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["token_ids"]


def load(http, name, path, **more):
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def unload(http, name, **more):
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name, **more})


def models(http):
    return {one["id"]: one for one in http.get("/v1/models").json()["data"]}


def metric(http, name):
    """A number of quire."""
    text = http.get("/metrics").text
    return float(re.search(rf"^quire:{name}\{{.*\}} (\S+)", text, re.M)[1])


def test_a_folder_is_loaded_when_a_request_first_names_it(case, clients, lines):
    http = clients["user"]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: tokens(http, "sql"), range(4)))
    assert found == [case.want[0]] * 4
    assert models(http)["sql"]["root"] == str(case.folders[0])
    wait_until(lambda: metric(clients["root"], "lora_loads_total") == 1)
    assert metric(clients["root"], "lora_loads_total") == 1
    assert metric(clients["root"], "lora_load_seconds_total") > 0
    assert metric(clients["root"], "lora_names") == metric(clients["root"], "lora_host_adapters")
    assert wait_until(lambda: any(", adapter 'sql'" in one for one in lines))
    assert tokens(http, "org/sql") == case.want[0]
    assert tokens(http, "t") == case.want[None]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [5, 6]}),
        ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [5, 6]}),
    ],
)
def test_each_route_loads_what_it_names(case, clients, path, body):
    name = path.replace("/", "-")
    shutil.copytree(case.folders[0], case.resolved / name)
    assert ask(clients["user"], name, path, **body).status_code == 200
    assert name in models(clients["user"])
    assert ask(clients["user"], "nobody", path, **body).status_code == 404


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("none", 404, "no model 'none' here; there is t"),
        ("../a/one", 404, "no model"),
        ("/etc", 404, "no model"),
        ("org", 404, "no model"),
        ("bad", 400, "max_lora_rank"),
        ("out", 400, "not in a folder"),
    ],
)
def test_what_cannot_be_resolved_has_a_reason(case, clients, name, status, message):
    for _ in range(2):
        answer = ask(clients["user"], name)
        assert answer.status_code == status, answer.text
        assert message in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "model"
    assert name not in models(clients["user"])


def test_what_a_key_loads_is_its_own(case, clients):
    a, b, user, root = (clients[one] for one in ("a", "b", "user", "root"))
    assert load(a, "mine", str(case.folders[1])).status_code == 200
    assert load(b, "mine", str(case.folders[2])).status_code == 200
    assert tokens(a, "mine") == case.want[1]
    assert tokens(b, "mine") == case.want[2]
    for other in (user, root):
        assert ask(other, "mine").status_code == 404
        assert "mine" not in models(other)
        assert other.get("/v1/models/mine").status_code == 404
        assert "mine" not in ask(other, "nobody").json()["error"]["message"]
    assert models(a)["mine"]["root"] == str(case.folders[1])
    assert load(user, "mine", str(case.folders[2])).status_code == 403
    assert unload(b, "mine").status_code == 200
    assert tokens(a, "mine") == case.want[1]
    assert unload(b, "mine").status_code == 404
    assert unload(a, "mine").status_code == 200


def test_a_keys_own_adapter_comes_before_one_for_all(case, clients):
    a, b, root = (clients[one] for one in ("a", "b", "root"))
    assert load(root, "both", str(case.folders[2])).status_code == 200
    assert tokens(a, "both") == case.want[2]
    assert load(a, "both", str(case.folders[1])).status_code == 200
    assert (tokens(a, "both"), tokens(b, "both")) == (case.want[1], case.want[2])
    assert len([one for one in a.get("/v1/models").json()["data"] if one["id"] == "both"]) == 1
    assert unload(a, "both").status_code == 200
    assert tokens(a, "both") == case.want[2]
    assert unload(a, "both").status_code == 404, "it is not its own"
    assert unload(root, "both").status_code == 200


def test_an_operator_loads_for_a_tenant(case, clients):
    a, b, root = (clients[one] for one in ("a", "b", "root"))
    assert load(root, "given", str(case.folders[2]), tenant="a").status_code == 200
    assert tokens(a, "given") == case.want[2]
    assert ask(b, "given").status_code == 404
    wrong = load(root, "given", str(case.folders[2]), tenant="nobody")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tenant")
    wrong = load(b, "x", str(case.folders[2]), tenant="a")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "InvalidUserInput")
    assert unload(root, "given").status_code == 404
    assert unload(root, "given", tenant="a").status_code == 200
    assert ask(a, "given").status_code == 404


def test_a_key_loads_from_its_folders_and_so_many(case, clients):
    a = clients["a"]
    outside = load(a, "x", str(case.folders[2]))
    assert outside.status_code == 400
    assert "not in a folder" in outside.json()["error"]["message"]
    for name in ("x1", "x2"):
        assert load(a, name, str(case.folders[1])).status_code == 200
    more = load(a, "x3", str(case.folders[1]))
    assert (more.status_code, more.json()["error"]["type"]) == (400, "InvalidUserInput")
    assert "its limit: unload one" in more.json()["error"]["message"]
    assert load(clients["b"], "x3", str(case.folders[1])).status_code == 200
    for name in ("x1", "x2"):
        assert unload(a, name).status_code == 200


def test_routes_of_pooling_load_what_they_name(case):
    command = [str(case.base), *SMALL, *FLAGS.split(), "--enable-lora"]
    more = ["--runner", "pooling", "--convert", "embed", "--lora-resolver-folder", case.resolved]
    with serving(*command, *more) as found:
        threading.Thread(target=found.process.stdout.read, daemon=True).start()
        with httpx.Client(base_url=found.url, timeout=60) as http:
            vectors = {}
            for name in (None, "sql"):
                answer = ask(http, name, "/v1/embeddings", input=PROMPT)
                assert answer.status_code == 200, answer.text
                vectors[name] = answer.json()["data"][0]["embedding"]
            assert answer.json()["model"] == "sql"
            assert vectors["sql"] != vectors[None]
            assert ask(http, "sql", "/pooling", input=PROMPT).json()["model"] == "sql"
            assert ask(http, "bad", "/v1/embeddings", input=PROMPT).status_code == 400
            assert ask(http, "none", "/v1/embeddings", input=PROMPT).status_code == 404


@pytest.mark.long("two processes of an API")
def test_all_processes_of_a_server_have_the_same_names(case):
    command = [str(case.base), *SMALL, *FLAGS.split(), "--enable-lora", "--api-server-count", "2"]
    more = ["--lora-resolver-folder", case.resolved, "--allow-runtime-lora-updating"]
    with serving(*command, *more) as found:
        threading.Thread(target=found.process.stdout.read, daemon=True).start()
        assert len(found.api) == 2

        def everywhere(name):
            """The status of each of many connections, which both processes take."""
            with ThreadPoolExecutor(16) as threads:
                bodies = [ASK | {"model": name}] * 32
                url = f"{found.url}/v1/completions"
                answers = threads.map(lambda body: httpx.post(url, json=body, timeout=60), bodies)
                return {one.status_code for one in answers}

        assert everywhere("sql") == {200}
        with httpx.Client(base_url=found.url, timeout=60) as http:
            assert wait_until(lambda: metric(http, "lora_loads_total") == 1)
            assert load(http, "x", str(case.folders[1])).status_code == 200
            assert everywhere("x") == {200}
            assert unload(http, "x").status_code == 200
            assert everywhere("x") == {404}
            assert load(http, "x", str(case.folders[1])).status_code == 200
            found.engine.kill()
            assert wait_until(lambda: everywhere("x") == {200}, 60)
            assert wait_until(lambda: metric(http, "lora_names") == 2, 60)
