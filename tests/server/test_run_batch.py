"""`quire run-batch`: OpenAI batch files, at a server and in this process."""

import asyncio
import base64
import http.server
import json
import threading

import numpy as np
import pytest

from quire.cli import main
from quire.cli.batch_lines import run_requests
from quire.cli.remote_server import ServerReply
from quire.cli.run_batch import call_app
from tests.server.harness import CLASSIFIES, EMBEDS, Server, vector_of

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "temperature": 0}


def line(custom_id, body, url="/v1/chat/completions", **more):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more})


def run(capsys, tmp_path, lines, *argv):
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    words = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    status = main(["run-batch", *words, *argv])
    said = capsys.readouterr()
    out = tmp_path / "out.jsonl"
    found = [json.loads(one) for one in out.read_text().splitlines()] if out.exists() else None
    return status, found, said.err


def test_answers_come_in_order_and_bad_lines_yield_errors(capsys, server, tmp_path):
    lines = [
        line("a", CHAT), "not json", "", line("b", {**CHAT, "max_tokens": -1}), line("c", {}, "/nowhere"),
        line("d", {"prompt": "Once", "max_tokens": 400}, "/v1/completions"), line(7, CHAT), "[]",
        line("e", {**CHAT, "stream": True}), line("f", CHAT, method="GET"), line("g", [], "/v1/completions"),
        line("h", {**CHAT, "model": "nobody"}),
    ]  # fmt: skip
    status, found, err = run(capsys, tmp_path, lines, "--url", f"{server.url}/v1")
    assert status == 0
    assert "2 answered, 9 with an error" in err
    assert [one["custom_id"] for one in found] == [
        "a",
        None,
        "b",
        "c",
        "d",
        None,
        None,
        "e",
        "f",
        "g",
        "h",
    ]
    by_id = {one["custom_id"]: one for one in found}
    text = by_id["a"]["response"]["body"]["choices"][0]["message"]["content"]
    assert text == server.answer(CHAT["messages"])
    assert by_id["a"]["error"] is None
    assert by_id["a"]["response"]["request_id"]
    once = server.model.text(server.tokenizer.encode("Once"))
    assert by_id["d"]["response"]["body"]["choices"][0]["text"] == once
    assert by_id["b"]["response"]["status_code"] == 400
    assert by_id["b"]["error"]["param"] == "max_tokens"
    assert by_id["h"]["response"]["status_code"] == 404
    for name, why in (
        ("c", "url must be one of"),
        ("e", "stream"),
        ("f", "method must be POST"),
        ("g", "body a JSON object"),
    ):
        assert by_id[name]["response"] is None
        assert why in by_id[name]["error"]["message"]
    assert len({one["id"] for one in found}) == len(found)


def test_in_this_process_the_answer_is_that_of_the_server(server, http):
    reply = server.ask(call_app(server.app, "/v1/chat/completions", {**CHAT, "seed": 1}))
    there = http.post("/v1/chat/completions", json={**CHAT, "seed": 1}).json()
    assert reply.status == 200
    assert reply.body["choices"] == there["choices"]
    assert reply.body["usage"]["total_tokens"] == there["usage"]["total_tokens"]
    assert server.ask(call_app(server.app, "/v1/chat/completions", {})).status == 400


def test_a_server_that_is_gone_is_an_error_in_every_line(capsys, tmp_path):
    status, found, _ = run(capsys, tmp_path, [line("a", CHAT)], "--url", "http://127.0.0.1:9/v1")
    assert status == 0
    assert found[0]["response"] is None
    assert found[0]["error"]["type"] == "server_error"


@pytest.mark.parametrize("words", [["--max-inflight", "0"], ["--url", "x", "--max-model-len", "8"]])
def test_bad_flags_are_one_line(capsys, tmp_path, words):
    assert run(capsys, tmp_path, [], *words)[0] == 2


def test_files_that_cannot_be_opened_are_one_line(capsys, tmp_path):
    words = ["--url", "http://127.0.0.1:9"]
    assert main(["run-batch", "-i", str(tmp_path / "no"), "-o", str(tmp_path / "o"), *words]) == 2
    assert "--input-file" in capsys.readouterr().err
    (tmp_path / "i").write_text("")
    assert main(["run-batch", "-i", str(tmp_path / "i"), "-o", "/no/such/o", *words]) == 2
    assert "--output-file" in capsys.readouterr().err


def test_an_output_never_replaces_its_input(capsys, tmp_path):
    given, link = tmp_path / "i", tmp_path / "link"
    given.write_text("{}\n")
    link.symlink_to(given)
    for out in (given, link):
        words = ["-i", str(given), "-o", str(out), "--url", "http://127.0.0.1:9"]
        assert main(["run-batch", *words]) == 2
        assert "is the input file too" in capsys.readouterr().err
    assert given.read_text() == "{}\n"


def test_files_may_be_addresses(capsys, server, tmp_path):
    written = []

    class Files(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(line("a", CHAT).encode())

        def do_PUT(self):
            written.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        there = f"http://127.0.0.1:{files.server_port}"
        words = ["-i", f"{there}/i", "-o", f"{there}/o", "--output-tmp-dir", str(tmp_path)]
        words += ["--trusted-host", "127.0.0.1"]
        assert main(["run-batch", *words, "--url", f"{server.url}/v1"]) == 0
        files.shutdown()
    assert json.loads(written[0])["custom_id"] == "a"
    capsys.readouterr()


def test_no_more_requests_than_asked_for_are_at_work_and_order_is_kept():
    at_work, most = 0, 0

    async def ask(path, body):
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        for _ in range(body["n"]):
            await asyncio.sleep(0)
        at_work -= 1
        return ServerReply(200, "", body)

    async def all_of_them():
        lines = (line(str(n), {"n": (n * 7) % 5}) for n in range(200))
        return [one["custom_id"] async for one in run_requests(lines, ask, at_once=3)]

    assert asyncio.run(all_of_them()) == [str(n) for n in range(200)]
    assert most == 3


def test_embeddings_labels_scores_and_ranks_in_a_batch(capsys, server, tokenizer, tmp_path):
    lines = [
        line("a", {"input": ["hello", "you"]}, "/v1/embeddings"),
        line("b", {"input": "hello", "encoding_format": "base64"}, "/v1/embeddings"),
        line("c", {"texts": ["hello"]}, "/v2/embed"),
        line("d", {"input": "hello", "encoding_format": "bytes"}, "/v1/embeddings"),
        line("e", {"input": "hello"}, "/classify"),
    ]
    _, found, err = run(capsys, tmp_path, lines, "--url", f"{server.url}/v1")
    assert "3 answered, 2 with an error" in err
    bodies = [one["response"] and one["response"]["body"] for one in found]
    want = vector_of(tokenizer.encode("hello"))
    assert np.array_equal(np.array(bodies[0]["data"][0]["embedding"], np.float32), want)
    assert base64.b64decode(bodies[1]["data"][0]["embedding"]) == want.tobytes()
    assert np.array_equal(np.array(bodies[2]["embeddings"]["float"][0], np.float32), want)
    assert found[3]["error"]["param"] == "encoding_format"
    assert "/v1/embeddings" in found[4]["error"]["message"]
    with Server(tokenizer, pooling=EMBEDS, generates=False).running() as ranks:
        pairs = [
            line("s", {"text_1": "a", "text_2": ["b", "a"]}, "/v1/score"),
            line("r", {"query": "a", "documents": ["b", "a"]}, "/v1/rerank"),
        ]
        _, found, _ = run(capsys, tmp_path, pairs, "--url", f"{ranks.url}/v1")
        scores = [one["score"] for one in found[0]["response"]["body"]["data"]]
        ranked = found[1]["response"]["body"]["results"]
        assert [one["relevance_score"] for one in ranked] == sorted(scores)[::-1]
    with Server(tokenizer, pooling=CLASSIFIES, generates=False).running() as labels:
        (one,) = run(capsys, tmp_path, [lines[4]], "--url", f"{labels.url}/v1")[1]
        assert one["response"]["body"]["data"][0]["label"] in CLASSIFIES.labels
