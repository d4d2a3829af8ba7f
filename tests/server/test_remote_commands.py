"""`quire chat` and `quire complete` as clients of a server."""

import io
import json

import pytest

from quire.cli import main
from quire.cli.remote_server import RemoteServer, error_message, print_stream, read_sse
from quire.errors import ConfigError, QuireError, RequestError
from quire.server.options import ServerOptions
from tests.server.harness import Server


def run(capsys, *argv):
    status = main(list(argv))
    said = capsys.readouterr()
    return status, said.out, said.err


def test_quick_chat_prints_the_answer_of_the_server(capsys, server):
    url = f"{server.url}/v1"
    said = {"temperature": "0", "max-tokens": "400"}
    flags = [word for name, value in said.items() for word in (f"--{name}", value)]
    status, out, err = run(capsys, "chat", "--url", url, "-q", "hi", "--stats", *flags)
    assert status == 0
    assert out == server.answer([{"role": "user", "content": "hi"}]) + "\n"
    assert "first token after" in err
    assert "; stop]" in err


def test_reasoning_that_the_server_sends_is_printed_apart(capsys):
    deltas = [{"reasoning": "a"}, {"reasoning_content": "b"}, {"content": "c"}, {"content": "d"}]
    answer = print_stream({"choices": [{"delta": one}]} for one in deltas)
    said = capsys.readouterr()
    assert (answer.text, said.out, said.err) == ("cd", "cd\n", "Thinking:\nab\n\n")


def test_system_prompt_and_variables_reach_the_server(capsys, server):
    words = ["--system-prompt", "be kind", "--chat-template-kwargs", '{"shout": true}']
    _, out, _ = run(capsys, "chat", "--url", f"{server.url}/v1", "-q", "hi", *words)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert out == server.answer(messages, shout=True) + "\n"


def test_a_conversation_remembers_and_obeys(capsys, server, monkeypatch):
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("hi\n/set max_tokens 2\n/set max_tokens x\nagain\n/exit\n")
    )
    _, out, err = run(capsys, "chat", "--url", f"{server.url}/v1", "--model-name", "alias")
    first = server.answer([{"role": "user", "content": "hi"}])
    assert out.startswith(first)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first}]
    again = server.chat_ids([*talk, {"role": "user", "content": "again"}])
    assert server.tokenizer.decode(server.model.speech(again)[:2]).rstrip("\ufffd") in out
    assert "max_tokens must be a number" in err


def test_complete_goes_on_with_the_text(capsys, server, monkeypatch):
    expected = server.model.text(server.tokenizer.encode("Once"))
    words = ["complete", "--url", f"{server.url}/v1", "--max-tokens", "400"]
    assert run(capsys, *words, "-q", "Once")[:2] == (0, expected + "\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("Once\n\n"))
    assert run(capsys, *words)[:2] == (0, expected + "\n")


def test_the_key_is_sent_or_taken_from_the_environment(capsys, tokenizer, monkeypatch):
    with Server(tokenizer, options=ServerOptions(api_key=("k",))).running() as server:
        words = ["chat", "--url", f"{server.url}/v1", "-q", "hi"]
        status, _, err = run(capsys, *words)
        assert (status, "Unauthorized" in err) == (1, True)
        assert run(capsys, *words, "--api-key", "k")[0] == 0
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        assert run(capsys, *words)[0] == 0


def test_what_the_server_refuses_is_one_line(capsys, server):
    status, _, err = run(
        capsys, "chat", "--url", f"{server.url}/v1", "--model-name", "nobody", "-q", "hi"
    )
    assert status == 1
    assert err.startswith("quire chat: error: ")
    assert "nobody" in err


def test_a_server_that_is_not_there_is_one_line(capsys):
    status, _, err = run(capsys, "complete", "--url", "http://127.0.0.1:9/v1", "-q", "hi")
    assert status == 1
    assert "http://127.0.0.1:9/v1 does not answer" in err
    with pytest.raises(QuireError):
        RemoteServer("127.0.0.1:9/v1", None).resolve_model(None)


def test_an_error_in_the_middle_of_a_stream_is_told(capsys):
    chunks = [{"choices": [{"delta": {"content": "hi"}}]}, {"error": {"message": "it broke"}}]
    lines = [b"data: " + json.dumps(one).encode() + b"\n" for one in chunks]
    with pytest.raises(RequestError, match="it broke"):
        print_stream(read_sse(lines))
    assert capsys.readouterr().out == "hi"


def test_flags_that_would_mean_nothing_are_refused(capsys, server):
    for words in (
        ["--url", server.url, "--max-model-len", "9"],
        ["--api-key", "k"],
        ["--model-name", "x"],
    ):
        status, _, err = run(capsys, "chat", "-q", "hi", *words)
        assert status == 2, err
    with pytest.raises(ConfigError, match="--url must be like"):
        RemoteServer("ftp://x", None)


@pytest.mark.parametrize(
    "body", [{"error": {"message": "m"}}, {"error": "m"}, {"message": "m"}, "m"]
)
def test_error_bodies_of_any_form_are_read(body):
    assert error_message(body) == "m"
