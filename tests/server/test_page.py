"""The page's files, what it is told before its first request, and the feed of its live view."""

import asyncio
import base64
import re
import zlib

import httpx
import msgspec
import pytest

from quire.core.params import SamplingParams
from quire.core.scheduler_stats import SchedulerStats
from quire.core.snapshot import TIME_BUCKETS, EngineCounters, RequestRow, Snapshot
from quire.core.types import DraftCounts
from quire.errors import EngineDead, RequestError
from quire.server.options import ServerOptions
from quire.server.routes import playground
from quire.server.telemetry.dashboard_stream import SnapshotFeed
from tests.server.harness import MAX_LEN, Server

SOURCES = sorted(playground.STATIC_FOLDER.iterdir())
TEXTS = {path.name: path.read_text() for path in SOURCES}
SECRET = "a-key"


# -- files ------------------------------------------------------------------------------------


def test_the_page_is_served_with_a_policy_that_lets_nothing_else_run(http):
    got = http.get("/")
    assert got.status_code == 200
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    assert got.headers["x-content-type-options"] == "nosniff"
    policy = got.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy


def test_every_file_of_the_folder_is_served_with_its_type(http):
    assert {path.name for path in SOURCES} == {*playground.FILES, "index.html"}
    for name in playground.FILES:
        got = http.get(f"/quire/page/{name}")
        assert got.content == (playground.STATIC_FOLDER / name).read_bytes()
        assert (
            got.headers["content-type"] == playground.CONTENT_TYPES[f".{name.rpartition('.')[2]}"]
        )


@pytest.mark.parametrize("name", ["none.js", "index.html", "..%2fpage.py", "%2e%2e/page.py", ""])
def test_nothing_else_is_served_from_there(http, name):
    assert http.get(f"/quire/page/{name}").status_code == 404


def test_a_browser_that_has_a_file_gets_no_second_copy(http):
    for path in ("/", "/quire/page/app.js"):
        first = http.get(path)
        again = http.get(path, headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        assert http.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_head_tells_of_the_page_without_sending_it(http):
    got = http.head("/")
    assert (got.status_code, got.content) == (200, b"")
    assert int(got.headers["content-length"]) == len(
        (playground.STATIC_FOLDER / "index.html").read_bytes()
    )


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_file_refers_only_to_files_that_are_served(name):
    text = TEXTS[name]
    used = re.findall(r'(?:src|href)="([^"#][^"]*)"', text) if name.endswith(".html") else []
    used += [f"quire/page/{one}" for one in re.findall(r'from "\./([^"]+)"', text)]
    served = {path.removeprefix("/") for path in playground.PUBLIC_PATHS} | {"docs"}
    assert [one for one in used if one not in served] == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


@pytest.mark.parametrize("name", sorted(n for n in TEXTS if n.endswith((".js", ".html"))))
def test_no_file_makes_html_of_text_or_runs_text(name):
    bad = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    assert not re.search(bad, TEXTS[name])
    if name.endswith(".html"):
        assert not re.search(r'\son\w+="|style="|<style|javascript:', TEXTS[name])
        assert re.findall(r"<script(?![^>]*src=)", TEXTS[name]) == []


def test_the_page_needs_no_key_but_what_it_shows_does(tokenizer):
    guarded = Server(tokenizer, options=ServerOptions(api_key=(SECRET,)))
    with guarded.running(), httpx.Client(base_url=guarded.url) as http:
        for path in playground.PUBLIC_PATHS:
            assert http.get(path).status_code == 200
        for path in ("/quire/about", "/quire/live", "/quire/page/none.js"):
            assert http.get(path).status_code == 401
        told = http.get("/quire/about", headers={"Authorization": f"Bearer {SECRET}"})
        assert told.status_code == 200


def test_behind_a_path_of_a_proxy_the_page_needs_no_key_either(tokenizer):
    options = ServerOptions(api_key=(SECRET,), root_path="/behind")
    guarded = Server(tokenizer, options=options)
    with guarded.running(), httpx.Client(base_url=guarded.url) as http:
        assert http.get("/").status_code == 200
        assert http.get("/quire/page/app.js").status_code == 200
        assert http.get("/quire/about").status_code == 401


# -- what the page is told -----------------------------------------------------------------------


def test_the_page_is_told_of_the_model(http):
    told = http.get("/quire/about").json()
    assert told["model"] == "tiny"
    assert told["max_model_len"] == MAX_LEN
    assert (told["text"], told["chat"], told["thinking"]) == (True, True, False)


def test_the_defaults_shown_are_those_of_the_server(tokenizer):
    with Server(tokenizer, defaults={"temperature": 0.3}).running() as server:
        told = {
            one.name: one.standard for one in playground.build_sampling_controls(server.services)
        }
    assert (told["temperature"], told["top_p"], told["seed"]) == (0.3, 1, None)


def test_the_ranges_shown_are_those_that_are_allowed(server):
    for one in playground.build_sampling_controls(server.services):
        kind = int if one.whole else float
        for bound in (one.low, one.high):
            if bound is not None:
                SamplingParams(**{**_room(one.name), one.name: kind(bound)})
        beyond = [one.low - one.step] + ([one.high + one.step] if one.high is not None else [])
        if one.name in ("max_tokens", "min_tokens"):
            beyond = beyond[:1]  # what is too long for the model is refused with the prompt
        if one.name in ("seed", "top_k"):
            beyond = []  # JSON's integers end before the seeds do; -1 is a way to say all
        for value in beyond:
            with pytest.raises(RequestError):
                SamplingParams(**{**_room(one.name), one.name: kind(value)})


def _room(name):
    return {"max_tokens": MAX_LEN} if name == "min_tokens" else {"temperature": 1.0}


# -- the live view ---------------------------------------------------------------------------------


class FakeEngine:
    """Snapshots in the order given, the last one again and again; counts the calls."""

    def __init__(self, *snapshots):
        self.snapshots = list(snapshots)
        self.calls = 0

    clients = (None,)

    async def snapshot(self, rows, blocks, *, engine):
        assert blocks
        self.calls += 1
        await asyncio.sleep(0)
        found = self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]
        if isinstance(found, Exception):
            raise found
        return found


def snapshot(at=1.0, states=b"\x02\x02\x03\x00", owners=(1, 1, 1, 0), first=0, steps=3):
    stats = SchedulerStats(1, 0, 4, 2, 1, 1, 0, 10, 5)
    times = [0] * TIME_BUCKETS
    times[40] = first
    told = {
        "steps": steps,
        "generated_tokens": 9,
        "finished": {"stop": 2},
        "breakdown_seconds": [0.0, 0.5, 1.0, 0.0, 0.0, 2.0, 0.25, 0.0],
        "first_token_times": times,
        "inter_token_times": [0] * TIME_BUCKETS,
    }
    counts = DraftCounts(rows=4, tokens=10, accepted=(3, 2))
    counted = {**dict.fromkeys(EngineCounters._fields, 0), "draft_counts": counts}
    counters = EngineCounters(**{**counted, **told})
    row = RequestRow("chatcmpl-mine-17", 0, "running", 6, 2, 6, 3, 2, 0, 0.25)
    packed = b"".join(one.to_bytes(2, "little") for one in owners)
    return Snapshot(at, stats, 0, 8, 16, counters, [row], states, packed)


def decoded(event):
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return msgspec.json.decode(event[6:])


def looked(engine, scene):
    """Run scene(feed) and prove that afterwards nobody asks the engine."""

    async def run():
        feed = SnapshotFeed(engine, period_s=0.001)
        await scene(feed)
        task = feed._task
        if task is not None:
            await asyncio.wait_for(task, 5)
        calls = engine.calls
        await asyncio.sleep(0.01)
        assert engine.calls == calls

    asyncio.run(run())


def test_a_frame_tells_of_requests_by_the_ids_their_clients_know():
    async def scene(feed):
        watch = feed.subscribe()
        told = decoded(await anext(watch))
        assert told["rows"][0]["id"] == "chatcmpl-mine"
        assert told["rows"][0]["generated"] == 3
        assert told["totals"]["cuts"]["queue"] == 0.5
        assert told["totals"]["cuts"]["engine_other"] == 0.25
        drafts = {"draft_rows": 4, "drafted": 10, "accepted": 5}
        assert {name: told["totals"][name] for name in drafts} == drafts
        assert told["blocks"] == {"size": 16, "total": 4, "held": 2, "shared": 1} | {
            "cached": 1,
            "free": 1,
        }
        assert zlib.decompress(base64.b64decode(told["map"])) == b"\2\2\3\0\1\0\1\0\1\0\0\0"
        watch.close()

    looked(FakeEngine(snapshot()), scene)


def test_the_map_is_sent_again_only_when_it_changed():
    async def scene(feed):
        watch = feed.subscribe()
        with_map = ["map" in decoded(await anext(watch)) for _ in range(4)]
        assert with_map == [True, False, True, False]
        watch.close()

    other = snapshot(states=b"\x02\x02\x01\x00")
    looked(FakeEngine(snapshot(), snapshot(), other, other), scene)


def test_who_comes_later_gets_the_map_too():
    async def scene(feed):
        early = feed.subscribe()
        await anext(early)
        late = feed.subscribe()
        assert "map" in decoded(await anext(late))
        assert "map" not in decoded(await anext(early))
        early.close()
        late.close()

    looked(FakeEngine(snapshot()), scene)


def test_all_who_watch_share_one_call_and_none_is_made_for_nobody():
    engine = FakeEngine(snapshot())

    async def scene(feed):
        watches = [feed.subscribe() for _ in range(20)]
        for _ in range(3):
            await asyncio.gather(*(anext(one) for one in watches))
        assert engine.calls <= 4
        for one in watches:
            one.close()

    looked(engine, scene)
    assert engine.calls <= 5


def test_percentiles_are_of_what_happened_since_someone_looks():
    async def scene(feed):
        watch = feed.subscribe()
        assert decoded(await anext(watch))["first"] is None
        p50, p90, p99 = decoded(await anext(watch))["first"]
        assert 2**-9 <= p50 < p90 < p99 <= 2**-8.8
        watch.close()

    looked(FakeEngine(snapshot(1.0, first=5), snapshot(2.0, first=9)), scene)


def test_percentiles_of_an_engine_that_took_over_are_of_its_own():
    async def scene(feed):
        watch = feed.subscribe()
        await anext(watch)
        assert decoded(await anext(watch))["first"] is None  # nothing since it was first seen
        assert len(decoded(await anext(watch))["first"]) == 3
        watch.close()

    gone, new = snapshot(1.0, first=9, steps=80), snapshot(2.0, first=4, steps=2)
    looked(FakeEngine(gone, new, snapshot(3.0, first=6, steps=5)), scene)


def test_when_the_server_ends_nobody_is_left_waiting():
    async def scene(feed):
        watch = feed.subscribe()
        await anext(watch)
        feed.shut_down()
        with pytest.raises(StopAsyncIteration):
            await anext(watch)
        with pytest.raises(StopAsyncIteration):
            await anext(feed.subscribe())

    looked(FakeEngine(snapshot()), scene)


@pytest.mark.parametrize(("error", "word"), [(EngineDead("gone"), "gone"), (KeyError(), "log")])
def test_an_engine_that_cannot_be_looked_at_is_told_of(error, word):
    async def scene(feed):
        watch = feed.subscribe()
        await anext(watch)
        assert word in decoded(await anext(watch))["error"]["message"]
        with pytest.raises(StopAsyncIteration):
            await anext(watch)

    looked(FakeEngine(snapshot(), error), scene)


def test_the_live_view_of_a_running_server(server, http):
    with http.stream("GET", "/quire/live") as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        event = next(line for line in got.iter_lines() if line)
    told = msgspec.json.decode(event.removeprefix("data: "))
    assert told["blocks"]["total"] == told["blocks"]["free"] + told["blocks"]["cached"]
    assert told["running"] == 0


def test_model_cards_and_the_page_state_how_weights_are_held(tokenizer):
    held = {"dtype": "bfloat16", "quantization": "int4", "weight_bits": 4.63}
    server = Server(tokenizer, services=held)
    with server.running(), httpx.Client(base_url=server.url) as http:
        (first, _) = http.get("/v1/models").json()["data"]
        want = {"dtype": "bfloat16", "quantization": "int4", "bits_per_weight": 4.63}
        assert first["weights"] == want
        assert http.get("/v1/models/tiny").json()["weights"] == want
        assert http.get("/quire/about").json()["weights"] == want
