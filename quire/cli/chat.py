"""quire chat [MODEL]: chat with a model in this process, or with --url on a server.

/help lists the commands. A line that ends in \\ continues on the next. Ctrl-C ends an
answer, Ctrl-D the chat.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from quire.cli.generation_result import GenerationResult
from quire.cli.remote_server import RemoteServer, add_server_flags, print_stream, server_from_args
from quire.cli.sampling import (
    add_sampling_flags,
    has_max_tokens,
    params_from_args,
    parse_value,
    quiet_engine_options,
    request_fields,
)
from quire.config.command_line.option_parser import OptionParser, add_options, options_from
from quire.core.params import SamplingParams
from quire.errors import ConfigError, RequestError

HELP = """/help             show this list
/clear            clear the conversation
/system TEXT      start again with this system prompt ("" for none)
/set NAME VALUE   change a sampling parameter: temperature, top_p, max_tokens, ...
/retry            generate the last answer again
/stats            show or hide the speed after each answer
/exit             quit (also Ctrl-D)"""


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    variables = _template_variables(args)
    server = server_from_args(args)
    speaker = (
        _build_local_backend(args, variables)
        if server is None
        else RemoteBackend(server, args, variables)
    )
    session = ChatSession(speaker, system=args.system_prompt, stats=args.stats)
    if args.quick is not None:
        return session.send(args.quick)
    return _read_eval_loop(session)


def parser() -> OptionParser:
    """Return the parser of `quire chat`."""
    parser = OptionParser(prog="quire chat", usage="%(prog)s [MODEL] [options]")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send one message, print the answer")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system prompt")
    parser.add_argument("--stats", action="store_true", help="show the speed after each answer")
    parser.add_argument("--chat-template-kwargs", metavar="JSON", help="variables of the template")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="turn reasoning on or off, if the chat template has enable_thinking",
    )
    add_server_flags(parser)
    add_sampling_flags(parser)
    add_options(parser)
    return parser


def _template_variables(args: argparse.Namespace) -> dict[str, Any]:
    try:
        found = json.loads(args.chat_template_kwargs or "{}")
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("--chat-template-kwargs must be a JSON object")
    if args.thinking is not None:
        found["enable_thinking"] = args.thinking
    return found


class ChatBackend(Protocol):
    """A model or a server that generates answers."""

    def generate(self, messages: Sequence[dict[str, str]]) -> GenerationResult:
        """Print the answer to a conversation, and return it."""
        ...

    def set_param(self, name: str, value: str) -> None:
        """Change a sampling parameter. Raises RequestError."""
        ...


class LocalBackend:
    """A model in this process. Its answers are parsed as the chat template marks reasoning."""

    def __init__(self, llm: Any, params: SamplingParams, variables: dict[str, Any]) -> None:
        from quire.text.output.answer_parser import ParserOptions, build_answer_parser_factory

        llm.check_generates()
        self._llm = llm
        self._parsers = build_answer_parser_factory(
            ParserOptions(reasoning="auto"), llm.get_tokenizer(), llm.chat_template
        )
        self._params = params
        self._variables = variables
        self._count = 0

    def generate(self, messages: Sequence[dict[str, str]]) -> GenerationResult:
        from quire.cli.stream_output import stream_to_stdout
        from quire.text.output.answer_parser import PromptTail

        template = self._llm.get_tokenizer().template(self._llm.chat_template)
        prompt = str(template.render(messages, variables=self._variables))
        self._count += 1
        params, parser = self._params.clone(), None
        if self._parsers is not None:
            params.skip_special_tokens = False  # they may mark reasoning
            parser = self._parsers.create(PromptTail(prompt, "", self._variables), None)
        return stream_to_stdout(
            self._llm.llm_engine,
            prompt,
            params,
            request_id=f"chat-{self._count}",
            add_special_tokens=False,
            parser=parser,
        )

    def set_param(self, name: str, value: str) -> None:
        changed = self._params.clone()
        setattr(changed, name, parse_value(name, value))
        changed.verify()
        self._params = changed


def _build_local_backend(args: argparse.Namespace, variables: dict[str, Any]) -> LocalBackend:
    from quire.llm import LLM

    llm = LLM.from_engine_args(options_from(args, quiet_engine_options(args)))
    params = params_from_args(args, llm.get_default_sampling_params())
    if not has_max_tokens(args, llm):
        params.max_tokens = None  # an answer may be as long as the context allows
    return LocalBackend(llm, params, variables)


class RemoteBackend:
    """A model that a server runs."""

    def __init__(
        self, server: RemoteServer, args: argparse.Namespace, variables: dict[str, Any]
    ) -> None:
        self._server = server
        name = args.model_name or args.model_tag
        self._body = {"model": server.resolve_model(name), **request_fields(args)}
        self._body["stream_options"] = {"include_usage": True}
        if variables:
            self._body["chat_template_kwargs"] = variables

    def generate(self, messages: Sequence[dict[str, str]]) -> GenerationResult:
        body = {**self._body, "messages": list(messages)}
        return print_stream(self._server.stream("/chat/completions", body))

    def set_param(self, name: str, value: str) -> None:
        self._body[name] = parse_value(name, value)


class ChatSession:
    """One conversation: its messages and its backend."""

    def __init__(self, speaker: ChatBackend, *, system: str | None, stats: bool) -> None:
        self._backend = speaker
        self._shows_stats = stats
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Clear all messages except the system prompt."""
        system = {"role": "system", "content": self._system or ""}
        self._messages = [system] if self._system else []

    def send(self, text: str) -> int:
        """Send a message, print the answer, keep both. Returns an exit status."""
        self._messages.append({"role": "user", "content": text})
        try:
            answer = self._backend.generate(self._messages)
        except RequestError:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": answer.text})
        if self._shows_stats:
            print(answer.stats.format_line(), file=sys.stderr)
        return 130 if answer.stats.finish_reason == "abort" else 0

    def retry(self) -> None:
        """Generate the last answer again."""
        if len(self._messages) < 2:
            raise RequestError("there is no message to answer again")
        self._messages.pop()
        self.send(self._messages.pop()["content"])

    def run_command(self, line: str) -> bool:
        """Execute a /command. Returns False to end the chat."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("exit", "quit", "bye"):
            return False
        if name == "clear":
            self.clear()
        elif name == "system":
            self._system = rest.strip('"') or None
            self.clear()
        elif name == "set":
            self._backend.set_param(*rest.partition(" ")[::2])
        elif name == "retry":
            self.retry()
        elif name == "stats":
            self._shows_stats = not self._shows_stats
        else:
            print(HELP)
        return True


def _read_eval_loop(session: ChatSession) -> int:
    """Read messages and answer them until the end of input."""
    if sys.stdin.isatty():
        enable_line_editing()
        print("Type a message; /help lists commands, Ctrl-D quits.", file=sys.stderr)
    while True:
        try:
            line = read_message()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if not line.strip():
            continue
        try:
            if not line.startswith("/"):
                session.send(line)
            elif not session.run_command(line):
                return 0
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)


def read_message() -> str:
    """Read one message: a line, or several joined by a \\ at the end."""
    prompt = "> " if sys.stdin.isatty() else ""
    line = input(prompt)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input("… " if prompt else "")
    return line


def enable_line_editing() -> None:
    """Enable arrow keys and history, where the platform has them."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it is what turns it on
