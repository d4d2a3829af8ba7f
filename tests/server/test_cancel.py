"""Every way to cancel, on every route, at every stage: what it held is free, and nothing of it stays.

Clients here speak to the app itself, so that ten thousand of them take minutes (sockets are the
business of test_disconnects.py). With --long ten thousand leave.
"""

import asyncio
import collections
import contextlib
import gc
import hashlib
import json
import os
import random
import threading
import time
from dataclasses import replace

import httpx
import pytest

from quire.engine.client.thread_transport import ThreadTransport
from quire.engine.supervise.process_pipe import EngineUnavailable
from quire.server.options import ServerOptions
from tests import tiers
from tests.server.harness import Executor, Reciter, Server, make_engine

CANCELS = tiers.amount(200, 10_000)
HELLO = [{"role": "user", "content": "go on"}]
ENDLESS = {"ignore_eos": True, "max_tokens": 400}
SCHEMA = {"guided_regex": "[a-z]{3}"}
BACKGROUND = {"input": "go on", "background": True, "max_output_tokens": 400}
ROUTES = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, **ENDLESS}),
    "chat n": ("/v1/chat/completions", {"messages": HELLO, **ENDLESS, "n": 3}),
    "completions": ("/v1/completions", {"prompt": ["go", "on"], **ENDLESS, "n": 2}),
    "responses": (
        "/v1/responses",
        {"input": "go on", "max_output_tokens": 400, "ignore_eos": True},
    ),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 400}),
    "generate": ("/generate", {"prompt": "go on", **ENDLESS}),
    "invocations": ("/invocations", {"messages": HELLO, **ENDLESS}),
    "batch": ("/v1/chat/completions/batch", {"messages": [HELLO, HELLO], **ENDLESS}),
    "beams": ("/v1/completions", {"prompt": "go", "use_beam_search": True, **ENDLESS, "n": 3}),
}
WHOLE_ONLY = ("batch", "beams")
PREFIXES = {
    "/v1/responses": "resp_",
    "/v1/messages": "msg_",
    "/generate": "gen-",
    "/v1/completions": "cmpl-",
}
OPTIONS = ServerOptions(enable_dev_routes=True, enable_responses_store=True)


class Mortal(ThreadTransport):
    """An engine that dies when it is told to, and is followed by another."""

    def start(self, deliver, die, away, back):
        self._told = deliver, die, away, back
        super().start(self._from(self, deliver), die, away, back)
        self.now = self

    def _from(self, engine, deliver):
        return lambda message: deliver(message) if self.now is engine else None

    def send(self, message):
        if self.now is self:
            super().send(message)
        elif self.now is not None:
            self.now.send(message)

    def die(self):
        """Be gone, with all that was sent; nobody is blamed."""
        old, self.now = self.now, None
        ThreadTransport.close(old)
        self._told[2](EngineUnavailable(reason="a test", expected_restart_s=0.1, running_ids=[]))

    def follow(self, engine):
        """Another is there."""
        deliver, die, away, back = self._told
        thread = ThreadTransport(engine)
        self.now = thread
        thread.start(self._from(thread, deliver), die, away, back)
        back()

    async def stop(self):
        if self.now is not None and self.now is not self:
            await self.now.stop()
        await super().stop()


class Call:
    """A request to the app itself."""

    def __init__(self, server, path, body=None, *, method="POST", name="", timeout=None, key=""):
        self.app, self.status, self.body = server.app, None, b""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {b"content-type": b"application/json", b"content-length": b"%d" % len(data)}
        if name:
            headers[b"x-request-id"] = name.encode()
        if key:
            headers[b"authorization"] = f"Bearer {key}".encode()
        if timeout is not None:
            headers[b"x-request-timeout"] = str(timeout).encode()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": list(headers.items()),
            "client": ("here", 1),
            "server": ("there", 2),
        }
        self._come = asyncio.Queue()
        self._come.put_nowait({"type": "http.request", "body": data})
        self.said = asyncio.Event()
        self.task = asyncio.create_task(self.app(self._scope, self._come.get, self._take))

    async def _take(self, message):
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")
        if message.get("body"):
            self.said.set()
        await asyncio.sleep(0)

    def leave(self):
        """Hang up."""
        self._come.put_nowait({"type": "http.disconnect"})

    async def end(self):
        """Its status, once the app is done with it."""
        await asyncio.wait_for(self.task, 20)
        return self.status

    @property
    def json(self):
        return json.loads(self.body)


class Scene:
    """A server to cancel on, and what it held before anybody came."""

    def __init__(self, tokenizer, *, options=OPTIONS, **how):
        self.server = Server(tokenizer, options=options, transport=Mortal, **how)
        self.model, self.executor = self.server.model, self.server.executor

    def on_loop(self, coroutine, seconds=60):
        return asyncio.run_coroutine_threadsafe(coroutine, self.server.loop).result(seconds)

    def call(self, route, *, stream=False, **more):
        path, body = ROUTES[route]
        if stream:
            body = {**body, "stream": True}
        return Call(self.server, path, {**body, **more.pop("fields", {})}, **more)

    async def stats(self):
        return await self.server.client.stats()

    async def until(self, true, seconds=60):
        deadline = time.monotonic() + seconds
        while not true(stats := await self.stats()):
            assert time.monotonic() < deadline, stats
            await asyncio.sleep(0.001)
        return stats

    async def rest(self):
        """Until nothing runs; then nothing is held, here or in the engine."""
        await self.until(
            lambda s: s.running == s.waiting == s.waiting_for_resources == s.held_host_blocks == 0
        )
        stats = await self.until(lambda s: s.held_blocks == 0)
        assert stats.free_blocks + stats.cached_blocks == stats.blocks
        client, to = self.server.client, self.server.services
        await client.check()
        books = (
            client._streams,
            client._opening_streams,
            client._resubmitted,
            client._prior_timings,
            client._held_requests,
        )
        assert not any(books), books
        assert not len(to.active_requests)
        assert not self.model.bound.held, "a grammar is held"

    def follow(self):
        """Another engine takes over, with grammars of its own."""
        bound = self.model.bound
        self.model = Reciter(self.server.tokenizer)
        self.model.bound.texts, self.model.bound.has_outcomes = bound.texts, bound.has_outcomes
        step_s, self.executor = self.executor.step_s, Executor(self.model)
        self.executor.step_s = step_s
        self.server.client.transport.follow(make_engine(self.executor, **self.how))


@pytest.fixture(scope="module")
def scene(tokenizer):
    made = Scene(tokenizer, step_s=0.001)
    with made.server.running():
        made.model.eos = 5  # nothing ends by itself
        yield made


# -- ways --------------------------------------------------------------------------------------------


async def by_leaving(scene, call, route, name):
    call.leave()
    await call.end()


async def by_its_id(scene, call, route, name):
    gone = Call(scene.server, f"/v1/requests/{name}", method="DELETE")
    assert await gone.end() == 200, gone.body
    assert gone.json["cancelled"] is True
    await call.end()


async def by_the_id_of_its_answer(scene, call, route, name):
    prefix = PREFIXES.get(ROUTES[route][0], "chatcmpl-")
    await by_its_id(scene, call, route, prefix + name)


async def by_an_operator(scene, call, route, name):
    gone = Call(scene.server, "/abort_requests", {"request_ids": [name]})
    assert await gone.end() == 200
    assert gone.json["aborted"] >= 1
    await call.end()


WAYS = [by_leaving, by_its_id, by_the_id_of_its_answer, by_an_operator]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_whatever_decodes_is_ended_in_every_way(scene, route, stream, way):
    """When the word has been answered no more is computed than the step that was under way."""
    if stream and route in WHOLE_ONLY:
        pytest.skip("never streamed")

    async def main():
        before = scene.executor.said
        call = scene.call(route, stream=stream, name="mine")
        await scene.until(lambda s: scene.executor.said > before + 10)
        await way(scene, call, route, "mine")
        said = scene.executor.said
        await scene.rest()
        assert scene.executor.said - said <= 6, "it went on"
        return call

    call = scene.on_loop(main())
    if way is by_leaving or route == "beams":
        return
    if route == "messages":
        assert b"error" in call.body
    else:
        assert b"abort" in call.body or b"cancelled" in call.body or route == "generate"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_deadline_ends_it_on_every_route(scene, route, stream):
    if stream and route in WHOLE_ONLY:
        pytest.skip("never streamed")

    async def main():
        call = scene.call(route, stream=stream, timeout=0.03)
        status = await call.end()
        said = scene.executor.said
        await scene.rest()
        assert scene.executor.said - said <= 6
        return status, call

    status, call = scene.on_loop(main())
    assert status == (200 if stream else 408)
    assert b"have passed" in call.body


def test_a_search_that_is_ended_by_its_id_says_so(scene):
    async def main():
        call = scene.call("beams", name="mine")
        await scene.until(lambda s: s.held_blocks)
        await by_its_id(scene, call, "beams", "mine")
        await scene.rest()
        return call.status, call.json["error"]

    status, error = scene.on_loop(main())
    assert (status, error["type"]) == (499, "RequestCancelled")


def test_an_id_that_nobody_has_is_not_found(scene):
    async def main():
        gone = Call(scene.server, "/v1/requests/cmpl-nobody", method="DELETE")
        return await gone.end(), gone.json["error"]["message"]

    status, message = scene.on_loop(main())
    assert status == 404
    assert "cmpl-nobody" in message


def test_all_that_share_an_id_are_ended(scene):
    async def main():
        calls = [scene.call(route, name="mine") for route in ("chat", "completions", "responses")]
        await scene.until(lambda s: s.running >= 3)
        await by_its_id(scene, calls[0], "chat", "mine")
        for call in calls[1:]:
            await call.end()
        await scene.rest()

    scene.on_loop(main())


# -- stages ------------------------------------------------------------------------------------------


@pytest.fixture
def staged(tokenizer):
    """Starts servers that have little; they end with the test."""
    running = []

    def start(**how):
        made = Scene(tokenizer, **how)
        made.how = {k: v for k, v in how.items() if k != "step_s"}
        made.model.eos = 5
        running.append(made.server.running())
        running[-1].__enter__()
        return made

    yield start
    for one in running:
        one.__exit__(None, None, None)


async def queued(scene):
    first = scene.call("chat", name="other")
    await scene.until(lambda s: s.running)
    call = scene.call("completions", name="mine")
    await scene.until(lambda s: s.waiting)
    return call, first


async def kept(scene):
    scene.model.bound.has_outcomes = False
    call = scene.call("chat", name="mine", fields=SCHEMA)
    await scene.until(lambda s: s.waiting_for_resources)
    return call, None


async def preempted(scene):
    first = scene.call("chat", name="other")
    await scene.until(lambda s: s.running)
    call = scene.call("chat n", name="mine")
    await scene.until(lambda s: s.preemptions)
    return call, first


async def paused(scene):
    await scene.server.client.pause("keep")
    call = scene.call("chat", name="mine")
    await scene.until(lambda s: s.waiting)
    return call, None


async def waiting_for_another_engine(scene):
    scene.server.client.transport.die()
    call = scene.call("chat", name="mine")
    await asyncio.sleep(0.02)
    assert scene.server.client._restart.waiting_requests == 1
    return call, None


async def orphaned(scene):
    call = scene.call("chat n", name="mine", stream=True)
    await scene.until(lambda s: s.running == 3)
    scene.server.client.transport.die()
    return call, None


STAGES = {
    queued: {"seqs": 1},
    kept: {},
    preempted: {"blocks": 130, "host": 130},
    paused: {},
    waiting_for_another_engine: {},
    orphaned: {},
}


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("stage", STAGES)
def test_whatever_it_waits_for_it_is_ended(staged, stage, way):
    scene = staged(step_s=0.001, **STAGES[stage])

    async def main():
        call, other = await stage(scene)
        await way(scene, call, "chat", "mine")
        if other is not None:
            assert not other.task.done(), "another's request was ended"
            other.leave()
            await other.end()
        if scene.server.client.restart_reason is not None:
            scene.follow()
        await scene.server.client.wake_up()
        await scene.rest()

    scene.on_loop(main())


def test_a_response_of_the_background_is_ended_by_cancel_by_delete_and_by_its_id(scene):
    async def main():
        for method, path in (
            ("POST", "/v1/responses/{}/cancel"),
            ("DELETE", "/v1/responses/{}"),
            ("DELETE", "/v1/requests/{}"),
        ):
            call = Call(scene.server, "/v1/responses", BACKGROUND)
            assert await call.end() == 200, call.body
            await scene.until(lambda s: s.running)
            response_id = call.json["id"]
            gone = Call(scene.server, path.format(response_id), method=method)
            assert await gone.end() == 200, gone.body
            await scene.rest()
            shown = Call(scene.server, f"/v1/responses/{response_id}", method="GET")
            status = await shown.end()
            if path == "/v1/responses/{}":
                assert status == 404
            else:
                assert shown.json["status"] == "cancelled"

    scene.on_loop(main())


def keyed(tmp_path, *names):
    """Options with a key for each name."""
    entries = [{"name": n, "sha256": hashlib.sha256(n.encode()).hexdigest()} for n in names]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": entries}))
    return replace(OPTIONS, api_key_file=str(path))


def test_nobody_ends_what_another_key_has_started(tokenizer, tmp_path):
    """Nor sees it: what is not one's own is not there. In the engine, before it, and kept."""
    scene = Scene(tokenizer, options=keyed(tmp_path, "mine", "theirs"), step_s=0.001)

    async def end(request_id, key, path="/v1/requests/{}", method="DELETE"):
        gone = Call(scene.server, path.format(request_id), method=method, key=key)
        return await gone.end()

    async def main():
        call = scene.call("chat", name="it", key="mine")
        await scene.until(lambda s: s.running)
        assert await end("it", "theirs") == 404
        assert not call.task.done()
        assert await end("it", "mine") == 200
        await call.end()
        search = scene.call("beams", name="it", key="mine")
        await scene.until(lambda s: s.held_blocks)
        assert await end("it", "theirs") == 404
        assert await end("it", "mine") == 200
        await search.end()
        kept = Call(scene.server, "/v1/responses", BACKGROUND, key="mine")
        assert await kept.end() == 200
        name = kept.json["id"]
        for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
            assert await end(name, "theirs", "/v1/responses/{}" + path, method) == 404
        follow = {"input": "and", "previous_response_id": name}
        other = Call(scene.server, "/v1/responses", follow, key="theirs")
        assert await other.end() == 404
        assert await end(name, "mine", "/v1/responses/{}") == 200
        await scene.rest()

    with scene.server.running():
        scene.model.eos = 5
        scene.on_loop(main())


# -- many of them ------------------------------------------------------------------------------------


class Storm:
    """Clients of every kind, who end their requests in every way, at any moment."""

    def __init__(self, scene, seed):
        self.scene, self.draw = scene, random.Random(seed)
        self.ends = collections.Counter()

    async def one(self, number):
        draw, name = self.draw, f"r{number}"
        route = draw.choice([*ROUTES, "bound", "background", "long"])
        stream = route not in (*WHOLE_ONLY, "background") and draw.random() < 0.5
        how = draw.choice(["leave", "leave", "deadline", "id", "operator", "in the body", "first"])
        timeout = draw.random() * 0.05 + 0.001 if how == "deadline" else None
        call = self.call(route, stream=stream, name=name, timeout=timeout)
        if how == "first" and stream:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(call.said.wait(), 0.1)
        elif how not in ("in the body", "deadline"):
            await asyncio.sleep(draw.random() ** 2 * 0.06)
        await self.end(call, how, name)
        if route == "background" and call.status == 200:
            gone = Call(self.scene.server, f"/v1/responses/{call.json['id']}", method="DELETE")
            await gone.end()
        self.ends[how, call.status] += 1

    def call(self, route, *, stream, **more):
        fields = {"stream": stream}
        if route == "background":
            return Call(self.scene.server, "/v1/responses", BACKGROUND, **more)
        if route == "bound":
            fields.update(SCHEMA)
            route = "chat"
        elif route == "long":
            fields["prompt"] = ["long " * 60, "longer " * 40]
            route = "completions"
        if route in WHOLE_ONLY:
            del fields["stream"]
        return self.scene.call(route, fields=fields, **more)

    async def end(self, call, how, name):
        if how in ("leave", "in the body", "first"):
            call.leave()
        elif how == "id":
            await Call(self.scene.server, f"/v1/requests/{name}", method="DELETE").end()
        elif how == "operator":
            await Call(self.scene.server, "/abort_requests", {"request_ids": [name]}).end()
        if how in ("id", "operator") and not call.task.done():
            await asyncio.sleep(0.01)
            call.leave()  # it may have had no answer yet to end
        await call.end()

    async def disturb(self):
        """Grammars that take their time, and engines that die."""
        scene = self.scene
        while True:
            scene.model.bound.has_outcomes = False
            await asyncio.sleep(0.02)
            scene.model.bound.settle()
            await asyncio.sleep(0.02)
            if self.draw.random() < 0.05:
                scene.server.client.transport.die()
                await asyncio.sleep(0.02)
                scene.follow()
                scene.model.eos = 5

    async def rage(self, count, at_a_time=25):
        disturbing = asyncio.create_task(self.disturb())
        numbers = iter(range(count))

        async def client():
            for number in numbers:
                await self.one(number)

        await asyncio.gather(*(client() for _ in range(at_a_time)))
        disturbing.cancel()
        await asyncio.wait({disturbing})
        if self.scene.server.client.restart_reason is not None:
            self.scene.follow()
        self.scene.model.bound.settle()


def files():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.timeout(60 + CANCELS // 20)
def test_many_cancels_at_any_moment_leave_nothing(staged):
    scene = staged(step_s=0.0005, seqs=12, blocks=400, host=60)

    async def counted():
        gc.collect()
        return len(asyncio.all_tasks()), files(), threading.active_count()

    async def main():
        await Storm(scene, 1).rage(50)
        await scene.rest()
        before = await counted()
        storm = Storm(scene, 20261121)
        await storm.rage(CANCELS)
        await scene.rest()
        await asyncio.sleep(0.05)
        return before, await counted(), storm.ends

    before, after, ends = scene.on_loop(main(), 60 + CANCELS // 20)
    assert after[0] <= before[0], "tasks"
    assert after[1] <= before[1] + 1, "files"
    assert after[2] <= before[2] + 1, "threads"
    statuses = {status for _, status in ends}
    assert statuses <= {200, 408, 429, 499, 503, None}, ends  # 429: no time for its deadline
    assert sum(ends.values()) == CANCELS
    messages = {"messages": HELLO, "max_tokens": 5}
    got = httpx.post(f"{scene.server.url}/v1/chat/completions", json=messages, timeout=60)
    assert got.status_code == 200, got.text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["to its end", "till it is left"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_what_a_request_brought_is_given_back_without_the_collector(scene, route, stream, how):
    """A server collects garbage seldom: in a cycle, a body of megabytes would stay for minutes."""
    if stream and route in WHOLE_ONLY:
        pytest.skip("never streamed")
    if (route, stream, how) == ("responses", True, "till it is left"):
        pytest.skip("its shape knows who is to be told of its end, which it does not come to")
    most = {"max_output_tokens" if route == "responses" else "max_tokens": 3}

    async def ask(count):
        for _ in range(count):
            call = scene.call(route, stream=stream, fields=most)
            if how == "till it is left":
                await asyncio.sleep(0.002)
                call.leave()
            await call.end()
            del call
        await scene.rest()

    scene.on_loop(ask(2))
    gc.collect()
    gc.disable()
    try:
        scene.on_loop(ask(10))
        found = gc.collect()
    finally:
        gc.enable()
    assert found < 40, "objects of ten requests were in cycles"
