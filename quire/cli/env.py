"""quire env: what to put in a bug report. No torch is imported; versions come from metadata."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from quire import env
from quire.config import environment
from quire.config.plan import gib
from quire.errors import ConfigError
from quire.platform import cpu, cuda

PACKAGES = (
    "quire",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "fastapi",
    "uvicorn",
    "uvloop",
    "pyzmq",
    "msgspec",
    "flash-attn-3",
    "flash-attn",
    "opentelemetry-sdk",
    "openai",
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="quire env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="as JSON")
    found = report()
    if parser.parse_args(argv).json:
        print(json.dumps(found, indent=2))
        return 0
    for section, rows in found.items():
        print(section)
        for name, value in rows.items():
            print(f"  {name:<18} {value}")
    return 0


def report() -> dict[str, dict[str, str]]:
    """Section -> name -> value."""
    memory = cpu.memory()
    machine = {
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "processor": _processor(),
        "threads": str(cpu.threads()),
        "memory": f"{gib(memory.total)}, {gib(memory.free)} available",
        "gpu": _gpu(),
    }
    packages = {name: _version(name) for name in PACKAGES}
    variables = dict(env.describe()) | {name: _fate(name) for name in sorted(env.foreign())}
    return {"machine": machine, "packages": packages, "variables": variables}


def _fate(name: str) -> str:
    """A variable of another engine that is set: its value, and what it means here."""
    value = env.foreign()[name]
    if name in environment.OPTIONS:
        return f"{value}: --{environment.OPTIONS[name].replace('_', '-')}"
    if name in environment.READ:
        return "(set)" if "KEY" in name else f"{value}: heard"
    why = (environment.WITHOUT | environment.MISSED).get(name)
    if why is None and not environment.is_known(name):
        return f"{value}: nobody knows it"
    return f"{value}: no effect" + (f", {why}" if why else "")


def _gpu() -> str:
    """The device that device="cuda" would use, or why there is none."""
    try:
        found = cuda.facts()
    except ConfigError as error:
        return str(error).removeprefix("device='cuda': ").partition(";")[0]
    major, minor = found.capability
    memory = f"{gib(found.total_bytes)}, {gib(cuda.memory().free)} free"
    return f"{found.name} (sm{major}{minor}), {memory}; {found.count} visible"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            models = (line.partition(":")[2].strip() for line in lines if "model name" in line)
            return next(models, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()
