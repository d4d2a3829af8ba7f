"""Tiers, groups for pytest-xdist, and where the time is spent. docs/testing.md has the rules."""

import gc
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import hypothesis
import pytest

# Read when torch is imported. More threads than cores spin: two processes took thrice as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["COLUMNS"] = "100"  # argparse wraps help to the terminal
# httpx reads all authorities for each client: 30 ms. No test visits a host that they sign.
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
os.environ["SSL_CERT_FILE"] = ""

from tests import fork_server, late_imports, tiers, torchvision_wheel

# 5 s for clients that set no limit: too little where other processes of the suite are busy.
httpx._config.DEFAULT_TIMEOUT_CONFIG.read = 60.0

HERE = Path(__file__).parent
DURATIONS = HERE.parent / "build" / "durations.txt"
SHOWN = 40
LONGEST_S = 3.0
"""A test that takes longer has a marker `slow` with the reason."""


# No test depends on how busy the machine is.
hypothesis.settings.register_profile(
    "quire", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("quire")


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="the long tier: more rounds, more cases")


def pytest_configure(config):
    torchvision_wheel.install()
    late_imports.install()
    # Tests start hundreds of processes: without bytecode each compiles quire again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    tiers.LONG = config.getoption("--long")
    examples = tiers.amount(15, 1000)
    hypothesis.settings.register_profile("tier", max_examples=examples, deadline=None)
    hypothesis.settings.load_profile("tier")
    if not hasattr(config, "workerinput"):  # the one process that hears of every test
        config.pluginmanager.register(Durations(), "quire-durations")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Have no collection of garbage traverse all modules and all tests, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def often():
    """How many times as much is to be tried."""
    return tiers.amount(1, 20)


@pytest.fixture(scope="module")
def forked():
    """Processes that the module starts with Python are forks: tests/fork_server.py."""
    fork_server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", fork_server.Popen)
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Have one process run all tests of a group, in turn.

    Not by marks: xdist 3.8 writes them into node ids that pytest 9.2 does not read any more, and
    says nothing.
    """
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return GroupScheduling(config, log)


def pytest_collection_modifyitems(config, items):
    """Deselect the long tier, and put files in the order of order_of()."""
    if not tiers.LONG:
        daily = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=list({*items} - {*daily}))
        items[:] = daily
    for item in items:
        if hasattr(item.module, "serving"):
            item.add_marker(pytest.mark.slow("starts `quire serve`"))
    order = order_of({item.path: None for item in items})
    items.sort(key=lambda item: order[item.path])


SAMPLED = Counter()
"""Tests with the marker `sampled` so far, by file."""


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """In the everyday tier, of a test with the marker `sampled`, make some cases only."""
    yield
    test = metafunc.definition
    if tiers.LONG or (marker := test.get_closest_marker("sampled")) is None:
        return
    cases = [one for one in metafunc._calls if not any(mark.name == "long" for mark in one.marks)]
    if cases:  # a test without any would run without its arguments
        (every,) = marker.args
        runs = tiers.sample(values_of(cases), every, SAMPLED[test.path])
        metafunc._calls = [one for one, chosen in zip(cases, runs, strict=True) if chosen]
        SAMPLED[test.path] += 1


def values_of(cases):
    """Of each case of a test, its numbers on all axes.

    Arguments that one parametrization gives together have equal numbers, and are one axis.
    """
    axes = dict.fromkeys(tuple(one.indices[name] for one in cases) for name in cases[0].indices)
    return [*zip(*axes, strict=True)]


ONE_SERVER = {
    "test_forced_calls.py",
    "test_tools_end_to_end.py",
    "test_docs_run.py",
    "test_seeds.py",
}
"""Files of tests/server whose tests share the real servers of tests/server/conftest.py."""


RANKS_OF_GPUS = {
    "test_tp.py", "test_stages.py", "test_recurrent_ranks.py", "test_data_parallel_attention.py",
    "test_context_parallel.py",
}  # fmt: skip
"""Files of tests/gpu whose fixtures and tests start engines for minutes, by their first parameter."""


def group_of(nodeid):
    """The folder where one server is shared, else the file: its fixtures are made once. Of
    RANKS_OF_GPUS the tests of one value of the first parameter."""
    file, _, test = nodeid.partition("::")
    parts = Path(file).parts
    if parts[-2] == "gpu" and parts[-1] in RANKS_OF_GPUS:
        name, _, values = test.partition("[")
        return f"{file} {values.rstrip(']').partition('-')[0] or name}"
    if parts[-2] == "server" and parts[-1] in ONE_SERVER:
        return "real server"
    return next((folder for folder in ("abuse", "clients") if folder in parts), file)


FOLDERS = {"abuse": 0, "clients": 0, "server": 1, "cpu": 1, "pure": 2}
"""Order of the folders: what is long and cannot be cut first, so that the processes end together."""


def order_of(paths):
    """Key of each file: its folder, then its place among the files of that folder.

    So files of the server, whose tests mostly wait, and of tests/cpu, which compute, are mixed.
    """
    folders = {path: path.relative_to(HERE).parts[0] for path in paths}
    sizes, before = Counter(folders.values()), Counter()
    order = {}
    for path, folder in folders.items():
        order[path] = FOLDERS.get(folder, len(FOLDERS)), before[folder] / sizes[folder]
        before[folder] += 1
    return order


BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    item.stash[BEGAN] = processor_s()
    if marker := item.get_closest_marker("slow"):
        item.user_properties.append(("slow", marker.args[0]))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Note what the test took. Servers of the session, which end with the last one, are apart."""
    took = processor_s() - item.stash[BEGAN]
    out = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()  # engines in cycles, which would end within a test of another file
        gc.freeze()  # what is left is of modules: no collection need look at it again
    whole = processor_s() - item.stash[BEGAN]
    if nextitem is None:
        item.user_properties.append(("session_s", whole - took))
        whole = took
    item.user_properties.append(("processor_s", whole))
    return out


def processor_s():
    """Processor time of this process and of its children that have ended."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


SESSION = "tests/server/conftest.py"
"""Its servers: the only ones that tests of several files share."""


def budgets():
    """Seconds of the processor that the tests of each folder may take, by docs/testing.md."""
    page = (HERE.parent / "docs/testing.md").read_text(encoding="utf-8")
    return {name: float(s) for name, s in re.findall(r"^\| `(tests\S*)` \| (\d+) \|$", page, re.M)}


class Durations:
    """Writes the longest tests and files to build/durations.txt, and prints those without a reason.

    No test fails by its time: the first test on a fresh clone compiles the kernels, and machines differ.
    """

    def __init__(self):
        self.wall_s = {}
        self.processor_s = {}
        self.reasons = {}
        self.processes = {}  # of pytest-xdist, by group

    def pytest_runtest_logreport(self, report):
        name = report.nodeid
        if (node := getattr(report, "node", None)) is not None:
            group = group_of(name)
            self.processes.setdefault(group, set()).add(node.gateway.id)
        self.wall_s[name] = self.wall_s.get(name, 0.0) + report.duration
        if report.when == "teardown":
            noted = dict(report.user_properties)
            self.processor_s[name] = noted.get("processor_s", 0.0)
            self.reasons[name] = noted.get("slow", "")
            if session_s := noted.get("session_s"):
                self.processor_s[SESSION] = self.processor_s.get(SESSION, 0.0) + session_s
                self.reasons[SESSION] = "servers of the session"

    def split_groups(self):
        """Groups that ran in several processes, each with fixtures of its own."""
        return [group for group, processes in self.processes.items() if len(processes) > 1]

    def silent(self):
        """Tests that took too much of the processor and have no reason."""
        if tiers.LONG:
            return []
        slow = [name for name, took in self.processor_s.items() if took > LONGEST_S]
        return [name for name in slow if not self.reasons[name]]

    def folders(self):
        """(folder with a budget, seconds, budget). A test counts for the longest name that it has."""
        allowed = {"tests": 0.0} | budgets()
        took = dict.fromkeys(allowed, 0.0)
        for name, seconds in self.processor_s.items():
            within = [folder for folder in allowed if name.startswith(f"{folder}/")]
            took[max(within, key=len)] += seconds
        return [(folder, took[folder], allowed[folder]) for folder in allowed]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self.split_groups() and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        DURATIONS.parent.mkdir(exist_ok=True)
        with DURATIONS.open("w") as out:
            out.write("wall s  processor s  test: why it is slow\n")
            for name in sorted(self.wall_s, key=self.wall_s.get, reverse=True)[:SHOWN]:
                took = self.processor_s.get(name, 0.0)
                out.write(f"{self.wall_s[name]:6.1f} {took:12.1f}  {name}")
                out.write(f": {reason}\n" if (reason := self.reasons.get(name)) else "\n")
            files = Counter()
            for name, took in self.processor_s.items():
                files[name.partition("::")[0]] += took
            out.write(f"\nprocessor s of {sum(files.values()):.0f}  file\n")
            out.writelines(f"{took:11.1f}  {name}\n" for name, took in files.most_common(SHOWN))
            out.write("\nprocessor s  budget  folder\n")
            for folder, took, allowed in self.folders():
                out.write(f"{took:11.1f} {allowed:7.0f}  {folder}\n")

    def pytest_terminal_summary(self, terminalreporter):
        for group in self.split_groups():
            terminalreporter.write_line(f"SPLIT {group}: its tests ran in several processes")
        for name in self.silent():
            terminalreporter.write_line(
                f"SLOW {name}: {self.processor_s[name]:.1f} s of the processor: make it shorter, or "
                "give it a marker slow with the reason"
            )
        for folder, took, allowed in self.folders():
            if took > allowed and not tiers.LONG:
                terminalreporter.write_line(
                    f"OVER {folder}: its tests took {took:.0f} s of the processor, {allowed:.0f} are "
                    "its budget in docs/testing.md: build/durations.txt has the longest files"
                )
