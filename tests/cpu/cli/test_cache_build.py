"""`quire cache build` compiles what `quire serve` and LLM() look for: a manifest of each."""

import pytest

from quire.cli import cache

pytest.importorskip("triton")


@pytest.fixture
def tasks(monkeypatch, tmp_path):
    found = []
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_run_build", lambda task: not found.append(task))
    return found


def test_a_server_and_llm_have_a_manifest_each(tasks, capsys):
    assert cache.main(["build", "embedded", "--gpu", "h200"]) == 0
    served, offline = tasks
    assert served.manifest != offline.manifest
    budgets = [task.config.scheduler.max_num_batched_tokens for task in (served, offline)]
    assert budgets[0] < budgets[1]
    assert "all kernels of this model are in" in capsys.readouterr().out


def test_a_failure_is_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_run_build", lambda task: False)
    assert cache.main(["build", "embedded", "--gpu", "h200"]) == 1
    assert "cannot be compiled" in capsys.readouterr().err
