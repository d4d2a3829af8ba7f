"""/metrics and /load: what was done is what is told, by the names that dashboards know."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.core.params import SamplingParams
from quire.core.sequence_timing import SequenceTiming
from quire.core.types import Request, StopConditions, Update
from quire.errors import EngineDead
from quire.server.options import ServerOptions
from quire.server.telemetry import instrumentation, metrics
from quire.server.telemetry import metric_specs as names
from quire.server.telemetry.shared_counters import SharedCounters
from tests.server.harness import Server


@pytest.fixture
def fresh(tokenizer):
    """Makes servers that nobody else has asked anything."""
    made = []

    def make(**more):
        context = Server(tokenizer, **more).running()
        made.append(context)
        return context.__enter__()

    yield make
    for context in reversed(made):
        context.__exit__(None, None, None)


def read(url):
    """Sample name and its labels (but those of every series) -> value."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            key = sample.name, *sorted(labels.items())
            assert key not in found, f"{key} is told twice"
            found[key] = sample.value
    return found


def complete(url, **body):
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 5} | body)
    assert answer.status_code == 200, answer.text
    return answer


def test_every_metric_of_the_table_is_told(fresh):
    url = fresh().url
    complete(url)
    families = {f.name: f for f in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)}
    for one in (*names.ENGINE_METRICS, *names.REQUEST_METRICS):
        name = f"quire:{one.name}"
        family = families[name if one.kind != "counter" else name.removesuffix("_total")]
        assert family.type == one.kind
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
    for one in names.HTTP_METRICS:
        assert one.name.removesuffix("_total") in families


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_requests_and_ends_are_counted(fresh, stream):
    url = fresh().url
    complete(url, stream=stream)
    complete(url, stream=stream, n=2, max_tokens=3)
    found = read(url)
    assert found["quire:prompt_tokens_total",] == 10
    assert found["quire:generation_tokens_total",] == 11
    assert found["quire:request_success_total", ("finished_reason", "length")] == 3
    assert found["quire:request_generation_tokens_sum",] == 11
    assert found["quire:request_generation_tokens_count",] == 3
    assert found["quire:request_prompt_tokens_count",] == 2
    assert found["quire:request_params_n_sum",] == 3
    assert found["quire:request_params_max_tokens_sum",] == 8
    assert found["quire:request_max_num_generation_tokens_sum",] == 8
    assert found["quire:time_to_first_token_seconds_count",] == 3
    assert found["quire:inter_token_latency_seconds_count",] == 8
    assert found["quire:e2e_request_latency_seconds_count",] == 2
    assert found["quire:request_queue_time_seconds_count",] == 3
    by_source = "quire:prompt_tokens_by_source_total"
    cached = found[by_source, ("source", "local_cache_hit")]
    assert cached == found["quire:prefix_cache_hits_total",] == 4
    assert found[by_source, ("source", "local_compute")] == 10 - cached
    assert found["quire:request_prefill_kv_computed_tokens_sum",] == 10 - cached


def test_phases_add_up_to_the_latency(fresh):
    url = fresh(step_s=0.02).url
    complete(url, stream=True)
    found = read(url)
    total = found["quire:e2e_request_latency_seconds_sum",]
    queue, inference = (
        found[f"quire:request_{phase}_time_seconds_sum",] for phase in ("queue", "inference")
    )
    assert 0.08 < inference < total
    assert queue + inference <= total
    causes = [v for key, v in found.items() if key[0] == "quire:request_time_seconds_total"]
    assert 0.09 < sum(causes) <= total


def test_an_answer_that_is_told_at_its_end_has_the_time_of_its_first_token(fresh):
    url = fresh(step_s=0.02).url
    complete(url, max_tokens=10)
    found = read(url)
    first = found["quire:time_to_first_token_seconds_sum",]
    assert 0.02 < first < 0.1
    assert found["quire:inter_token_latency_seconds_sum",] > 0.17
    assert found["quire:e2e_request_latency_seconds_sum",] > 0.2


def test_an_end_by_a_stop_string_is_a_stop(fresh):
    server = fresh(step_s=0.01)  # or the engine comes to an end of its own before it is told
    text = server.model.text(server.tokenizer.encode("hello", add_special_tokens=False))
    complete(server.url, stop=text[2:4], max_tokens=50)
    server.wait_idle()
    found = read(server.url)
    assert found["quire:request_success_total", ("finished_reason", "stop")] == 1
    assert found["quire:request_success_total", ("finished_reason", "abort")] == 0
    assert not server.app.state.telemetry.request_metrics._requests


def test_a_client_that_leaves_is_an_abort(fresh):
    server = fresh(step_s=0.01)
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: a dropped iterator closes the stream
        next(lines)
    server.wait_idle()
    found = read(server.url)
    assert found["quire:request_success_total", ("finished_reason", "abort")] == 1
    assert found["quire:request_generation_tokens_count",] == 1
    assert not server.app.state.telemetry.request_metrics._requests


def test_what_runs_and_waits_is_told_while_it_does(fresh):
    server = fresh(step_s=0.02, seqs=1)
    body = {"prompt": ["hello", "world"], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: a dropped iterator closes the stream
        next(lines)
        found = read(server.url)
        assert httpx.get(f"{server.url}/load").json()["server_load"] == 1
    assert found["quire:num_requests_running",] == 1
    assert found["quire:num_requests_waiting",] == 1
    assert found["quire:num_requests_waiting_by_reason", ("reason", "capacity")] == 1
    assert found["quire:kv_cache_usage_perc",] > 0
    server.wait_idle()
    assert httpx.get(f"{server.url}/load").json()["server_load"] == 0


def test_http_requests_are_counted_by_handler_method_and_class_of_status(fresh):
    url = fresh().url
    complete(url)
    httpx.get(f"{url}/v1/models/tiny")
    httpx.get(f"{url}/v1/models/nobody")
    httpx.get(f"{url}/nowhere")
    httpx.get(f"{url}/health")
    found = read(url)
    counted = {key[1:]: n for key, n in found.items() if key[0] == "http_requests_total"}
    assert {tuple(v for _, v in key): n for key, n in counted.items()} == {
        ("/v1/completions", "POST", "2xx"): 1,
        ("/v1/models/{name:path}", "GET", "2xx"): 1,
        ("/v1/models/{name:path}", "GET", "4xx"): 1,
        ("none", "GET", "4xx"): 1,
    }
    size = len(b'{"prompt":"hello","max_tokens":5}')
    assert found["http_request_size_bytes_sum", ("handler", "/v1/completions")] == size
    assert found["http_request_duration_highr_seconds_count",] == 4


@pytest.mark.parametrize(
    ("said", "prefixes"),
    [("quire", {"quire"}), ("vllm", {"vllm"}), ("both", {"quire", "vllm"})],
)
def test_the_prefix_is_as_asked_for(fresh, said, prefixes):
    found = read(fresh(options=ServerOptions(metrics_prefix=said)).url)
    told = {key[0].split(":")[0] for key in found if key[0].endswith(":num_requests_running")}
    assert told == prefixes
    assert ("quire:engine_steps_total",) in found


def test_both_prefixes_are_the_default_and_unused_families_are_zero(fresh):
    found = read(fresh().url)
    assert {"quire", "vllm"} == {
        key[0].split(":")[0] for key in found if key[0].endswith(":num_requests_running")
    }
    for name in (
        "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "mm_cache_queries",
        "spec_decode_num_accepted_tokens", "external_prefix_cache_hits", "corrupted_requests",
    ):  # fmt: skip
        assert found[f"vllm:{name}_total",] == 0
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", ("position", "0")] == 0
    assert found["quire:mm_cache_queries_total",] == 0


@pytest.mark.parametrize("public", [False, True])
def test_a_scrape_works_where_a_key_is_set(fresh, public):
    url = fresh(options=ServerOptions(api_key=("secret",), public_metrics=public)).url
    assert httpx.get(f"{url}/metrics").status_code == (200 if public else 401)
    key = {"Authorization": "Bearer secret"}
    assert httpx.get(f"{url}/metrics", headers=key).status_code == 200
    assert httpx.get(f"{url}/v1/models").status_code == 401


def test_openmetrics_is_told_to_those_who_want_it(fresh):
    answer = httpx.get(
        f"{fresh().url}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}
    )
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_load_may_be_left_untold(fresh):
    url = fresh(options=ServerOptions(enable_server_load_tracking=False)).url
    assert httpx.get(f"{url}/load").status_code == 404


def test_a_dead_engine_leaves_the_rest_to_be_told(fresh):
    server = fresh()
    complete(server.url)

    async def die():
        server.client._on_engine_dead(EngineDead("gone"))

    server.ask(die())
    found = read(server.url)
    assert found["quire:request_success_total", ("finished_reason", "length")] == 1
    assert ("quire:num_requests_running",) not in found


def test_an_engine_that_does_not_answer_in_time_is_left_out(fresh, monkeypatch):
    monkeypatch.setattr(instrumentation, "SNAPSHOT_TIMEOUT_S", 0.01)
    server = fresh(step_s=0.3)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(complete, server.url, max_tokens=3)
        while not server.executor.said:
            pass
        assert ("quire:num_requests_running",) not in read(server.url)
        running.result()
    monkeypatch.setattr(instrumentation, "SNAPSHOT_TIMEOUT_S", 5.0)
    assert ("quire:num_requests_running",) in read(server.url)


# -- the books of one process -------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def recorder():
    board = SharedCounters(metrics.request_counter_names(1000))
    clock = Clock()
    over = []
    return metrics.RequestMetrics(board, 1000, over=over.append, clock=clock), board, clock, over


def test_without_statistics_nothing_is_observed(tokenizer):
    server = Server(tokenizer, services={"log_stats": False})
    assert server.client.observer is None


def test_without_statistics_http_is_told_and_nothing_of_requests(fresh):
    url = fresh(services={"log_stats": False}).url
    complete(url)
    told = {key[0] for key in read(url)}
    assert "http_requests_total" in told
    assert not [name for name in told if ":" in name]


def test_inter_token_times_are_of_each_token_though_updates_be_merged():
    watching, board, clock, _ = recorder()
    watching.on_requests_accepted([Request("r", (1,), StopConditions(9), arrived_at=99.0)])
    watching.on_updates([Update("r", 0, [1])])
    clock.now += 0.3
    watching.on_updates([Update("r", 0, [2, 3, 4])])
    place = board.index_by_name["inter_token_latency_seconds bucket 4"]  # (0.075, 0.1]
    assert board.values[place] == 3
    assert board.values[board.index_by_name["time_to_first_token_seconds sum"]] == 1.0


def test_a_request_is_over_once_when_its_last_sequence_ends():
    watching, _, _, over = recorder()
    watching.on_requests_accepted(
        [Request("r", (1,), StopConditions(9), n=2, params=SamplingParams(n=2))]
    )
    watching.on_sequence_ended("r", 1)
    watching.on_sequence_ended("r", 1)
    assert not over
    told = SequenceTiming(99.0, 100.0, None, 0.25, 0.75, *[0.0] * 6)
    watching.on_updates([Update("r", 0, [], "abort", timing=told)])
    assert [life.finish_reasons for life in over] == [["abort", "stop"]]
    assert not watching.has("r")
    watching.on_updates([Update("r", 0, [5])])  # late, of nobody


def test_rounds_of_a_beam_search_are_no_requests(fresh):
    server = fresh()
    complete(server.url, use_beam_search=True, n=3)
    server.wait_idle()
    found = read(server.url)
    assert found["quire:generation_tokens_total",] > 0
    assert found["quire:prompt_tokens_total",] == 0
    assert found["quire:e2e_request_latency_seconds_count",] == 0
    assert found["quire:time_to_first_token_seconds_count",] == 0


# -- several processes ----------------------------------------------------------------------------


def test_boards_of_one_folder_add_up(tmp_path):
    boards = [SharedCounters(["a", "b"], tmp_path) for _ in range(3)]
    for number, board in enumerate(boards, 1):
        board.add("a", number)
        board.add("b")
    assert all(list(board.totals()) == [6.0, 3.0] for board in boards)


def test_a_full_disk_costs_the_others_a_process_its_counters_and_nobody_his_life(
    tmp_path, monkeypatch
):
    first = SharedCounters(["a"], tmp_path)
    first.add("a", 2.0)

    def full(*args):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    second = SharedCounters(["a"], tmp_path)
    second.add("a", 5.0)
    assert (list(first.totals()), list(second.totals())) == ([2.0], [7.0])
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_process_counted_stays_when_it_has_gone(tmp_path):
    first, second = SharedCounters(["a"], tmp_path), SharedCounters(["a"], tmp_path)
    first.add("a", 5)
    del first
    second.add("a", 2)
    assert list(second.totals()) == [7.0]


def test_boards_with_other_names_are_not_added(tmp_path):
    ours, other = SharedCounters(["a", "b"], tmp_path), SharedCounters(["b", "a"], tmp_path)
    other.add("a", 9)
    ours.add("a", 1)
    assert list(ours.totals()) == [1.0, 0.0]


def test_two_apps_on_one_folder_tell_the_same(tokenizer, tmp_path):
    """Two apps, each with its own client and board, as two processes have them."""
    servers = [Server(tokenizer, services={"counters_folder": tmp_path}) for _ in range(2)]
    with servers[0].running() as one, servers[1].running() as two:
        for url, times in ((one.url, 3), (two.url, 4)):
            for _ in range(times):
                complete(url)
        for url in (one.url, two.url):
            found = read(url)
            assert found["quire:request_success_total", ("finished_reason", "length")] == 7
            key = (("handler", "/v1/completions"), ("method", "POST"), ("status", "2xx"))
            assert found[("http_requests_total", *key)] == 7
            assert ("process_open_fds",) not in found
