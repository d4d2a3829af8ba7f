"""Many adapters by a Zipf law: random requests, loads, unloads, reloads in place, and engines that
are killed. Each answer is that of an adapter that its name meant while the request ran.

The reference is transformers with the adapter's deltas added to the weights.
"""

import bisect
import itertools
import json
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests import tiers
from tests.cpu.lora_folders import base_model
from tests.server.running import SMALL, serving, wait_until

NAMES = tiers.amount(40, 1000)
OPERATIONS = tiers.amount(90, 10_000)
KILLS = tiers.amount(1, 6)
CLIENTS = 6
SLOTS, HOST = 4, tiers.amount(12, 32)
TARGETS = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"]
PROMPTS = [[7 + (i * k) % 90 for k in range(n)] for i, n in enumerate((3, 21, 40, 18))]
NEAR = 1e-3
"""Logits closer than that may come out in another order."""
FLAGS = f"""--dtype float32 --max-loras {SLOTS} --max-lora-rank 8 --max-cpu-loras {HOST}
    --max-num-seqs 8 --watchdog-seconds 0 --allow-runtime-lora-updating --served-model-name tiny
    --max-engine-restarts 100"""
GONE = None
"""What a name means that is not loaded."""


class Generations:
    """Adapters by number: their folders, and what a model answers with them."""

    def __init__(self, root):
        self.base = base_model(root)
        self.root = root / "generations"
        self._model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def _deltas(self, number):
        """(module, A, B) of each target, and scale."""
        made = torch.Generator().manual_seed(number)
        rank = (1, 4, 8)[number % 3]
        layers = range(len(self._model.model.layers))
        for name in [f"model.layers.{i}.{target}" for i in layers for target in TARGETS]:
            out, width = self._model.get_submodule(name).weight.shape
            a = torch.randn(rank, width, generator=made) * 0.3
            yield name, a, torch.randn(out, rank, generator=made) * 0.3

    def write(self, folder=None):
        """(number, folder) of a new adapter."""
        with self._lock:
            number = next(self._numbers)
        folder = self.root / str(number) if folder is None else folder
        folder.mkdir(parents=True)
        rank = (1, 4, 8)[number % 3]
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        tensors = {}
        for name, a, b in self._deltas(number):
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
        save_file(tensors, folder / "adapter_model.safetensors")
        return number, folder

    @torch.inference_mode()
    def answers(self, number, prompt, tokens):
        """Whether greedy sampling may have given these tokens. number: GONE: the model's own."""
        deltas = [] if number is GONE else list(self._deltas(number))
        with self._lock:
            before = {name: self._model.get_submodule(name).weight.clone() for name, _, _ in deltas}
            for name, a, b in deltas:
                self._model.get_submodule(name).weight += 2 * b @ a
            try:
                logits = self._model(torch.tensor([prompt + tokens[:-1]])).logits[0]
            finally:
                for name, weight in before.items():
                    self._model.get_submodule(name).weight.copy_(weight)
        rows = logits[len(prompt) - 1 :]
        chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return bool((rows.amax(1) - chosen < NEAR).all())


class Name:
    """What a name may mean now, and requests that run: each may be answered by any it has seen."""

    def __init__(self, name):
        self.name = name
        self.changing = threading.Lock()
        self._lock = threading.Lock()
        self._meanings = {GONE}
        self._running = []

    def set(self, *meanings):
        with self._lock:
            self._meanings = set(meanings)
            for seen in self._running:
                seen |= self._meanings

    def begin(self):
        with self._lock:
            seen = set(self._meanings)
            self._running.append(seen)
        return seen

    def end(self, seen):
        with self._lock:
            self._running = [one for one in self._running if one is not seen]

    def meanings(self):
        with self._lock:
            return set(self._meanings)


class Soak:
    def __init__(self, root):
        self.generations = Generations(root)
        self.names = [Name(f"adapter-{i}") for i in range(NAMES)]
        weights = itertools.accumulate(1 / (i + 1) for i in range(NAMES))
        self.zipf = list(weights)
        self.resolved = root / "resolved"
        self.resolved.mkdir()
        self.folders = {}  # of generations
        self.answered = self.failed = 0
        self.outages = 0  # odd: an engine was killed and has not answered since
        self.done = threading.Event()
        self.sizes = []  # MB of the process of the API, at each kill
        tail = [one for i, one in enumerate(self.names) if i % 4]
        for one in tail:  # each is there when a request first names it
            number, folder = self.generations.write(self.resolved / one.name)
            self.folders[str(folder)] = number
            one.first = number
            one.set(number)
        for one in self.names[::4]:
            one.first = GONE

    def pick(self, draw):
        return self.names[bisect.bisect(self.zipf, draw.random() * self.zipf[-1])]

    def operate(self, url, seed, count):
        draw = random.Random(seed)
        with httpx.Client(base_url=url, timeout=120) as http:
            for _ in range(count):
                kind = draw.random()
                if kind < 0.80:
                    self.ask(http, draw, self.pick(draw))
                elif kind < 0.84:
                    self.ask_model(http, draw)
                elif kind < 0.88:
                    self.leave(http, draw, self.pick(draw))
                elif kind < 0.95:
                    self.load(http, draw, self.pick(draw))
                else:
                    self.unload(http, self.pick(draw))

    def ask(self, http, draw, name):
        prompts, count = draw.sample(PROMPTS, draw.choice([1, 1, 2])), draw.choice([1, 3, 6])
        seen = name.begin()
        try:
            answer = self.post(http, name.name, prompts, count)
        finally:
            name.end(seen)
        if answer is None:
            return
        if answer.status_code == 404:
            assert GONE in seen, (name.name, seen, answer.text)
            return
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["model"] == name.name
        for prompt, one in zip(prompts, body["choices"], strict=True):
            tokens = one["token_ids"]
            right = any(
                self.generations.answers(number, prompt, tokens) for number in seen - {GONE}
            )
            assert right, (name.name, seen, prompt, tokens)
        self.answered += 1

    def ask_model(self, http, draw):
        prompt = draw.choice(PROMPTS)
        answer = self.post(http, "tiny", [prompt], 4)
        if answer is not None:
            assert answer.status_code == 200, answer.text
            tokens = answer.json()["choices"][0]["token_ids"]
            assert self.generations.answers(GONE, prompt, tokens)

    def post(self, http, model, prompts, count):
        """An answer; None: the engine was away."""
        body = {"model": model, "prompt": prompts, "max_tokens": count, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        outages = self.outages
        answer = http.post("/v1/completions", json=body)
        return None if self.was_away(answer, outages) else answer

    def was_away(self, answer, outages):
        """Whether a call failed for want of an engine. outages: when it began."""
        if answer.status_code not in (500, 503):
            return False
        self.failed += 1
        assert outages % 2 or self.outages > outages, answer.text
        return True

    def leave(self, http, draw, name):
        """A client that goes in the middle of an answer."""
        body = {"model": name.name, "prompt": PROMPTS[0], "max_tokens": 200, "stream": True,
                "ignore_eos": True}  # fmt: skip
        with http.stream("POST", "/v1/completions", json=body) as stream:
            for _ in zip(range(draw.randrange(4)), stream.iter_lines()):
                pass

    def load(self, http, draw, name):
        with name.changing:
            before = name.meanings()
            number, folder = self.generations.write()
            self.folders[str(folder)] = number
            name.set(number, *before)
            outages = self.outages
            body = {"lora_name": name.name, "lora_path": str(folder), "load_inplace": True}
            answer = http.post("/v1/load_lora_adapter", json=body)
            if self.was_away(answer, outages):
                self.settle(http, name)
            elif answer.status_code == 200:
                name.set(number)
            else:  # a request has it loaded from the resolver's folder just now
                assert "is being loaded" in answer.text, answer.text
                name.set(*before)

    def unload(self, http, name):
        with name.changing:
            before = name.meanings()
            name.set(GONE, name.first, *before)
            outages = self.outages
            answer = http.post("/v1/unload_lora_adapter", json={"lora_name": name.name})
            if self.was_away(answer, outages):
                self.settle(http, name)
                return
            assert answer.status_code in (200, 404), answer.text
            if answer.status_code == 404:
                assert before & {GONE, name.first}, "it was loaded"
            name.set(name.first)  # the resolver has it again

    def settle(self, http, name):
        """Read what a name means after a call whose end is unknown."""
        while True:
            answer = http.get(f"/v1/models/{name.name}")
            if answer.status_code == 404:
                name.set(name.first)
                return
            if answer.status_code == 200:
                name.set(self.folders[answer.json()["root"]])
                return
            time.sleep(0.1)

    def kill(self, running, progress):
        """Kill engines at even distances of the work."""
        for i in range(KILLS):
            while self.answered < (i + 1) * progress:
                if self.done.is_set():
                    return
                time.sleep(0.02)
            self.sizes.append(resident(running))
            self.outages += 1
            engine(running).kill()
            with httpx.Client(base_url=running.url, timeout=120) as http:
                while http.post("/v1/completions", json={"prompt": "a"}).status_code != 200:
                    time.sleep(0.05)
            self.outages += 1


def engine(running):
    children = psutil.Process(running.process.pid).children(recursive=True)
    return next(one for one in children if "quire.engine.core.process_main" in one.cmdline())


def resident(running):
    """MB of the process of the API, which outlives the engines."""
    return running.api[0].memory_info().rss / 1e6


def metric(http, name):
    text = http.get("/metrics").text
    return float(re.search(rf"^quire:{name}\{{.*\}} (\S+)", text, re.M)[1])


def adapters(http):
    """The folder of each model that is listed, by its name: of the base model too."""
    return {one["id"]: one["root"] for one in http.get("/v1/models").json()["data"]}


@pytest.mark.slow("a server with many adapters, and transformers")
def test_each_answer_is_of_the_right_adapter_and_nothing_is_left(tmp_path):
    soak = Soak(tmp_path)
    more = ["--lora-resolver-folder", soak.resolved, "--enable-lora"]
    with serving(soak.generations.base, *SMALL, *FLAGS.split(), *more, QUIRE_CHECK="1") as running:
        lines = []
        running.read_log(lines)
        with ThreadPoolExecutor(CLIENTS + 1) as threads:
            each = OPERATIONS // CLIENTS
            killer = threads.submit(soak.kill, running, OPERATIONS // (2 * (KILLS + 1)))
            clients = [threads.submit(soak.operate, running.url, i, each) for i in range(CLIENTS)]
            try:
                for one in clients:
                    one.result()
            finally:
                soak.done.set()
            killer.result()
        with httpx.Client(base_url=running.url, timeout=120) as http:
            assert resident(running) < soak.sizes[0] + 64
            assert len(soak.sizes) == KILLS
            assert soak.answered > OPERATIONS // 3
            # Gauges show what the engine last reported, and a client that left may have begun a load.
            assert wait_until(lambda: metric(http, "num_requests_running") == 0)
            assert wait_until(lambda: metric(http, "kv_cache_usage_perc") == 0)
            assert metric(http, "lora_host_adapters") <= HOST
            assert wait_until(lambda: metric(http, "lora_names") == len(adapters(http)) - 1)
            listed = adapters(http)
            for name in soak.names:
                (meaning,) = name.meanings()
                if name.name in listed:
                    assert soak.folders[listed[name.name]] == meaning
                else:
                    assert meaning == name.first
            for name in listed.keys() - {"tiny"}:
                assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}).is_success
            assert wait_until(lambda: metric(http, "lora_names") == 0)
            assert wait_until(lambda: metric(http, "lora_host_adapters") == 0)
        drain(running, soak)
        assert not [one for one in lines if "AssertionError" in one]


def drain(running, soak):
    """Loads under way do not keep a server from its end."""
    folders = [str(soak.generations.write()[1]) for _ in range(8)]

    def load(folder):
        body = {"lora_name": folder, "lora_path": folder}
        try:
            return httpx.post(f"{running.url}/v1/load_lora_adapter", json=body, timeout=60)
        except httpx.HTTPError:
            return None

    with ThreadPoolExecutor(len(folders)) as threads:
        loads = [threads.submit(load, folder) for folder in folders]
        running.process.send_signal(signal.SIGTERM)
        found = [one.result() for one in loads]
    assert {one.status_code for one in found if one is not None} <= {200, 500, 503}
    assert running.process.wait(60) == 0
