"""tools/gate.py: each rule sees what it is for, however it is spelled, and nothing else."""

import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _gate():
    spec = importlib.util.spec_from_file_location("gate", ROOT / "tools/gate.py")
    made = sys.modules["gate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


gate = _gate()

PLANTED = {
    "pickle": [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import cloudpickle",
        "import dill",
        "import marshal",
        "import shelve",
        "from joblib import load",
        "import _pickle",
        "from multiprocessing import Pipe",
        "from torch import multiprocessing",
        "import importlib\nimportlib.import_module('pickle')",
        "from importlib import import_module\nimport_module('dill')",
        "socket.recv_pyobj()",
        "import numpy\nnumpy.load(f, allow_pickle=True)",
        "def f():\n    import pickle",
    ],
    "eval": [
        "eval(text)",
        "exec(text)",
        "compile(text, 'a', 'exec')",
        "__import__('os')",
        "import builtins\nbuiltins.eval(text)",
        "from builtins import exec as run\nrun(text)",
        "how = eval",
        "getattr(module, 'eval')(text)",
    ],
    "run-file": ["import runpy", "spec.loader.exec_module(made)"],
    "torch.load": [
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import torch as t\nt.load(f)",
        "from torch import load\nload(f, map_location='cpu')",
        "import torch\ntorch.load(f, weights_only=asked)",
        "import torch\ntorch.jit.load(f)",
    ],
    "yaml.load": [
        "import yaml\nyaml.load(f)",
        "import yaml\nyaml.load(f, yaml.Loader)",
        "import yaml\nyaml.load(f, Loader=yaml.FullLoader)",
        "from yaml import load as read\nread(f)",
        "import yaml\nyaml.unsafe_load(f)",
    ],
    "shell": [
        "import subprocess\nsubprocess.run(c, shell=True)",
        "from subprocess import Popen\nPopen(c, shell=asked)",
        "import os\nos.system(c)",
        "from os import popen\npopen(c)",
        "import subprocess\nsubprocess.getoutput(c)",
        "import asyncio\nasyncio.create_subprocess_shell(c)",
    ],
    "mktemp": ["import tempfile\ntempfile.mktemp()", "from tempfile import mktemp"],
    "trust": [
        "load(folder, trust_remote_code=True)",
        "options = {'trust_remote_code': True}",
        "def f(trust_remote_code: bool = True): ...",
        "def f(a, b=1, *, trust_remote_code=True): ...",
        "class A:\n    trust_remote_code: bool = True",
        "self.trust_remote_code = True",
    ],
    "index": ["words = ['pip', '--extra-index-url', url]", "import os\nx = 'PIP_EXTRA_INDEX_URL'"],
    "fetch": [
        "import urllib.request",
        "from urllib.request import urlopen",
        "from urllib import request",
        "import requests",
        "import httpx",
        "import http.client",
    ],
    "template": [
        "import jinja2\njinja2.Environment()",
        "from jinja2 import Template\nTemplate(text)",
        "from jinja2.nativetypes import NativeEnvironment\nNativeEnvironment()",
    ],
}
FINE = """
import re, subprocess, tempfile, torch, yaml
from urllib.parse import urlsplit
from jinja2.sandbox import ImmutableSandboxedEnvironment
import jinja2

class Compiler:
    def compile(self, form): return self.inner.compile(form)

model.eval()
re.compile("a")
torch.compile(model)
torch.load(f, weights_only=True, mmap=True)
yaml.safe_load(f)
yaml.load(f, Loader=yaml.CSafeLoader)
subprocess.run(["ls"], shell=False)
tempfile.mkdtemp()
load(f, trust_remote_code=said.trust_remote_code)
def g(trust_remote_code: bool = False): ...
def run(template: jinja2.Template): ...
ImmutableSandboxedEnvironment()
"""


@pytest.mark.parametrize(
    ("rule", "code"), [(rule, code) for rule, codes in PLANTED.items() for code in codes]
)
def test_what_is_planted_is_seen(rule, code):
    assert {one.rule for one in gate.faults_of(code, "a.py")} == {rule}


def test_similar_text_is_unchanged():
    assert gate.faults_of(FINE, "a.py") == []


def test_every_rule_is_planted():
    assert set(PLANTED) == set(gate.RULES)


def test_a_second_index_is_seen_in_files_that_are_no_code():
    found = gate.text_faults_of(
        "RUN pip install x \\\n  --extra-index-url https://b\n", "Dockerfile"
    )
    assert [(one.line, one.rule) for one in found] == [(2, "index")]


def test_bytecode_beside_the_files_is_not_read(tmp_path):
    (tmp_path / "deploy/__pycache__").mkdir(parents=True)
    (tmp_path / "deploy/__pycache__/healthcheck.cpython-311.pyc").write_bytes(b"\xa7\r\r\n")
    (tmp_path / "deploy/Dockerfile").write_text("RUN pip install --extra-index-url https://b\n")
    assert [one.path for one in gate.all_faults(tmp_path)] == ["deploy/Dockerfile"]


@pytest.mark.long("make check runs it")
def test_the_tree_has_no_fault_but_those_with_a_reason(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gate.py"])
    assert gate.main() == 0, capsys.readouterr().out


def test_an_exception_needs_a_reason_and_a_use(capsys, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="why"):
        gate.allowed("quire/a.py pickle:")
    (tmp_path / "tools").mkdir()
    (tmp_path / "quire").mkdir()
    (tmp_path / "quire/a.py").write_text("import pickle\n")
    (tmp_path / "tools/gate_allow.txt").write_text("quire/a.py eval: because\n")
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gate.py"])
    assert gate.main() == 1
    said = capsys.readouterr().out
    assert "quire/a.py:1: imports pickle" in said
    assert "nothing needs: quire/a.py eval" in said
