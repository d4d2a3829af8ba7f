"""Adapter names of one API process: whose they are, resolvers, and an engine that is replaced."""

import asyncio
import time

import pytest

from quire.engine.messages import AdapterCard
from quire.errors import EngineAway, Overloaded, RequestError, UnknownModel
from quire.server.adapter_names import MAX_RESOLVING, AdapterNames
from quire.server.adapter_resolver import FAILURE_MEMORY_S, MAX_FAILURES, AdapterResolver

A, B = b"a" * 16, b"b" * 16


def card(name, tenant=b"", digest=b"1"):
    return AdapterCard(name, digest, f"/{name}", None, 0, tenant)


class FakeEngine:
    """The calls of an engine; each load waits for the gate."""

    def __init__(self, *cards):
        self.cards = {(one.tenant, one.name): one for one in cards}
        self.loads = []
        self.restarts = 0
        self.error = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, kind, method, *args):
        return await getattr(self, method)(*args)

    async def call_each(self, kind, method, *args):
        return [await self.call(kind, method, *args)]

    async def adapters(self):
        return list(self.cards.values())

    async def load_adapter(self, name, given, *more):
        self.loads.append(given)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        made = card(name, more[-2])
        self.cards[made.tenant, name] = made
        return made

    async def unload_adapter(self, name, tenant):
        await asyncio.sleep(0)
        return self.cards.pop((tenant, name), None) is not None


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def write(folder, *names):
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "adapter_config.json").write_text("{}")
    return str(folder)


def new_names(engine, folder=None, repositories=(), clock=time.monotonic):
    resolver = AdapterResolver(folder, repositories, clock)
    return AdapterNames(engine, enabled=True, shared=False, resolver=resolver)


def run(coroutine):
    return asyncio.run(coroutine)


def test_a_private_adapter_is_its_tenants_and_comes_before_one_for_all():
    async def go():
        names = new_names(FakeEngine(card("all"), card("x"), card("x", A), card("y", B)))
        await names.refresh()
        assert [(one.name, one.tenant) for one in names.cards(A)] == [("all", b""), ("x", A)]
        assert [one.name for one in names.cards(b"")] == ["all", "x"]
        assert names.find("y", A) is None
        assert names.find("y", b"") is None
        assert names.find("y", B).name == "y"
        assert names.find(None, A) is None
        assert await names.unload("x", A)
        assert not await names.unload("y", A)
        assert names.find("x", A).folder == "/x"
        assert names.find("y", B) is not None

    run(go())


def test_requests_that_need_an_adapter_at_once_wait_for_one_load(tmp_path):
    async def go():
        engine = FakeEngine()
        engine.gate.clear()
        names = new_names(engine, write(tmp_path, "one", "org/two"))
        waiting = [asyncio.create_task(names.resolve("one", one)) for one in (A, B, b"")]
        waiting.append(asyncio.create_task(names.resolve("org/two", A)))
        await asyncio.sleep(0.05)
        waiting[0].cancel()  # a client that is gone ends no load of others
        engine.gate.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert sorted(engine.loads) == [f"{tmp_path}/one", f"{tmp_path}/org/two"]
        assert names.find("one", B).name == "one"
        await names.resolve("one", B)
        assert len(engine.loads) == 2

    run(go())


@pytest.mark.parametrize(
    "name",
    ["none", "org", "", ".", "..", "../one", "org/../one", "/one", "one/", "org//two", "~", "~/one",
     "a\0b", "a\nb", "x" * 257, "x" * 250 + "/y", "é" * 200],
)  # fmt: skip
def test_what_is_no_adapter_is_not_loaded(tmp_path, name):
    async def go():
        engine = FakeEngine()
        inner = tmp_path / "inner"
        write(tmp_path, "one")
        names = new_names(engine, write(inner, "one", "org/two"))
        await names.resolve(name, b"")
        assert engine.loads == []

    run(go())


def test_an_adapter_that_cannot_be_loaded_is_not_read_again_for_a_while(tmp_path):
    async def go():
        clock, engine = Clock(), FakeEngine()
        names = new_names(engine, write(tmp_path, "bad"), clock=clock)
        engine.error = RequestError("rank 99", param="lora_path")
        for _ in range(5):
            with pytest.raises(RequestError, match="rank 99") as caught:
                await names.resolve("bad", A)
            assert caught.value.param == "model"
        assert len(engine.loads) == 1
        clock.now += FAILURE_MEMORY_S
        engine.error = None
        await names.resolve("bad", A)
        assert len(engine.loads) == 2
        assert names.find("bad", A) is not None

    run(go())


def test_an_unload_meanwhile_is_no_failure_of_the_adapter(tmp_path):
    async def go():
        engine = FakeEngine()
        names = new_names(engine, write(tmp_path, "one"))
        engine.error = UnknownModel("was unloaded", param="lora_name")
        with pytest.raises(UnknownModel):
            await names.resolve("one", A)
        engine.error = None
        await names.resolve("one", A)
        assert names.find("one", A) is not None

    run(go())


def test_an_engine_that_is_away_is_no_failure_of_the_adapter(tmp_path):
    async def go():
        engine = FakeEngine()
        names = new_names(engine, write(tmp_path, "one"))
        engine.error = EngineAway("restarting", retry_after_s=1)
        with pytest.raises(EngineAway):
            await names.resolve("one", A)
        engine.error = None
        await names.resolve("one", A)
        assert names.find("one", A) is not None

    run(go())


def test_the_memory_of_failures_is_bounded():
    async def go():
        resolver = AdapterResolver(None, ["org/x"], Clock())
        for i in range(MAX_FAILURES + 5):
            resolver.record_failure(f"org/x/{i}", UnknownModel("none", param="model"))
        assert len(resolver._failures) == MAX_FAILURES
        assert await resolver.locate("org/x/0") is not None
        with pytest.raises(UnknownModel):
            await resolver.locate(f"org/x/{MAX_FAILURES}")

    run(go())


def test_repositories_of_the_list_alone_are_asked():
    async def go():
        engine = FakeEngine()
        names = new_names(engine, None, ["org/x", "org/y"])
        for name in ("org/x", "org/x/a/b", "org/xx", "org/z", "org", "org/y/../x"):
            await names.resolve(name, b"")
        assert engine.loads == ["org/x", "org/x"]
        found = await AdapterResolver(None, ["org/x"]).locate("org/x/a/b")
        assert (found.subfolder, found.allowed, found.remote) == ("a/b", [], True)

    run(go())


def test_loads_for_requests_are_bounded():
    async def go():
        engine = FakeEngine()
        engine.gate.clear()
        names = new_names(engine, None, ["org/x"])
        waiting = [
            asyncio.create_task(names.resolve(f"org/x/{i}", b"")) for i in range(MAX_RESOLVING)
        ]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="try again"):
            await names.resolve("org/x/more", b"")
        joined = asyncio.create_task(names.resolve("org/x/0", b""))
        engine.gate.set()
        await asyncio.gather(*waiting, joined)
        await names.resolve("org/x/more", b"")
        assert len(engine.loads) == MAX_RESOLVING + 1
        assert not names._resolving

    run(go())


def test_adapters_of_an_engine_that_died_are_loaded_again_unless_they_were_unloaded():
    async def go():
        engine = FakeEngine(card("x"), card("y", A), card("z"))
        names = new_names(engine)
        await names.refresh()
        engine.cards.clear()
        engine.restarts = 1
        engine.gate.clear()
        loading = asyncio.create_task(names._load_again())
        await asyncio.sleep(0.01)
        assert await names.unload("z", b"")
        engine.gate.set()
        await loading
        assert engine.loads == ["/x", "/y"]
        assert set(engine.cards) == {(b"", "x"), (A, "y")}

    run(go())


def test_an_engine_that_dies_while_adapters_are_loaded_again_loses_none():
    async def go():
        engine = FakeEngine(card("x"), card("y"))
        names = new_names(engine)
        await names.refresh()
        engine.cards.clear()
        engine.error = EngineAway("restarting", retry_after_s=1)
        with pytest.raises(EngineAway):
            await names._load_again()
        engine.error = None
        await names._load_again()
        assert len(engine.cards) == 2

    run(go())


def test_a_list_that_was_read_meanwhile_brings_no_unloaded_name_back():
    async def go():
        engine = FakeEngine(card("x"))
        names = new_names(engine)
        await names.refresh()
        unloading = asyncio.create_task(names.unload("x", b""))
        await asyncio.sleep(0)
        await names.refresh()
        await unloading
        assert names.find("x", b"") is None

    run(go())
