"""Methods of the core's types."""

from __future__ import annotations

from quire.core.types import Update
from quire.errors import EngineError, RequestError


def test_a_terminal_update_has_an_exception_for_its_fault():
    ours = Update("a", 0, (), "error", error="device lost").to_exception()
    assert isinstance(ours, EngineError)
    assert "device lost" in str(ours)
    theirs = Update("a", 0, (), "error", error="too deep", fault="request", param="max_tokens")
    error = theirs.to_exception()
    assert isinstance(error, RequestError)
    assert (str(error), error.param) == ("too deep", "max_tokens")
