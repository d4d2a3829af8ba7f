"""What the log tells of requests, answers and statistics, and what it never tells."""

import asyncio
import json
import logging

import httpx
import pytest

from quire import log as logs
from quire.core.scheduler_stats import SchedulerStats
from quire.core.snapshot import EngineCounters, Snapshot
from quire.core.types import DraftCounts
from quire.server.options import ServerOptions
from quire.server.telemetry import stats_logger
from quire.server.telemetry.http_metrics import LOAD_COUNTER
from quire.server.telemetry.metric_specs import FINISH_REASONS
from quire.server.telemetry.shared_counters import SharedCounters
from tests.server.harness import Reciter, Server

SECRET = "sk-very-secret"
PROMPT = "a prompt that nobody else should read"


@pytest.fixture
def told(tokenizer, caplog):
    """Asks a server with these options; the lines of its request log."""

    def ask(level, *, stream=False, **options):
        options = ServerOptions(api_key=(SECRET,), **options)
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.25, "stream": stream}
        headers = {"Authorization": f"Bearer {SECRET}", "X-Request-Id": "mine"}
        with (
            caplog.at_level(level, logger="quire"),
            Server(tokenizer, options=options, step_s=0.005).running() as server,
        ):
            url = f"{server.url}/v1/completions"
            assert httpx.post(url, json=body, headers=headers).status_code == 200
            server.wait_idle()
        return [
            r.getMessage() for r in caplog.records if r.name == "quire.server.telemetry.request_log"
        ]

    return ask


def test_requests_are_not_logged_unless_asked_for(told):
    assert told("DEBUG") == []


def test_a_line_has_the_id_the_length_and_the_parameters_and_not_the_prompt(told):
    (line,) = told("INFO", enable_log_requests=True)
    assert "cmpl-mine" in line
    assert f"{len(PROMPT)} prompt tokens" in line
    assert "temperature 0.25" in line
    assert PROMPT[:8] not in line


def test_the_prompt_is_told_at_debug_and_cut(told):
    lines = told("DEBUG", enable_log_requests=True, max_log_len=8)
    assert any(repr(PROMPT[:8]) in line for line in lines)
    assert not any(PROMPT[:9] in line for line in lines)


def test_keys_are_never_told(told, caplog):
    told("DEBUG", enable_log_requests=True, enable_log_outputs=True)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_told_if_asked_for(told, tokenizer, stream):
    lines = told(
        "INFO",
        stream=stream,
        enable_log_requests=True,
        enable_log_outputs=True,
        enable_log_deltas=False,
    )
    model = Reciter(tokenizer)
    text = tokenizer.decode(model.speech(tokenizer.encode(PROMPT, add_special_tokens=False))[:6])
    assert len(lines) == 2
    assert lines[1] == f"answer 0 of cmpl-mine ended (length): {text!r}"


def test_pieces_of_a_stream_are_told_if_asked_for(told):
    lines = told("INFO", stream=True, enable_log_requests=True, enable_log_outputs=True)
    assert sum(line.startswith("piece of answer 0 of cmpl-mine") for line in lines) > 2


def test_a_line_may_be_json_with_its_fields(capsys):
    record = logging.makeLogRecord(
        {"name": "quire.x", "levelname": "INFO", "msg": "request %s", "args": ("r",)}
        | {"request_id": "r", "prompt_tokens": 5}
    )
    line = json.loads(logs.JsonLinesFormatter().format(record))
    assert (line["message"], line["request_id"], line["prompt_tokens"]) == ("request r", "r", 5)


# -- statistics -----------------------------------------------------------------------------------


def snapshot(prompt=0, generated=0, queries=0, hits=0, steps=0):
    stats = SchedulerStats(3, 3, 100, 25, 0, 75, 0, queries, hits)
    counters = EngineCounters(steps, 0.0, prompt, 0, 0, 0, generated, {}, [], [], 0, [], [])
    return Snapshot(0.0, stats, 0, 8, 16, counters, [])


class Scene:
    def __init__(self):
        self.board = SharedCounters(
            [LOAD_COUNTER, *(f"request_success {one}" for one in FINISH_REASONS)]
        )
        self.now = 0.0
        self.looks = 0
        self.answer = snapshot()
        self.statistics = stats_logger.StatsLogger(self.board, self.look, lambda: self.now)

    async def look(self):
        self.looks += 1
        return self.answer

    def line(self, after=10.0):
        self.now += after
        return asyncio.run(self.statistics.build_line())


def test_statistics_are_silent_while_nothing_happens_and_leave_the_engine_alone():
    scene = Scene()
    assert scene.line() is None
    assert not scene.looks


def test_statistics_are_rates_since_the_line_before():
    scene = Scene()
    scene.board.add(LOAD_COUNTER)
    scene.answer = snapshot(prompt=100, generated=50, queries=10, hits=5)
    scene.line()
    scene.answer = snapshot(prompt=300, generated=150, queries=30, hits=20)
    words, numbers = scene.line(after=5.0)
    assert words == (
        "prompts 40.0 tok/s, output 20.0 tok/s; running 3, waiting 3; KV cache 25.0% held, "
        "prefix cache hits 75.0%"
    )
    assert numbers["generation_tokens_per_s"] == 20.0


def test_drafts_have_a_line_of_their_own():
    scene = Scene()
    scene.board.add(LOAD_COUNTER)
    for counts in (DraftCounts(10, 30, (5,)), DraftCounts(20, 60, (15, 5))):
        found = snapshot(steps=counts.rows)
        scene.answer = found._replace(counters=found.counters._replace(draft_counts=counts))
        words, _ = scene.line()
    assert words.splitlines()[1] == (
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 1.50 tokens/s, "
        "Drafted throughput: 3.00 tokens/s, Accepted: 15 tokens, Drafted: 30 tokens, "
        "Per-position acceptance rate: 1.000, 0.500, Avg Draft acceptance rate: 50.0%"
    )
    assert len(scene.line()[0].splitlines()) == 1, "none since the line before"


def test_drafts_that_are_hardly_accepted_are_warned_of_once(caplog):
    scene = Scene()
    scene.board.add(LOAD_COUNTER)
    for counts in (DraftCounts(999, 3000, ()), DraftCounts(1500, 4500, (150,)),
                   DraftCounts(1600, 4800, (150,)), DraftCounts(2000, 6000, (150,))):  # fmt: skip
        scene.answer = scene.answer._replace(
            counters=scene.answer.counters._replace(draft_counts=counts)
        )
        scene.line()
    assert [one.getMessage()[:48] for one in caplog.records if one.levelname == "WARNING"] == [
        "of 4800 drafted tokens 150 were accepted: a draf"
    ]


def test_an_engine_that_took_over_counts_from_its_own_start():
    scene = Scene()
    scene.board.add(LOAD_COUNTER)
    scene.answer = snapshot(prompt=5000, generated=900, queries=50, hits=40, steps=400)
    scene.line()
    scene.answer = snapshot(prompt=100, generated=50, queries=10, hits=5, steps=20)
    words, _ = scene.line()
    assert words.startswith("prompts 10.0 tok/s, output 5.0 tok/s")
    assert words.endswith("prefix cache hits 50.0%")


def test_what_ended_between_two_lines_is_told_though_nothing_runs_any_more():
    scene = Scene()
    scene.board.add("request_success stop")
    assert scene.line() is not None
    assert scene.line() is None


def test_an_engine_that_does_not_answer_is_told_so():
    scene = Scene()
    scene.board.add(LOAD_COUNTER)
    scene.answer = None
    assert scene.line() == ("the engine does not answer", {})


def test_a_running_server_logs_its_statistics(tokenizer, caplog):
    options = ServerOptions(log_stats_interval=0.05)
    with (
        caplog.at_level("INFO", logger="quire"),
        Server(tokenizer, options=options, step_s=0.01).running() as server,
    ):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 30})
    lines = [r for r in caplog.records if r.name == "quire.server.telemetry.stats_logger"]
    assert lines
    assert any(line.generation_tokens_per_s > 0 for line in lines)  # not each on a busy machine
