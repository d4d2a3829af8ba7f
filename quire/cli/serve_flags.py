"""Flags of `quire serve`: one for each field of ServerOptions and of Options.

Does not import the server or the engine, so that help and errors appear at once.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from quire import env
from quire.config import structured_outputs, vllm_environment
from quire.config.command_line.option_parser import (
    OptionParser,
    add_boolean_flag,
    add_options,
    metavar,
    options_from,
    takes_tuple,
)
from quire.config.options import ModelOptions, Options
from quire.config.values import coerce
from quire.errors import ConfigError, RequestError
from quire.server.options import ABOUT as ABOUT_GROUPS
from quire.server.options import GROUPS, ServerOptions

log = logging.getLogger(__name__)

FLAG_ALIASES = {
    "api_server_count": ("-asc",),
    "chat_template_content_format": ("--chat-template-text-format",),
}
"""Further names of a flag."""
NO_OP_FLAGS = {
    "--disable-uvicorn-access-log": "The default; see --access-log.",
}
"""Flags of other engines that name the default."""
REPEATED = ("middleware",)
"""Flags whose values accumulate when given several times."""
SIZE_UNITS = {"max_body_bytes": "bytes", "h11_max_incomplete_event_size": "bytes"}
MAX_INT = 2**31
RANGES = {
    "port": (0, 65535),
    "api_server_count": (1, 256),
    "api_watchdog_seconds": (0, MAX_INT),
    "max_body_bytes": (1, MAX_INT * MAX_INT),
    "max_recording_seconds": (1, 7200),
    "keep_alive_timeout": (0, MAX_INT),
    "h11_max_incomplete_event_size": (1024, MAX_INT * MAX_INT),
    "h11_max_header_count": (1, MAX_INT),
    "shutdown_timeout": (0, MAX_INT),
    "ssl_cert_reqs": (0, 2),
    "stream_interval": (1, MAX_INT),
    "sse_keep_alive_interval": (0, MAX_INT),
    "responses_store_size": (1, MAX_INT),
    "log_stats_interval": (0, MAX_INT),
    "max_log_len": (0, MAX_INT),
}

ABOUT = """Start the OpenAI-compatible server.

The address is bound first, so that a port in use is reported before weights are read. Then the
engine starts, and requests are answered until SIGINT or SIGTERM. Running requests may then take
up to --shutdown-timeout seconds. An engine that dies is restarted (--max-engine-restarts).
"""


def parse(argv: Sequence[str]) -> tuple[Options, ServerOptions]:
    """Return the options of engine and server from a command line and the environment."""
    return options_from_namespace(serve_parser().parse_args(argv))


def options_from_namespace(args: argparse.Namespace) -> tuple[Options, ServerOptions]:
    """The same for a parsed command line. Other names in it are ignored. Raises ConfigError."""
    server_options = server_options_from(_apply_structured_output_flags(args))
    if server_options.log_format == "json":
        vllm_environment.start_process(style="json")  # notes on other flags are then JSON too
    own = {one.name for one in fields(ServerOptions)}
    others = {name: value for name, value in vars(args).items() if name not in own}
    options = vllm_environment.apply_environment(options_from(argparse.Namespace(**others)))
    vllm_environment.log_notes(strict=options.observe.fail_on_environ_validation)
    return options, server_options


def _apply_structured_output_flags(args: argparse.Namespace) -> argparse.Namespace:
    """Return the parsers given in structured_outputs_config and reasoning_config, as flags."""
    found = vars(args).copy()
    for option, given in (
        ("structured_outputs_config", _structured_parsers(found)),
        ("reasoning_config", _reasoning_config(found)),
    ):
        for name in ("reasoning_parser", "reasoning_parser_plugin"):
            value = given.get(name)
            if value and found.setdefault(name, value) != value:
                raise ConfigError(f"{name} is also in {option} and differs: give one")
    return argparse.Namespace(**found)


def _structured_parsers(flags: Mapping[str, Any]) -> dict[str, Any]:
    given = flags.get("structured_outputs_config")
    if given is None:
        return {}
    given = coerce("structured_outputs_config", dict, given)
    return asdict(structured_outputs.parse_structured_config(given))


_REASONING_KEYS = ("reasoning_parser", "reasoning_start_str", "reasoning_end_str")


def _reasoning_config(flags: Mapping[str, Any]) -> dict[str, Any]:
    given = flags.get("reasoning_config")
    if given is None:
        return {}
    found: dict[str, Any] = coerce("reasoning_config", dict, given)
    for key, value in found.items():
        if key not in _REASONING_KEYS:
            known = ", ".join(_REASONING_KEYS)
            raise ConfigError(f"reasoning_config has no key {key!r}; allowed are {known}")
        if not isinstance(value, str | None):
            raise ConfigError(f"reasoning_config.{key} must be a string, got {value!r:.80}")
    return found


def check_files(model: ModelOptions) -> None:
    """Check now what would otherwise fail seconds later, or at the first request.

    Raises ConfigError for a folder or a chat template that is missing or invalid.
    """
    name = model.model
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().exists():
        raise ConfigError(f"no model at {name!r}")
    template = model.chat_template
    if template is None or (template.isidentifier() and not Path(template).is_file()):
        return  # none, or the name of one of the tokenizer's templates
    from quire.text.templates.chat_template import ChatTemplate, load_chat_template

    try:
        ChatTemplate(str(load_chat_template(template)))
    except RequestError as error:
        raise ConfigError(str(error)) from None


def serve_parser() -> OptionParser:
    """Return the parser of `quire serve`."""
    parser = OptionParser(prog="quire serve", usage="%(prog)s [MODEL] [options]")
    parser.description = ABOUT
    return add_serve_flags(parser)


def add_serve_flags(parser: OptionParser) -> OptionParser:
    """Add the model and every flag of the server and of the engine."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    add_server_options(parser)
    add_options(parser)
    return parser


def add_server_options(parser: argparse.ArgumentParser, only: Sequence[str] = ()) -> None:
    """Add a flag for each field of ServerOptions. Those not given are absent from the namespace.

    only: the groups that a command uses.
    """
    hints, about = get_type_hints(ServerOptions), _read_field_docs(ServerOptions)
    for title in only or GROUPS:
        names = GROUPS[title]
        group = parser.add_argument_group(f"{title} options", ABOUT_GROUPS[title])
        for name in names:
            _add_flag(group, name, hints[name], about[name].replace("%", "%%"))
    for flag, text in NO_OP_FLAGS.items() if not only else ():
        group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)


def _add_flag(group: argparse._ArgumentGroup, name: str, hint: object, about: str) -> None:
    flags = [f"--{name.replace('_', '-')}", *FLAG_ALIASES.get(name, ())]
    default = ServerOptions.__dataclass_fields__[name].default
    if hint is bool:
        on = " Default: on." if default is True else ""
        add_boolean_flag(group, flags, name, about + on)
        return
    shown = default not in (None, (), "", MISSING)
    group.add_argument(
        *flags,
        dest=name,
        nargs="+" if takes_tuple(hint) else None,
        action="extend" if name in REPEATED else "store",
        default=argparse.SUPPRESS,
        metavar=metavar(name, hint),
        help=f"{about} Default: {_format_default(default)}." if shown else about,
    )


def _format_default(default: object) -> str:
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def server_options_from(args: argparse.Namespace) -> ServerOptions:
    """Return ServerOptions of a parsed command line. Raises ConfigError."""
    hints = get_type_hints(ServerOptions)
    values = (
        vllm_environment.options_from_environment(env.vllm_variables())
        | {"api_key": env.read().api_key or ""}
        | vars(args)
    )
    given = {name: value for name, value in values.items() if name in hints}
    options = ServerOptions(
        **{name: coerce(name, hints[name], v, SIZE_UNITS.get(name)) for name, v in given.items()}
    )
    for name, (low, high) in RANGES.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            allowed = f"in [{low}, {high}]" if high < MAX_INT else f">= {low}"
            raise ConfigError(f"{name} must be {allowed}, got {value}")
    _check_combinations(options)
    keys = tuple(key for key in options.api_key if key)
    if "api_key" in vars(args) and not keys:
        log.warning("--api-key is empty, so the server needs no key: is a variable not set?")
    return replace(options, api_key=keys)


def _check_combinations(options: ServerOptions) -> None:
    """Check flags that need each other, and files that must exist."""
    if options.ssl_certfile is None and (options.ssl_keyfile or options.ssl_ca_certs):
        raise ConfigError("ssl_keyfile and ssl_ca_certs need ssl_certfile")
    if options.ssl_cert_reqs and options.ssl_ca_certs is None:
        raise ConfigError(f"ssl_cert_reqs={options.ssl_cert_reqs} needs ssl_ca_certs")
    if options.otlp_traces_endpoint is not None:
        from quire.server.telemetry.tracing import check_otlp_endpoint

        check_otlp_endpoint(options.otlp_traces_endpoint)
    for name in options.middleware:
        if not name.replace(":", ".").rpartition(".")[0]:
            raise ConfigError(f"middleware must be module:name, got {name!r}")
    _check_parsers(options)
    if options.fingerprint_mode == "custom" and not options.fingerprint_value:
        raise ConfigError("fingerprint_mode='custom' needs fingerprint_value")
    if options.api_server_count > 1 and options.enable_responses_store:
        message = "enable_responses_store keeps answers in one process; use api_server_count=1"
        raise ConfigError(message)
    folder = options.lora_resolver_folder
    if folder is not None and not Path(folder).expanduser().is_dir():
        raise ConfigError(f"lora_resolver_folder must be a folder, got {folder!r}")
    for one in options.lora_resolver_repos:
        if not re.fullmatch(r"[\w.\-]+/[\w.\-]+", one, re.ASCII):
            raise ConfigError(f"lora_resolver_repos must be ORG/NAME, got {one!r}")


def _check_parsers(options: ServerOptions) -> None:
    """Check that the parsers exist and their flags are complete. "auto" is checked with the
    model."""
    if options.enable_auto_tool_choice and options.tool_call_parser is None:
        raise ConfigError("enable_auto_tool_choice needs tool_call_parser (a name, or auto)")
    if options.reasoning_parser_plugin is not None and options.reasoning_parser is None:
        raise ConfigError("reasoning_parser_plugin needs reasoning_parser: a name in it, or auto")
    if options.tool_parser_plugin is not None and options.tool_call_parser is None:
        raise ConfigError("tool_parser_plugin needs tool_call_parser: a name in it, or auto")
    if options.tool_call_parser is not None and not options.enable_auto_tool_choice:
        log.warning("tool_call_parser has no effect without enable_auto_tool_choice")
    if options.reasoning_parser is not None and options.reasoning_parser != "auto":
        from quire.text.reasoning import select as reasoning

        found = reasoning.select_reasoning_format(
            options.reasoning_parser, None, options.reasoning_parser_plugin
        )
        start, end = (options.reasoning_config.get(key) or "" for key in _REASONING_KEYS[1:])
        reasoning.check_reasoning_marks(found, start, end, "reasoning_config")
    if options.tool_call_parser is not None and options.tool_call_parser != "auto":
        from quire.text.tools import select as tools

        tools.select_tool_parser(options.tool_call_parser, plugin=options.tool_parser_plugin)


def _read_field_docs(kind: type) -> dict[str, str]:
    """Return field -> the docstring under it."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef), node
    found: dict[str, str] = {}
    for target, text in zip(node.body, node.body[1:]):
        if isinstance(target, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(target.target, ast.Name), target.target
            assert isinstance(text.value, ast.Constant), f"{target.target.id} has no docstring"
            found[target.target.id] = " ".join(str(text.value.value).split())
    return found
