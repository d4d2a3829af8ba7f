"""Triton's kernels run in its interpreter here. Triton reads the variable at its import."""

import os
import sys

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module", autouse=True)
def forked_media_workers():
    """Media workers of engines in this process are forks of one: tests/media starts them."""
    from quire.engine.startup import text_setup
    from tests.fork_server import spawn_media_worker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_setup, "spawn_process", spawn_media_worker)
        yield
