"""Libraries whose import takes a second of each test process, and which hardly a test uses."""

import functools
import importlib
import importlib.util
import sys
import types


def install():
    """jsonschema imports the parser of IRIs, whose grammar is prepared then: now with the first."""
    if importlib.util.find_spec("rfc3987_syntax"):
        late = types.ModuleType("rfc3987_syntax")
        late.is_valid_syntax = lambda term, value: _syntax().is_valid_syntax(term, value)
        sys.modules[late.__name__] = late


@functools.cache
def _syntax():
    del sys.modules["rfc3987_syntax"]
    return importlib.import_module("rfc3987_syntax")
