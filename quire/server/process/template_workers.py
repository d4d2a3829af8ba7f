"""Template workers: the sandboxed processes that render chat templates which requests bring."""

from __future__ import annotations

import socket
import subprocess

from quire import env
from quire.engine.supervise.process_pipe import spawn_process
from quire.text.templates.render_pool import TemplateRenderPool


def build_template_workers() -> TemplateRenderPool:
    """The workers of one API process."""
    return TemplateRenderPool(_start_template_worker)


def _start_template_worker() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        worker = spawn_process(
            "quire.text.templates.render_worker", theirs, env=env.sandbox_environment()
        )
    return worker, ours
