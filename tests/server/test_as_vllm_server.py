"""The server under the names of another engine: a module that is run, and a function of scripts."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow("starts a server under its other name")

SCRIPT = """
import asyncio
from vllm.entrypoints.openai.api_server import run_server
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils import FlexibleArgumentParser
if __name__ == "__main__":
    args = make_arg_parser(FlexibleArgumentParser(description="a server")).parse_args()
    validate_parsed_serve_args(args)
    asyncio.run(run_server(args))
"""


@pytest.mark.long("tests/server/test_seeds.py starts the module every day")
@pytest.mark.parametrize("way", ["module", "script"])
def test_the_server_starts_and_ends_under_its_other_name(tmp_path, way):
    (tmp_path / "serve.py").write_text(SCRIPT)
    what = (
        ["-m", "vllm.entrypoints.openai.api_server"]
        if way == "module"
        else [str(tmp_path / "serve.py")]
    )
    command = [sys.executable, "-m", "quire.as_vllm", *what, "--model", "embedded", "--port", "0"]
    command += ["--served_model_name", "m", "--disable-log-requests"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("  curl "):
                break
        else:
            raise AssertionError("".join(said))
        assert '"model": "m"' in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
