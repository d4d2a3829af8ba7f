"""`pytest tests/pure/tools tests/pure/binding --long` tries many more texts."""

from tests.pure.tools.conftest import often  # noqa: F401
