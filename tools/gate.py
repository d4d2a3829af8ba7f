"""Fail on code that runs what comes from outside: by pickle, eval, a shell, a package index, ...

usage: python tools/gate.py [--rules]

A rule is about names and calls as Python's own parser sees them, whatever they are imported as.
Exceptions stand in tools/gate_allow.txt, each with its reason: "path rule: why"; one that nothing
needs any more is a fault, too.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
ALLOWED = "tools/gate_allow.txt"

RULES = {
    "pickle": "reading it runs code: send msgpack or JSON, keep safetensors",
    "eval": "text becomes code: parse it",
    "run-file": "a file becomes code: only what the operator names may",
    "torch.load": "without weights_only=True it is pickle",
    "yaml.load": "makes any object: yaml.safe_load",
    "shell": "a shell reads words again: give a list of words",
    "mktemp": "somebody else may take the name first: NamedTemporaryFile, mkdtemp",
    "trust": "remote code is trusted by who serves, never by us: pass the option on",
    "index": "a second package index may be asked for names that only the first should know",
    "fetch": "what is fetched by address goes through quire.http_fetch, which checks the address",
    "template": "templates run in quire.text.templates.jinja_sandbox, which has bounds",
}

MODULES = {
    **dict.fromkeys(("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal"), "pickle"),
    **dict.fromkeys(("shelve", "joblib", "jsonpickle", "multiprocessing"), "pickle"),
    **dict.fromkeys(("urllib.request", "http.client", "requests", "httpx", "aiohttp"), "fetch"),
    **dict.fromkeys(("urllib3", "ftplib"), "fetch"),
    "runpy": "run-file",
}
"""Modules that are not imported; so are those inside of them."""

NAMES = {
    **dict.fromkeys(("eval", "exec", "compile", "__import__"), "eval"),
    **dict.fromkeys(("os.system", "os.popen", "asyncio.create_subprocess_shell"), "shell"),
    **dict.fromkeys(("subprocess.getoutput", "subprocess.getstatusoutput"), "shell"),
    **dict.fromkeys(("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"), "yaml.load"),
    **dict.fromkeys(("torch.jit.load", "torch.package.PackageImporter"), "torch.load"),
    **dict.fromkeys(("pandas.read_pickle", "torch.multiprocessing"), "pickle"),
    "importlib.machinery.SourceFileLoader": "run-file",
    "tempfile.mktemp": "mktemp",
}
"""Names that are not used, whole: as they are imported from their module."""

ATTRIBUTES = {
    **dict.fromkeys(("recv_pyobj", "send_pyobj", "read_pickle", "to_pickle"), "pickle"),
    "exec_module": "run-file",
}
"""Names that are not used on any object."""

TEMPLATES = {"jinja2.Environment", "jinja2.Template", "jinja2.nativetypes.NativeEnvironment"}
SAFE_LOADERS = {"SafeLoader", "CSafeLoader"}
TEXTS = ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", "deploy/*", "deploy/**/*")
"""Files beside the code that say where packages come from."""
_SECOND_INDEX = re.compile("extra[-_]index[-_]url", re.IGNORECASE)


@dataclass(frozen=True)
class Fault:
    """A place that breaks a rule."""

    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}: {self.rule}: {RULES[self.rule]}"


class Reader(ast.NodeVisitor):
    """Reads one module; what breaks a rule is in `found`."""

    def __init__(self, path: str) -> None:
        self.found: list[Fault] = []
        self._path = path
        self._meaning: dict[str, str] = {}  # name in this module -> whole name

    def _fault(self, node: ast.AST, rule: str, what: str) -> None:
        self.found.append(Fault(self._path, node.lineno, rule, what))

    def read(self, tree: ast.Module) -> list[Fault]:
        for node in ast.walk(tree):  # first all imports: functions use names from below
            if isinstance(node, ast.Import):
                for one in node.names:
                    self._meaning[one.asname or one.name.split(".")[0]] = (
                        one.name if one.asname else one.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for one in node.names:
                    self._meaning[one.asname or one.name] = f"{node.module}.{one.name}"
        self.visit(tree)
        return self.found

    # -- imports ----------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            self._module(node, one.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module is None or node.level:
            return
        for one in node.names:
            if not self._module(node, f"{node.module}.{one.name}"):
                self._name(node, f"{node.module}.{one.name}")

    def _module(self, node: ast.AST, name: str) -> bool:
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            rule = MODULES.get(".".join(parts[:end]))
            if rule is not None:
                self._fault(node, rule, f"imports {name}")
                return True
        return False

    # -- names ------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._name(node, self._whole(node) or "")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        whole = self._whole(node)
        if node.attr in ATTRIBUTES:
            self._fault(node, ATTRIBUTES[node.attr], f"uses .{node.attr}")
        elif whole is None or not self._name(node, whole):
            self.visit(node.value)

    def _name(self, node: ast.AST, whole: str) -> bool:
        rule = NAMES.get(whole.removeprefix("builtins."))
        if rule is not None:
            self._fault(node, rule, f"uses {whole}")
        return rule is not None

    def _whole(self, node: ast.expr) -> str | None:
        """`yaml.load`, whatever yaml is imported as; None for what is no name."""
        if isinstance(node, ast.Name):
            return self._meaning.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            front = self._whole(node.value)
            return None if front is None else f"{front}.{node.attr}"
        return None

    # -- calls ------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        whole = self._whole(node.func) or ""
        said = {one.arg: one.value for one in node.keywords}
        if whole == "torch.load" and not _is(said.get("weights_only"), True):
            self._fault(node, "torch.load", "calls torch.load without weights_only=True")
        if whole in ("yaml.load", "yaml.load_all") and not self._loads_safely(node, said):
            self._fault(node, "yaml.load", f"calls {whole} without a safe loader")
        if "shell" in said and not _is(said["shell"], False):
            self._fault(node, "shell", "passes shell=")
        if "allow_pickle" in said and not _is(said["allow_pickle"], False):
            self._fault(node, "pickle", "passes allow_pickle=")
        if _is(said.get("trust_remote_code"), True):
            self._fault(node, "trust", "passes trust_remote_code=True")
        if whole in TEMPLATES:
            self._fault(node, "template", f"makes a {whole}")
        if whole in ("importlib.import_module", "__import__") and node.args:
            self._imported(node, node.args[0])
        if whole in ("getattr", "vars") and len(node.args) > 1 and _text(node.args[1]) in NAMES:
            self._fault(
                node, NAMES[str(_text(node.args[1]))], f"gets {_text(node.args[1])} by name"
            )
        self.generic_visit(node)

    def _imported(self, node: ast.AST, name: ast.expr) -> None:
        text = _text(name)
        if text is not None:
            self._module(node, text)

    def _loads_safely(self, node: ast.Call, said: dict[str | None, ast.expr]) -> bool:
        loader = said.get("Loader") or (node.args[1] if len(node.args) > 1 else None)
        return loader is not None and (self._whole(loader) or "").split(".")[-1] in SAFE_LOADERS

    # -- values -----------------------------------------------------------------------------------

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values):
            if key is not None and _text(key) == "trust_remote_code" and _is(value, True):
                self._fault(node, "trust", "says trust_remote_code: True")
        self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> None:
        positional = [*node.posonlyargs, *node.args]
        pairs = [
            *zip(positional[len(positional) - len(node.defaults) :], node.defaults),
            *zip(node.kwonlyargs, node.kw_defaults),
        ]
        for name, default in pairs:
            if name.arg == "trust_remote_code" and _is(default, True):
                self._fault(name, "trust", "trusts remote code by default")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned(node, node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assigned(node, [node.target], node.value)

    def _assigned(self, node: ast.stmt, targets: list[ast.expr], value: ast.expr | None) -> None:
        names = {(self._whole(one) or "").split(".")[-1] for one in targets}
        if "trust_remote_code" in names and _is(value, True):
            self._fault(node, "trust", "sets trust_remote_code to True")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _SECOND_INDEX.search(node.value):
            self._fault(node, "index", "names an extra package index")


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def faults_of(source: str, path: str) -> list[Fault]:
    """What breaks a rule in a module."""
    return Reader(path).read(ast.parse(source))


def text_faults_of(source: str, path: str) -> list[Fault]:
    """The same of a file that is no module."""
    return [
        Fault(path, number, "index", "names an extra package index")
        for number, line in enumerate(source.splitlines(), 1)
        if _SECOND_INDEX.search(line)
    ]


def all_faults(root: pathlib.Path) -> Iterator[Fault]:
    """Of a tree: its package, and what says where packages come from."""
    for path in sorted((root / "quire").rglob("*.py")):
        yield from faults_of(path.read_text(), str(path.relative_to(root)))
    found = {one for pattern in TEXTS for one in root.glob(pattern)}
    for path in sorted(one for one in found if one.is_file() and one.suffix != ".pyc"):
        yield from text_faults_of(path.read_text(), str(path.relative_to(root)))


def allowed(text: str) -> set[tuple[str, str]]:
    """(path, rule) of each exception. Raises ValueError for one without a reason."""
    found = set()
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        place, _, reason = line.partition(": ")
        path, _, rule = place.partition(" ")
        if rule not in RULES or not reason.strip():
            raise ValueError(f"{ALLOWED}: not 'path rule: why': {line}")
        found.add((path, rule))
    return found


def main() -> int:
    if "--rules" in sys.argv:
        print("\n".join(f"{name}: {why}" for name, why in RULES.items()))
        return 0
    exceptions = allowed((ROOT / ALLOWED).read_text())
    faults = list(all_faults(ROOT))
    needed = {(one.path, one.rule) for one in faults}
    bad = [str(one) for one in faults if (one.path, one.rule) not in exceptions]
    bad += [f"{ALLOWED}: nothing needs: {path} {rule}" for path, rule in exceptions - needed]
    print("\n".join(bad) if bad else f"gate: {len(exceptions)} exceptions, nothing else")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
