"""The command line: `quire COMMAND`. A command is a module here with `main(argv) -> exit status`.

Only the chosen command is imported, so that help and errors appear at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from quire.log import open_missing_streams
from quire.platform import bytecode_cache

COMMANDS = {
    "serve": "start the OpenAI-compatible server",
    "chat": "chat with a model in the terminal, local or on a server",
    "complete": "complete lines of text, local or on a server",
    "generate": "complete prompts as one batch",
    "run-batch": "answer the requests of an OpenAI batch file",
    "plan": "show the memory a model needs, from config.json and tensor headers alone",
    "quantize": "write a quantized copy of a model: compressed-tensors or GGUF",
    "models": "list the known architectures and how each is served",
    "explain": "print every setting with its reason",
    "bench": "measure latency, throughput, start-up, or a running server",
    "key": "make a key for a server with a key file",
    "replay": "repeat or show the last steps of an engine that died",
    "cache": "show, pack and unpack compiled GPU kernels",
    "doctor": "check this machine, or all nodes of a cluster",
    "env": "print the environment: versions, machine, variables",
}
ALIASES = {"collect-env": "env"}
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    open_missing_streams()
    bytecode_cache.enable()  # before anything large is imported
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else MISUSED
    if words[0] in ("-v", "--version", "version"):
        import quire

        print(quire.__version__)
        return 0
    name = ALIASES.get(words[0], words[0])
    if name not in COMMANDS:
        print(unknown(name), file=sys.stderr)
        return MISUSED
    return run(name, words[1:])


def run(name: str, argv: Sequence[str]) -> int:
    """Import a command and run it; errors quire raises on purpose become one line."""
    from quire.config.vllm_environment import start_process
    from quire.errors import ConfigError, QuireError

    try:
        start_process()
        command = importlib.import_module(f"quire.cli.{name.replace('-', '_')}")
        return int(command.main(argv) or 0)
    except QuireError as error:
        message = in_flags(str(error)) if isinstance(error, ConfigError) else str(error)
        print(f"quire {name}: error: {message}", file=sys.stderr)
        return MISUSED if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
        sys.stderr.close()
        return FAILED


def in_flags(message: str) -> str:
    """Return an error about options in the words of the command line."""
    import dataclasses

    from quire.config.command_line.error_words import flags_in_message
    from quire.config.options import option_specs
    from quire.server.options import ServerOptions

    server = {one.name for one in dataclasses.fields(ServerOptions)}
    return flags_in_message(message, server | set(option_specs()))


def overview() -> str:
    """The text of `quire --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, about in COMMANDS.items()]
    return "\n".join(
        [
            "usage: quire COMMAND ...",
            "",
            "A high-throughput inference and serving engine for large language models.",
            "",
            *lines,
            "",
            "`quire COMMAND --help` has more; `quire --version` prints the version.",
        ]
    )


def unknown(name: str) -> str:
    """The error message for an unknown command."""
    import difflib

    near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"quire: no command {name!r}; {hint}"
