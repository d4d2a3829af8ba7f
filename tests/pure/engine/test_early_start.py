"""What a start begins before torch is imported, and the seconds it reports."""

import os

import pytest

from quire.config.options import Options
from quire.engine.startup import early_start
from quire.engine.startup.early_start import DRIVER, begin_startup, early_rank_count
from quire.engine.startup.startup_timer import (
    CONCURRENT_PREFIX,
    StartupTimer,
    format_server_start,
    process_age,
)
from quire.platform import cuda, library_pages


@pytest.fixture
def begun(monkeypatch):
    """The slow work that was started."""
    calls = []
    monkeypatch.setattr(cuda, "available", lambda: calls.append("driver"))
    monkeypatch.setattr(library_pages, "read_ahead", lambda ranks: calls.append("pages"))
    monkeypatch.setattr(early_start, "start_early_ranks", lambda n: calls.append(f"{n} ranks"))
    monkeypatch.setattr(cuda, "has_driver", lambda: False)
    return calls


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_the_driver_starts_before_any_import(begun, device):
    with begin_startup(device) as timer:
        timer.wait_for(DRIVER)
    assert sorted(begun) == ["driver", "pages"]
    assert next(iter(timer.seconds())) == "CUDA driver wait"
    assert CONCURRENT_PREFIX + DRIVER in timer.seconds()


def test_processes_of_ranks_start_first(begun, monkeypatch):
    with begin_startup("auto", ranks=3):
        pass
    assert begun[0] == "3 ranks"


@pytest.mark.parametrize(
    ("device", "driver", "count"), [("auto", True, 3), ("auto", False, 0), ("cpu", True, 0)]
)
def test_processes_of_ranks_start_where_there_is_a_driver(device, driver, count, monkeypatch):
    monkeypatch.setattr(cuda, "has_driver", lambda: driver)
    options = Options.from_flat({"model": "m", "device": device, "tensor_parallel_size": 4})
    assert early_rank_count(options) == count


def test_a_start_on_the_cpu_leaves_the_driver_alone(begun):
    with begin_startup("cpu") as timer:
        timer.wait_for(DRIVER)
    assert begun == []
    assert timer.seconds() == {}


def test_an_error_of_concurrent_work_is_raised_where_it_is_waited_for():
    with StartupTimer() as timer:
        timer.run_concurrently("bad", lambda: (_ for _ in ()).throw(ValueError("broken")))
        with pytest.raises(ValueError, match="broken"):
            timer.wait_for("bad")


def test_the_time_before_is_that_of_the_process_unless_it_only_waited():
    with StartupTimer() as timer, StartupTimer(0.0) as standby:
        assert 0 < timer.seconds_before <= process_age()
        assert standby.seconds_before == 0


def test_the_line_of_a_server_adds_up():
    seconds = {"imports": 1.0, "weights": 2.0, CONCURRENT_PREFIX + "tokenizer": 9.0}
    assert format_server_start(4.0, seconds, 0.25) == (
        "ready 4.00 s after the command started: "
        "before 0.75, imports 1.00, weights 2.00, opening 0.25"
    )


def test_libraries_are_read_in_the_order_of_their_use(tmp_path, monkeypatch):
    names = ["torch/lib/libtorch_cpu.so", "torch/lib/libtorch_cuda.so", "torch/lib/libother.so",
             "nvidia/cu13/lib/libcublasLt.so.13", "nvidia/cu13/lib/libcublas.so.13",
             "nvidia/nccl/lib/libnccl.so.2"]  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    read = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *rest: read.append(os.pread(fd, 100, 0).decode())
    )
    source = str(tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(library_pages, "torch_source", lambda: source)
    library_pages.read_ahead()
    assert read == [*names[:2], *sorted(names[3:5])]
    read.clear()
    library_pages.read_ahead(ranks=True)
    assert read == [*names[:2], names[5], *sorted(names[3:5])]


def test_a_torch_for_the_cpu_is_not_read_ahead(tmp_path, monkeypatch):
    (tmp_path / "torch/lib").mkdir(parents=True)
    (tmp_path / "torch/lib/libtorch_cpu.so").write_text("")
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: pytest.fail("it was read"))
    for source in (str(tmp_path / "torch" / "__init__.py"), None):
        monkeypatch.setattr(library_pages, "torch_source", lambda: source)  # noqa: B023
        library_pages.read_ahead()
