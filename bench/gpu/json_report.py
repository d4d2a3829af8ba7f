"""Pytest plugin: prints a JSON line for each test that failed, and one with the counts at the end.

A run that is cut off still has a line with the counts so far, every 100 tests.
"""

import json
import time
from collections import Counter


class JsonReport:
    def __init__(self):
        self._began = time.time()
        self._counts = Counter()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self._counts[report.outcome] += 1
            if report.failed:
                text = str(report.longrepr)
                self._print({"failed": report.nodeid, "error": text[-800:]})
                print(text, flush=True)  # a run that is cut off prints no failures at its end
            elif self._counts.total() % 100 == 0:
                self._print({"so far": dict(self._counts)})

    def pytest_sessionfinish(self, exitstatus):
        self._print({"tests": dict(self._counts), "exit status": int(exitstatus)})

    def _print(self, line):
        print("\n" + json.dumps(line | {"s": round(time.time() - self._began, 1)}), flush=True)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the process that hears of every test
        config.pluginmanager.register(JsonReport(), "quire-json-report")
