"""Logs of a process, and the environment variables that set them."""

import errno
import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire import env, log
from quire.config import vllm_environment
from quire.config.options import Options, option_specs
from quire.errors import ConfigError


def python(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", code], env=env.child_environment(**variables), capture_output=True, text=True, check=False
    )  # fmt: skip


SAY = "from quire.config.vllm_environment import start_process as s; import logging; s(); logging.getLogger('quire.x')"


def test_the_level_comes_from_either_variable():
    assert "here" in python(f"{SAY}.debug('here')", VLLM_LOGGING_LEVEL="debug").stderr
    said = python(f"{SAY}.debug('here')", VLLM_LOGGING_LEVEL="debug", QUIRE_LOGGING_LEVEL="INFO")
    assert "here" not in said.stderr


@pytest.mark.parametrize(
    ("given", "threads"), [("4", 4), ("4,2", 4), (" 3 , 1", 3), ("", None), ("many", None)]
)
def test_the_first_number_of_threads_counts(given, threads, monkeypatch):
    """OpenMP reads a list: a number for each level of nested regions."""
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert env.read().num_threads == threads


def test_an_unknown_level_is_refused():
    assert "must be one of CRITICAL" in python(SAY, QUIRE_LOGGING_LEVEL="loud").stderr


def test_logging_can_be_left_to_the_user_or_sent_elsewhere(tmp_path):
    assert "here" not in python(f"{SAY}.info('here')", VLLM_CONFIGURE_LOGGING="0").stderr
    variables = {"VLLM_LOGGING_STREAM": "ext://sys.stdout", "VLLM_LOGGING_PREFIX": "100% "}
    assert python(f"{SAY}.info('here')", **variables).stdout.startswith("100% INFO")
    path = tmp_path / "l.json"
    path.write_text(json.dumps({"version": 1, "root": {"level": "CRITICAL"}}))
    assert python(f"{SAY}.info('here')", VLLM_LOGGING_CONFIG_PATH=str(path)).stderr == ""
    path.write_text("{")
    assert "cannot set up logging from" in python(SAY, VLLM_LOGGING_CONFIG_PATH=str(path)).stderr


def test_json_lines_hold_what_came_with_extra():
    code = "from quire import log; import logging; log.setup(style='json')\n"
    code += "logging.getLogger('quire.x').info('hi %s', 'you', extra={'request_id': 'r1'})"
    found = json.loads(python(code).stderr)
    assert (
        found.items()
        >= {"level": "INFO", "logger": "quire.x", "message": "hi you", "request_id": "r1"}.items()
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["time"])


def test_json_lines_hold_the_traceback():
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.makeLogRecord({"exc_info": sys.exc_info()})
    assert "ValueError: broken" in json.loads(log.JsonLinesFormatter().format(record))["error"]


def test_a_second_setup_changes_the_first():
    code = "from quire import log; import logging\nlog.setup('ERROR'); log.setup('INFO', style='json')\n"
    code += "logging.getLogger('quire.x').info('once')"
    assert len(python(code).stderr.splitlines()) == 1


def test_calls_are_traced_to_a_file_that_is_named():
    code = "from quire.config.vllm_environment import start_process as s; s()\n"
    code += "from quire.core.params import SamplingParams; SamplingParams(top_k=3)"
    said = python(code, VLLM_TRACE_FUNCTION="1").stderr
    path = Path(re.search(r"written to (\S+\.log):", said)[1])
    lines = path.read_text().splitlines()
    path.unlink()
    assert any(re.search(r" Call to \w+ in .*core/params.py:\d+ from ", line) for line in lines)
    assert any(" Return from " in line for line in lines)


def test_there_are_at_most_ten_variables_of_our_own():
    text = Path(env.__file__).read_text()
    assert len(set(re.findall(r'"(QUIRE_[A-Z_]+)"', text))) <= 10


def test_the_key_is_not_shown(monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    assert dict(env.describe())["api_key"] == "(set)"


def test_each_foreign_variable_has_one_meaning():
    tables = [
        vllm_environment.VARIABLE_TO_OPTION,
        vllm_environment.READ,
        vllm_environment.NO_EFFECT,
        vllm_environment.UNSUPPORTED,
    ]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))


def test_foreign_variables_set_options_that_are_not_given(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    said = vllm_environment.apply_environment(
        Options.from_flat({"cpu_kvcache_space": 3, "max_num_seqs": 5})
    )
    assert said.non_default() == {"cpu_kvcache_space": 3.0, "max_num_seqs": 5, "device": "cpu"}
    assert {n for n in vllm_environment.VARIABLE_TO_OPTION.values() if n in option_specs()} >= {
        "device"
    }


def test_unknown_variables_are_one_warning_that_names_the_nearest(caplog, monkeypatch):
    monkeypatch.setenv("VLLM_LOGING_LEVEL", "x")
    monkeypatch.setenv("VLLM_NONSENSE", "x")
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    with caplog.at_level(logging.INFO, "quire"):
        vllm_environment.log_notes()
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert line == (
        "unknown environment variables: VLLM_LOGING_LEVEL (did you mean VLLM_LOGGING_LEVEL?), VLLM_NONSENSE"
    )
    with pytest.raises(ConfigError, match="unknown environment"):
        vllm_environment.log_notes(strict=True)


def test_own_variables_that_nothing_reads_are_named_too(caplog, monkeypatch):
    """QUIRE_APIKEY would leave a server without a key."""
    monkeypatch.setenv("QUIRE_APIKEY", "secret")
    monkeypatch.setenv("QUIRE_CACHE", "/tmp")
    for name in ("QUIRE_SERVICE_HOST", "QUIRE_ROUTER_PORT_8000_TCP_ADDR", "QUIRE_PORT"):
        monkeypatch.setenv(name, "10.0.0.1")  # Kubernetes sets them for services of these names
    with caplog.at_level(logging.INFO, "quire"):
        vllm_environment.log_notes()
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "unknown environment variables: QUIRE_APIKEY (did you mean QUIRE_API_KEY?)"
    ]


def test_the_list_of_own_variables_is_complete():
    source = Path(env.__file__).read_text().partition("\nSECRETS = ")[2]
    read = set(re.findall(r'"(QUIRE_[A-Z_]+)"', source))
    assert read == env.QUIRE_VARIABLES


def test_what_is_missed_is_a_warning_unless_it_is_off():
    assert [
        level for level, _ in vllm_environment.describe_variables({"VLLM_BATCH_INVARIANT": "1"})
    ] == [logging.WARNING]
    assert list(vllm_environment.describe_variables({"VLLM_BATCH_INVARIANT": "0"})) == []


class Full(io.StringIO):
    """As a file on a disk without room."""

    encoding = "utf-8"

    def write(self, text):
        raise OSError(errno.ENOSPC, "no room")

    def flush(self):
        self.write("")


def test_unprintable_log_text_is_dropped_without_an_error():
    lossy = log.BestEffortStream(Full())
    print("a word", file=lossy, flush=True)
    assert lossy.write("four") == 4
