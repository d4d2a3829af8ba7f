"""A real server under abuse: what it is at rest, who is served beside, and what came of each case.

    with victim.unharmed():            # measures, starts a bystander, and afterwards looks again
        victim.check(cases)            # sends every case to every route that takes it

A case is data (`Case`). It speaks one dialect's words; `dialects` says them to the others. Each is
sent streamed and not, every day to some of its routes. What must hold: an answer in time, 4xx in the dialect's shape or the right
200, no path, address, stack or stranger's text in it, every dialect of one mind; and then the same
processes, /ready, no block held, and memory, files, threads, sockets, children as they were.
"""

import asyncio
import json
import os
import re
import threading
import time
import zlib
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import psutil

from tests import tiers
from tests.abuse import dialects

KEY, OTHER_KEY = "abuse-alpha-4f1c", "abuse-beta-9b27"
CANARY = "xylophone-77d1"
"""Stands in the prompt of the bystander: nobody else may ever see it."""
AUTH = {"Authorization": f"Bearer {KEY}"}
FLAGS = (
    *("--kv-cache-memory-bytes", "64MiB", "--max-body-bytes", "8MiB", "--shutdown-timeout", "1"),
    *("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--enable-responses-store", "--responses-store-size", "32", "--enable-request-id-headers"),
    *("--enable-log-requests", "--access-log", "--enable-server-load-tracking"),
    "--enable-prompt-embeds",
)
"""As an operator would have it: keys come from the environment, operating routes are closed."""

LONG = tiers.LONG
"""More of everything, with --long."""
WITHIN_S = 20.0
MOST_CHARS = 4000
"""Of an error's message: it is not for sending a client's own megabyte back."""
PRIVATE = re.compile(
    r"(?:/(?:work|usr|home|tmp|root|etc|proc|var|opt)/\w|[A-Za-z]:\\\\(?!\\*x[0-9a-f]{2})|0x[0-9a-f]{6,}"
    r'|Traceback|File \\?"|\.py\b|site-packages|pydantic\.dev)'
)
AT_ONCE = 8
SETTLE_S = 20.0
MOST_CHILDREN = 6
"""Processes besides the first: API, engine, and workers that are hired when there is work."""
MOST_GROWTH = 400 << 20
"""Bytes of resident memory that a batch may leave behind in a process: heaps of threads do not
shrink. That they do not grow for ever is test_harness.py's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input. It is sent to each of `routes` that has a word for every field of it.

    fields: in the words of `dialects`. raw: the body itself, in place of fields.
    expect: "refused", "answered", "either": what is right everywhere. differs: route -> what is
    right there, and the reason stands beside it as a comment.
    """

    id: str
    origin: str
    fields: dict[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    expect: str = "refused"
    routes: tuple[str, ...] = dialects.GENERATING
    differs: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    streams: bool = True
    everywhere: bool = False  # every day too
    within_s: float = WITHIN_S


@dataclass(slots=True)
class Answer:
    """What came back."""

    case: Case
    route: str
    stream: bool
    status: int
    text: str
    headers: Any
    seconds: float
    sent: bytes

    @property
    def verdict(self) -> str:
        """refused, answered or failed."""
        if self.status == 501 or 400 <= self.status < 500:
            return "refused"
        if self.status != 200:
            return f"failed ({self.status})"
        error = self.told()
        if error is None:
            return "answered"
        code = error.get("code", 400)
        return "refused" if isinstance(code, int) and code < 500 else f"failed (event {code})"

    def told(self) -> dict[str, Any] | None:
        """The error, of the answer or of its stream."""
        if self.status != 200:
            return error_of(self.route, self.text)
        for line in self.text.splitlines() if self.stream else ():
            given = line.removeprefix("data: ")
            if '"error"' in given and given.startswith("{"):
                found = json.loads(given)
                if found.get("error"):
                    return found["error"]
                if (found.get("response") or {}).get("error"):
                    return found["response"]["error"]
        return None

    def faults(self) -> list[str]:
        """What is wrong with it by itself."""
        where = f"{self.case.id} {self.route}{' streamed' if self.stream else ''}"
        wanted = self.case.differs.get(self.route, self.case.expect)
        found = []
        if self.verdict != wanted and not (wanted == "either" and "failed" not in self.verdict):
            found.append(f"{where}: {self.verdict}, not {wanted}: {self.status} {self.text[:300]}")
        if self.seconds > self.case.within_s * slowdown():
            found.append(f"{where}: took {self.seconds:.1f} s")
        if self.status != 200:
            found += [f"{where}: {one}" for one in error_faults(self)]
        if CANARY in self.text:
            found.append(f"{where}: shows the text of another user")
        return found


def slowdown() -> float:
    """How many times as long a busy machine takes: as many as want each of its cores."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def error_of(route: str, text: str) -> dict[str, Any] | None:
    """The error object, if the body has the dialect's shape."""
    try:
        body = json.loads(text)
    except ValueError:
        return None
    if dialects.is_anthropic(route) and body.get("type") != "error":
        return None
    error = body.get("error")
    return error if isinstance(error, dict) else None


def error_faults(answer: Answer) -> list[str]:
    """What is wrong with an error's body."""
    error = error_of(answer.route, answer.text)
    if error is None:
        return [f"no error of this dialect: {answer.status} {answer.text[:200]!r}"]
    found = []
    message = error.get("message")
    if not isinstance(message, str) or not message:
        found.append(f"an error without a message: {answer.text[:200]!r}")
    if len(answer.text) > MOST_CHARS:
        found.append(f"a message of {len(answer.text)} characters")
    for match in PRIVATE.finditer(answer.text):
        if match[0].encode() not in answer.sent:  # what the client said itself it may hear
            found.append(f"tells {match[0]!r}: {answer.text[:300]!r}")
    for key in (KEY, OTHER_KEY):
        if key in answer.text:
            found.append("tells a key")
    return found


@dataclass(slots=True)
class Figures:
    """The server at rest."""

    pids: dict[str, int]
    rss: dict[str, int]
    fds: dict[str, int]
    threads: dict[str, int]
    children: int
    listening: set[str]
    files: set[str]
    held: float
    busy: float
    ready: int

    def harm(self, before: "Figures", growth: int = MOST_GROWTH) -> list[str]:
        """What is not as it was."""
        found = []
        for name in ("pids", "listening", "files", "held", "busy"):
            now, then = getattr(self, name), getattr(before, name)
            if now != then:
                found.append(f"{name}: {then} -> {now}")
        if self.ready != 200:
            found.append(f"/ready: {self.ready}")
        if self.children > max(MOST_CHILDREN, before.children):
            found.append(f"children: {before.children} -> {self.children}")
        hired = max(0, self.children - before.children)  # each has a thread and a link of its own
        for name, most in (("rss", growth), ("fds", hired), ("threads", hired)):
            then = getattr(before, name)
            for process, now in getattr(self, name).items():
                if now > then.get(process, 0) + most:
                    found.append(f"{name} of {process}: {then.get(process)} -> {now}")
        return found


BESIDE = {
    "model": "embedded",
    "prompt": f"The {CANARY} and the sea. Once upon a time",
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


class Bystander:
    """A greedy stream that is asked for again and again, and says the same each time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.rounds = 0
        self.longest_gap_s = 0.0
        self.faults: list[str] = []
        self._over = threading.Event()
        with httpx.Client(headers=AUTH, timeout=60) as client:
            self.solo = self._round(client)
        self.longest_gap_s = 0.0

    @contextmanager
    def beside(self):
        self._over.clear()
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(120)
        assert not thread.is_alive(), "the bystander's stream does not end"
        assert not self.faults, self.faults[:3]

    def _run(self) -> None:
        try:
            with httpx.Client(headers=AUTH, timeout=60) as client:
                is_over = False
                while not is_over:  # once at least
                    is_over = self._over.is_set()
                    said = self._round(client)
                    self.rounds += 1
                    if said != self.solo:
                        self.faults.append(f"{self.solo!r} became {said!r}")
        except Exception as error:  # noqa: BLE001 - told by beside()
            self.faults.append(f"the bystander was harmed: {error!r}")

    def _round(self, client: httpx.Client) -> str:
        said, last = [], time.monotonic()
        with client.stream("POST", f"{self.url}/v1/completions", json=BESIDE) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                now = time.monotonic()
                self.longest_gap_s, last = max(self.longest_gap_s, now - last), now
                if line.startswith("data: {"):
                    said += [one["text"] for one in json.loads(line[6:])["choices"]]
        return "".join(said)


class Victim:
    """A server that is abused. lines: what it has printed."""

    def __init__(self, running, folder) -> None:
        self.running = running
        self.url = running.url
        self.folder = folder
        self.lines: list[str] = list(running.said)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()  # what nobody reads stops who writes it
        self._warm_up()
        self.bystander = Bystander(self.url)
        self.rest = self.settled()

    def _read(self) -> None:
        for line in self.running.process.stdout:
            self.lines.append(line)

    def close(self) -> None:
        self.running.process.kill()
        self._reader.join(60)

    # -- being measured -------------------------------------------------------------------------

    def figures(self) -> Figures:
        """The server now."""
        with httpx.Client(base_url=self.url, headers=AUTH, timeout=60) as client:
            ready = client.get("/ready").status_code
            metrics = client.get("/metrics").text
        family = self._family()
        core = {name: family[name] for name in ("first", "quire-api", "quire-engine")}
        return Figures(
            pids={name: one.pid for name, one in core.items()},
            rss={name: one.memory_info().rss for name, one in core.items()},
            fds={name: one.num_fds() for name, one in core.items()},
            threads={name: one.num_threads() for name, one in core.items()},
            children=len(psutil.Process(self.running.process.pid).children(recursive=True)),
            listening=self._listening(),
            files={str(p.relative_to(self.folder)) for p in self.folder.rglob("*")},
            held=metric(metrics, "quire:kv_cache_usage_perc"),
            busy=metric(metrics, "quire:num_requests_running")
            + metric(metrics, "quire:num_requests_waiting"),
            ready=ready,
        )

    def _family(self) -> dict[str, psutil.Process]:
        first = psutil.Process(self.running.process.pid)
        return {"first": first, **{one.name(): one for one in first.children(recursive=True)}}

    def _listening(self) -> set[str]:
        """Addresses of TCP sockets that listen. Names of unix ones are files, or children's."""
        first = psutil.Process(self.running.process.pid)
        found = set()
        for one in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # a child may end while we look
                for link in one.net_connections("inet"):
                    if link.status == psutil.CONN_LISTEN:
                        found.add(f"{link.laddr.ip}:{link.laddr.port}")
        return found

    def settled(self, before: Figures | None = None, growth: int = MOST_GROWTH) -> Figures:
        """The figures when they are as before, or two looks alike; at the latest in SETTLE_S."""
        deadline, last = time.monotonic() + SETTLE_S, None
        while True:
            now = self.figures()
            if before is not None and not now.harm(before, growth):
                return now
            calm = not now.busy and not now.held
            if before is None and calm and last is not None and last.fds == now.fds:
                return now
            if time.monotonic() > deadline:
                return now
            last = now
            time.sleep(0.1)

    @contextmanager
    def unharmed(self, growth: int = MOST_GROWTH):
        """Whatever is done within: who is beside notices nothing, and nothing stays behind."""
        before = self.settled(self.rest, growth=1 << 40)
        with self.bystander.beside():
            yield self
        harm = self.settled(before, growth).harm(before, growth)
        assert not harm, harm

    def _warm_up(self) -> None:
        """All that is made on first use: threads for long prompts and masks, workers for grammars."""
        long = {"model": "embedded", "prompt": "word " * 3000, "max_tokens": 1}
        form = {"model": "embedded", "prompt": "a", "max_tokens": 4}

        async def ask() -> None:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector, headers=AUTH) as session:
                bodies = [long] * 24 + [{**form, "guided_regex": f"[a-f]{{{n}}}"} for n in (2, 3)]
                bodies.append({**form, "guided_regex": "[a-f]{4}", "n": 16})  # masks in a thread
                await asyncio.gather(*(self._ask(session, body) for body in bodies))

        asyncio.run(ask())

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            await response.read()
            assert response.status == 200, await response.text()

    # -- being asked ----------------------------------------------------------------------------

    def send(self, cases, at_once: int = AT_ONCE) -> list[Answer]:
        """Each case to each route that takes it, streamed and not; all that came back."""
        jobs = [job for case in cases for job in _jobs(case)]

        async def all_of_them() -> list[Answer]:
            connector = aiohttp.TCPConnector(limit=at_once)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=AUTH, max_field_size=1 << 16
            ) as session:
                gate = asyncio.Semaphore(at_once)
                return list(await asyncio.gather(*(self._send(session, gate, *j) for j in jobs)))

        return asyncio.run(all_of_them())

    async def _send(self, session, gate, case: Case, route: str, stream: bool) -> Answer:
        async with gate:
            sent = case.raw if case.raw is not None else dialects.body(route, case.fields, stream)
            headers = {"Content-Type": "application/json", **case.headers}
            began = time.monotonic()
            try:
                async with asyncio.timeout(case.within_s * slowdown() + 10):
                    async with session.post(self.url + route, data=sent, headers=headers) as got:
                        text = (await got.read()).decode()
                        status, said = got.status, got.headers
            except (TimeoutError, aiohttp.ClientError) as error:
                status, text, said = 0, repr(error), {}
            took = time.monotonic() - began
            return Answer(case, route, stream, status, text, said, took, sent[: 1 << 16])

    def check(self, cases, at_once: int = AT_ONCE) -> list[Answer]:
        """Send them; each must have come to what it is to come to."""
        answers = self.send(cases, at_once)
        faults = [fault for one in answers for fault in one.faults()] + quarrels(answers)
        assert not faults, "\n".join([f"{len(faults)} faults", *faults[:40]])
        return answers


def _jobs(case: Case):
    """(case, route, whether streamed). Every day one in three: the routes read a field by the same
    code. Routes of `differs` are always among them."""
    every = []
    for route in case.routes:
        if case.raw is not None or dialects.takes(route, case.fields):
            every.append((case, route, False))
            if case.streams and case.raw is None and route in dialects.STREAMING:
                every.append((case, route, True))
    if LONG or case.everywhere or len(every) < 6:
        return every
    first = zlib.crc32(case.id.encode()) % 3
    return [job for i, job in enumerate(every) if i % 3 == first or job[1] in case.differs]


def quarrels(answers) -> list[str]:
    """Cases that one dialect refuses and another answers, and no table says why."""
    verdicts = defaultdict(dict)
    for one in answers:
        if one.route not in one.case.differs:
            verdicts[one.case.id][one.route, one.stream] = one.verdict
    return [
        f"{name}: dialects differ: {found}"
        for name, found in verdicts.items()
        if len(set(found.values())) > 1
    ]


def metric(text: str, name: str) -> float:
    """The sum of its samples."""
    found = re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    return sum(map(float, found))
