"""`pytest tests/pure/tools --long` tries twenty times as many splits and texts."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="many more splits and made-up texts")


@pytest.fixture
def often(request):
    """How many times as much is to be tried."""
    return 20 if request.config.getoption("--long", default=False) else 1
