"""Bytecode of packages that have none is kept in quire's folder, and only there is it safe."""

import json
import os
import subprocess
import sys

import pytest

from quire import env
from quire.platform import bytecode_cache

LOOK = """
import json, sys
from quire.platform import bytecode_cache
before = sys.pycache_prefix, sys.dont_write_bytecode
with bytecode_cache.importing():
    import torch
after = sys.pycache_prefix, sys.dont_write_bytecode
print(json.dumps([*bytecode_cache.find_folder(), bytecode_cache.child_variables(), before == after],
                 default=str))
"""


@pytest.fixture
def packages(tmp_path):
    """Packages of which torch is one, without bytecode."""
    folder = tmp_path / "site"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("from torch import version\n")
    (folder / "torch" / "version.py").write_text("number = 1\n")
    (folder / "torch-1.0.dist-info").mkdir()
    return folder


def look(packages, code=LOOK, **variables):
    """What a new process sees: folder, reason, variables of children, whether all is restored."""
    told = {"PYTHONDONTWRITEBYTECODE": "1", "QUIRE_CACHE": str(packages.parent / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=env.child_environment(
            **told
            | {"PYTHONPATH": f"{packages}:{os.getcwd()}", "PYTHONPYCACHEPREFIX": ""}
            | variables
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_bytecode_is_kept_where_python_keeps_none(packages):
    folder, reason, variables, restored = look(packages)
    kept = f"{folder}{packages}/torch"
    names = {name.partition(".")[0] for name in os.listdir(kept)}
    assert names == {"__init__", "version"}
    assert restored
    assert reason == f"in {folder}: the packages have none"
    assert variables == {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert look(packages)[0] == folder
    assert not (packages / "torch" / "__pycache__").exists()


def test_other_versions_of_packages_have_another_folder(packages):
    # The time of a file in an image may be the same for all versions
    first = look(packages)[0]
    (packages / "torch-1.0.dist-info").rename(packages / "torch-1.1.dist-info")
    assert look(packages)[0] != first


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"QUIRE_BYTECODE_CACHE": "0"}, "switched off by QUIRE_BYTECODE_CACHE"),
        ({"PYTHONPYCACHEPREFIX": "/nowhere"}, "in /nowhere, by Python's own setting"),
        ({"PYTHONDONTWRITEBYTECODE": ""}, "beside the packages, once they are imported"),
    ],
)
def test_a_python_that_keeps_bytecode_is_left_alone(packages, variables, reason):
    assert look(packages, LOOK.replace("    import torch", "    pass"), **variables) == [
        None, reason, {}, True,
    ]  # fmt: skip


def test_packages_with_bytecode_are_left_alone(packages):
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(packages)], check=True)
    assert look(packages)[:2] == [None, "beside the packages"]
    assert not (packages.parent / "cache").exists()


@pytest.mark.parametrize("place", ["cache", "cache/bytecode"])
def test_a_folder_that_others_can_write_to_is_refused(packages, place):
    assert look(packages)[0] is not None
    (packages.parent / place).chmod(0o775)
    folder, reason, variables, _ = look(packages)
    assert folder is None
    assert variables == {}
    assert "other users may write" in reason


def test_a_cache_that_cannot_be_made_is_no_error(packages):
    (packages.parent / "cache").write_text("")
    folder, reason, _, _ = look(packages)
    assert folder is None
    assert reason.startswith("nowhere: ")


def test_old_folders_are_removed(packages):
    for minor in range(6):
        for one in packages.glob("*-info"):
            one.rename(packages / f"torch-1.{minor}.dist-info")
        last = look(packages)[0]
    kept = os.listdir(packages.parent / "cache" / "bytecode")
    assert len(kept) == bytecode_cache.KEPT_FOLDERS
    assert os.path.basename(last) in kept


def test_imports_in_two_threads_restore_what_was_before(packages):
    code = """
import contextlib, json, sys, threading
from quire.platform import bytecode_cache
before = sys.pycache_prefix, sys.dont_write_bytecode
first, second = bytecode_cache.importing(), bytecode_cache.importing()
first.__enter__(), second.__enter__()
first.__exit__(None, None, None)
within = sys.pycache_prefix
second.__exit__(None, None, None)
print(json.dumps([within is not None, before == (sys.pycache_prefix, sys.dont_write_bytecode)]))
"""
    assert look(packages, code) == [True, True]


def test_a_command_and_its_children_use_the_folder(packages):
    (packages / "child.py").write_text(
        "import socket, sys\n"
        "def main(fd): socket.socket(fileno=fd).send((sys.pycache_prefix or '').encode())\n"
    )
    code = """
import contextlib, io, json, socket, sys
from quire import cli, env
from quire.engine.supervise.process_pipe import spawn_process
with contextlib.redirect_stdout(io.StringIO()):
    cli.main(["--version"])
found = [sys.pycache_prefix]
for variables in (None, env.sandbox_environment()):
    ours, theirs = socket.socketpair()
    spawn_process("child", theirs, env=variables).wait()
    found.append(ours.recv(4096).decode())
print(json.dumps(found))
"""
    command, child, sandboxed = look(packages, code)
    assert command
    assert command == child == sandboxed
