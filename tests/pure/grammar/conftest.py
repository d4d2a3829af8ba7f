"""How much is tried: as for readers of tool calls."""

from tests.pure.tools.conftest import often  # noqa: F401
