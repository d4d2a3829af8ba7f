"""The pages are true: their code runs, against one server as `quire serve` starts it.

The address in the pages is replaced by the server's. Python blocks of a page share their names, shell
blocks their folder, as a reader's terminal would.
"""

import argparse
import contextlib
import doctest
import importlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings

import pytest

from quire import cli
from quire.cli import serve_flags
from quire.config.command_line.option_parser import OptionParser
from tests.doc_blocks import PAGES, ROOT, all_blocks, blocks, commands

pytestmark = pytest.mark.slow("runs what every page of the documents shows, each in a process")

ADDRESS = "http://127.0.0.1:8000"
CLIENTS = sorted((ROOT / "examples/clients").iterdir())
READING = {"tool_calls.py", "reasoning.py"}
"""Those whose server has to read thoughts and calls."""
ASKED = "What is the capital of France?\n\n"
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def url(real_server):
    return real_server.url


def run_python(text, names, where):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, where, "exec"), names)
    return said.getvalue()


def run_shell(text, folder):
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        check=False, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def quire_words(text):
    """The words behind `quire`, of a block that is one command and starts no server. Else None."""
    first, _, shown = text.strip().partition(" ")
    alone = first == "quire" and not re.search(r"[|&;<>$\n]", shown)
    return shlex.split(shown) if alone and not shown.startswith("serve") else None


def run_quire(words):
    """Run a command of quire in this process. Returns (exit status, output, errors)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(words)
    return status, out.getvalue(), err.getvalue()


def run_block(block, text, names, folder):
    """What it printed. A block that is to fail must, and say why."""
    if block.kind == "python":
        try:
            said, failed = run_python(text, names, block.where), False
        except Exception as error:  # noqa: BLE001 - whatever the block raises is what it says
            said, failed = f"{type(error).__name__}: {error}", True
    elif (words := quire_words(text)) is not None:
        status, out, err = run_quire(words)
        failed = status != 0
        said = out + (err if failed else "")
    else:
        done = run_shell(text, folder)
        failed = done.returncode != 0
        said = done.stdout + (done.stderr if failed else "")
    if block.mark == "fails":
        assert block.note in said, f"{block.where} should say {block.note!r}: {said}"
    else:
        assert not failed, f"{block.where}: {said}"
    return said


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_runs_and_prints_what_it_says(page, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, said = {"__name__": "page"}, ""
    for block in blocks(page):
        text = block.text.replace(ADDRESS, url)
        if block.mark in ("run", "fails"):
            said = run_block(block, text, names, tmp_path).replace(url, ADDRESS)
        elif block.mark == "prints":
            want, got = f"{block.text.strip()}\n", f"{said.strip()}\n"
            good = doctest.OutputChecker().check_output(want, got, SAME)
            assert good, f"{block.where} shows\n{block.text}\nbut it was\n{said}"


class Parsed(Exception):
    """The words were taken; nothing more need happen."""


def parse(words):
    """Give words to quire's own parser; SystemExit or ConfigError if it does not take them."""
    if words[0] == "serve":
        try:
            serve_flags.parse(words[1:])
        except SystemExit as end:  # --help ends well
            if end.code:
                raise
        return
    module = importlib.import_module(f"quire.cli.{cli.ALIASES.get(words[0], words[0])}")
    with pytest.MonkeyPatch.context() as patch:
        for kind in (argparse.ArgumentParser, OptionParser):
            patch.setattr(kind, "parse_args", stopping(kind.parse_args))
        with pytest.raises(Parsed):
            module.main(words[1:])


def stopping(parse_args):
    def parse_and_stop(self, *args, **kwargs):
        parse_args(self, *args, **kwargs)
        raise Parsed

    return parse_and_stop


INLINE = [
    (page, found)
    for page in PAGES
    for found in re.findall(r"`((?:[A-Z_]+=\S+ )?quire \w[^`]*)`", (ROOT / page).read_text())
    if "..." not in found and found.partition("quire ")[2] not in cli.COMMANDS
]
SHOWN = [block for block in all_blocks() if block.kind == "sh" and block.mark == "shown"]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.where)
def test_a_command_that_is_only_shown_is_one_that_quire_takes(block):
    for words in commands(block.text):
        parse(words)


@pytest.mark.parametrize(("page", "command"), INLINE)
def test_a_command_in_a_sentence_is_one_that_quire_takes(page, command):
    for words in commands(command):
        parse(words)


@pytest.fixture(scope="module")
def reading_url(reading_server):
    return reading_server.url


EITHER = [path for path in CLIENTS if path.name not in READING]
SERVED = [(path, "url") for path in EITHER] + [(path, "reading_url") for path in CLIENTS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("path", "fixture"), SERVED, ids=[f"{path.name}-{name}" for path, name in SERVED]
)
def test_an_example_of_a_client_gets_an_answer(path, fixture, request, monkeypatch, capsys):
    """Also on the server that the examples of thoughts and calls need: readers start one."""
    url = request.getfixturevalue(fixture)
    if path.suffix != ".py":
        run = subprocess.run(
            [str(path), url], capture_output=True, text=True, check=False, timeout=60
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip()
        return
    monkeypatch.setattr(sys, "argv", [str(path), url])
    monkeypatch.setattr(sys, "stdin", io.StringIO(ASKED))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_each_example_is_told_of():
    page = (ROOT / "examples/README.md").read_text()
    assert all(f"`clients/{path.name}`" in page for path in CLIENTS)


def test_the_example_of_a_batch_is_answered_line_by_line(tmp_path):
    batch, answered = ROOT / "examples/batch/requests.jsonl", tmp_path / "answers.jsonl"
    words = ["run-batch", "-i", str(batch), "-o", str(answered), "--model", "embedded"]
    status, _, err = run_quire(words)
    assert status == 0, err
    answers = [json.loads(line) for line in answered.read_text().splitlines()]
    asked = [json.loads(line) for line in batch.read_text().splitlines()]
    assert [one["custom_id"] for one in answers] == [one["custom_id"] for one in asked]
    assert all(one["response"]["status_code"] == 200 for one in answers)
