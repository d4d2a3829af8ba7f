"""quire env: prints what a bug report needs. Does not import torch; versions come from metadata."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from quire import env
from quire.config import vllm_environment
from quire.config.memory.memory_plan import gib
from quire.errors import ConfigError
from quire.platform import bytecode_cache, cpu, cuda

PACKAGES = (
    "quire-llm",
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
    found = build_report()
    if parser.parse_args(argv).json:
        print(json.dumps(found, indent=2))
        return 0
    for section, rows in found.items():
        print(section)
        for name, value in rows.items():
            print(f"  {name:<18} {value}")
    return 0


def build_report() -> dict[str, dict[str, str]]:
    """Return section -> name -> value."""
    memory = cpu.memory()
    machine = {
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "processor": _describe_cpu(),
        "threads": str(cpu.available_cores()),
        "memory": f"{gib(memory.total)}, {gib(memory.free)} available",
        "gpu": _describe_gpu(),
        "bytecode": bytecode_cache.find_folder()[1],
    }
    packages = {name: _version(name) for name in PACKAGES}
    variables = dict(env.describe()) | {
        name: _describe_variable(name) for name in sorted(env.vllm_variables())
    }
    return {"machine": machine, "packages": packages, "variables": variables}


def _describe_variable(name: str) -> str:
    """Describe a vLLM variable that is set: its value, and its effect."""
    value = env.vllm_variables()[name]
    if name in vllm_environment.VARIABLE_TO_OPTION:
        return f"{value}: --{vllm_environment.VARIABLE_TO_OPTION[name].replace('_', '-')}"
    if name in vllm_environment.READ:
        return "(set)" if "KEY" in name else f"{value}: in use"
    why = (vllm_environment.NO_EFFECT | vllm_environment.UNSUPPORTED).get(name)
    if why is None and not vllm_environment.is_known(name):
        return f"{value}: unknown name"
    return f"{value}: no effect" + (f", {why}" if why else "")


def _describe_gpu() -> str:
    """Return the device that device="cuda" would use, or why there is none."""
    try:
        found = cuda.device_properties()
    except ConfigError as error:
        return str(error).removeprefix("device='cuda': ").partition(";")[0]
    major, minor = found.capability
    memory = f"{gib(found.total_bytes)}, {gib(cuda.memory().free)} free"
    return f"{found.name} (sm{major}{minor}), {memory}; {found.device_count} visible"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _describe_cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            models = (line.partition(":")[2].strip() for line in lines if "model name" in line)
            return next(models, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()
