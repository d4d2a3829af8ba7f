"""Finding, building and doing without the compiled kernels."""

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

from quire import env
from quire.kernels.add import add
from quire.kernels.linear import pack
from quire.kernels.native import library as loader
from quire.platform import native_build as build


@pytest.fixture
def source(tmp_path):
    """A library that compiles at once."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    if not any(build.shutil.which(name) for name in build.COMPILERS):
        pytest.skip("no compiler")
    return build.NativeSource("answer", folder)


@pytest.fixture
def afresh():
    """As in a new process: the library has not been looked for."""
    loader.load_library.cache_clear()
    yield
    loader.load_library.cache_clear()


def test_it_is_built_once_and_left_without_rubbish(source, tmp_path, monkeypatch):
    built = source.find_or_build(tmp_path)
    monkeypatch.setattr(build, "_compile", None)
    assert source.find_or_build(tmp_path) == built
    assert sorted(p.suffix for p in built.parent.iterdir()) == [".lock", ".so"]


def test_another_source_flag_or_cpu_is_another_library(source, tmp_path, monkeypatch):
    names = [
        source.find_or_build(tmp_path).name,
        source.find_or_build(tmp_path, extra=("-O1",)).name,
    ]
    (source.folder / "simd.h").write_text("// new")
    names.append(source.find_or_build(tmp_path).name)
    monkeypatch.setattr(build, "_cpu_features", lambda: ("another",))
    names.append(source.find_or_build(tmp_path).name)
    assert len(set(names)) == 4


def test_one_that_came_with_the_install_is_preferred(source, tmp_path, monkeypatch):
    shipped = source.build_into(source.folder / "prebuilt")
    monkeypatch.setattr(build, "_compile", None)
    assert source.find_or_build(tmp_path) == shipped


def test_two_at_once_build_once(source, tmp_path, monkeypatch):
    real, calls = build._compile, []
    monkeypatch.setattr(build, "_compile", lambda *a: (calls.append(1), real(*a)))
    threads = [threading.Thread(target=source.find_or_build, args=(tmp_path,)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls) == 1


def test_a_source_that_does_not_compile_is_reported_and_leaves_nothing(source, tmp_path):
    (source.folder / "answer.cpp").write_text("not C++")
    with pytest.raises(build.NativeBuildError, match="failed"):
        source.find_or_build(tmp_path)
    assert not list(tmp_path.rglob("*.so"))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_cache_that_cannot_be_written_is_reported(source, tmp_path):
    (tmp_path / "native").write_text("a file in the way")
    with pytest.raises(build.NativeBuildError, match="cannot write"):
        source.find_or_build(tmp_path)


@pytest.mark.usefixtures("afresh")
def test_without_a_compiler_one_line_is_logged_and_the_references_run(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    unbuilt = build.KERNELS._replace(flags=("-DANOTHER",))  # no other library is built for it
    monkeypatch.setattr(loader, "KERNELS", unbuilt)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    weight = torch.randn(8, 8)
    with caplog.at_level(logging.INFO, "quire"):
        assert pack(weight) is weight
        assert torch.equal(add(weight, weight), weight + weight)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    for word in ("no C++ compiler", "many times slower", "install g++"):
        assert word in caplog.text


@pytest.mark.usefixtures("afresh")
def test_a_library_that_cannot_be_loaded_is_warned_of(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_NATIVE", "1")
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(build.NativeSource, "find_or_build", lambda *given: broken)
    assert not loader.available()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "kernels.so" in caplog.text


def test_the_kernels_are_loaded_where_a_compiler_is_found():
    settings = env.read()
    if settings.cpu_isa == "none":
        pytest.skip("QUIRE_CPU_ISA=none: the references are used")
    if not any(build.shutil.which(name) for name in build.COMPILERS):
        pytest.skip("no compiler")
    build.KERNELS.find_or_build(settings.cache_dir, settings.cpu_isa)  # raises the compiler's error
    assert loader.available()


@pytest.mark.usefixtures("afresh")
def test_the_environment_can_turn_the_kernels_off(monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_ISA", "none")
    assert not loader.available()


def test_the_environment_names_the_instruction_set(source, tmp_path, monkeypatch):
    has = "flags : sse2 avx2 fma bmi2"
    monkeypatch.setattr(build, "_cpu_features", lambda: ("x86_64", has))
    names = {source.find_or_build(tmp_path, isa).name for isa in ("native", "avx2", "sse2")}
    assert len(names) == 3
    with pytest.raises(
        build.NativeBuildError, match="this CPU cannot run avx512: it has no avx512f"
    ):
        source.find_or_build(tmp_path, "avx512")
    with pytest.raises(
        build.NativeBuildError, match="unknown instruction set 'mmx'; known: native, "
    ):
        source.find_or_build(tmp_path, "mmx")


@pytest.mark.usefixtures("afresh")
def test_an_instruction_set_that_cannot_run_is_warned_of(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_CPU_ISA", "mmx")
    with caplog.at_level(logging.INFO, "quire"):
        assert not loader.available()
    assert [r.levelname for r in caplog.records] == ["WARNING"]


@pytest.mark.usefixtures("native_one")
def test_nothing_is_loaded_at_import_and_a_forked_child_has_threads_of_its_own():
    code = (
        "import os, signal, torch; from quire.kernels.linear import linear, pack\n"
        "import quire.kernels.native.library as library\n"
        "assert library.load_library.cache_info().currsize == 0\n"
        "w, x = pack(torch.randn(512, 512)), torch.randn(64, 512)\n"
        "want = linear(x, w)\n"
        "pid = os.fork()\n"
        "signal.alarm(30)\n"  # a child that waits for threads it has not must not outlive us
        "ok = torch.equal(linear(x, w), want)\n"
        "if pid == 0: os._exit(not ok)\n"
        "assert ok and os.waitpid(pid, 0)[1] == 0\n"
    )
    env = _with({"OMP_NUM_THREADS": "2"})
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, env=env)


@pytest.mark.usefixtures("native_one")
def test_callers_in_two_threads_get_their_own_results_and_an_idle_pool_burns_no_processor():
    # The sleeps are the subject here: processor time over a stretch of doing nothing.
    code = (
        "import threading, time, torch; from quire.kernels.linear import linear, pack\n"
        "bad = []\n"
        "def work(seed):\n"
        "    g = torch.Generator().manual_seed(seed)\n"
        "    w, x = torch.randn(512, 512, generator=g), torch.randn(64, 512, generator=g)\n"
        "    p, want = pack(w), None\n"
        "    for _ in range(20):\n"
        "        got = linear(x, p)\n"
        "        want = got if want is None else want\n"
        "        if not torch.equal(got, want): bad.append(seed)\n"
        "    if not torch.allclose(want, x @ w.T, atol=1e-3): bad.append(seed)\n"
        "threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert not bad, bad\n"
        "time.sleep(0.05); before = time.process_time(); time.sleep(0.5)\n"
        "assert time.process_time() - before < 0.1\n"
    )
    env = _with({"OMP_NUM_THREADS": "2"})
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, env=env)


def _with(more):
    """The environment of this process, with more."""
    return {**os.environ, **more}
