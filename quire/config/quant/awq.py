"""Reads quant_method "awq" (AutoAWQ, GPTQModel, auto-round).

Source: https://github.com/casper-hansen/AutoAWQ, https://arxiv.org/abs/2306.00978
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from quire.config.quant.facts import QuantFacts, WeightFormat, unquantized
from quire.config.quant.fields import Json, read_names, refuse_unknown, require_value
from quire.config.quant.gptq import AUTO_ROUND_FIELDS, read_flag, read_group
from quire.config.quant.held import MatrixFacts, group_bits
from quire.errors import ConfigError

LAYOUTS = {"gemm": "gemm", "exllama": "gemm", "ipex": "gemm", "gemv": "gemv"}
"""version -> layout of the tensors; exllama and ipex are kernels that read those of gemm."""
_UNREAD = ("gemv_fast", "llm-awq", "marlin")

_INFORMATIVE = """quant_method method meta backend do_fuse fuse_max_seq_len modules_to_fuse
    exllama_config model_name_or_path block_name_to_quantize damp_percent true_sequential
    static_groups pack_impl offload_to_disk offload_to_disk_path mse sym data_type act_bits"""
_READ = """bits w_bit group_size q_group_size zero_point version format checkpoint_format
    modules_to_not_convert lm_head desc_act dynamic pack_dtype"""
_KNOWN = frozenset([*_INFORMATIVE.split(), *_READ.split()]) | AUTO_ROUND_FIELDS


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqFormat(WeightFormat):
    """Integers in int32 words, with a scale and a zero per output and group of inputs."""

    method: ClassVar[str] = "awq"
    bits: int = 4
    layout: str  # "gemm": words hold outputs; "gemv": words hold inputs
    group: int  # inputs that share a scale; 0: all of them
    symmetric: bool  # zeros may be absent, and are then in the middle
    head: bool = False  # the output head is quantized, too

    def stored_size(self, matrix: MatrixFacts) -> tuple[int, int]:
        rows, columns = matrix.tensor("qweight").shape
        per = 32 // self.bits
        return (rows, columns * per) if self.layout == "gemv" else (columns * per, rows)

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        group = math.gcd(self.group or matrix.inputs, matrix.inputs)
        numbers = matrix.float_bits("scales") + 8 * (not self.symmetric)
        return group_bits(self.bits, group, numbers, matrix.inputs, device)


def read(found: Json) -> QuantFacts:
    """Read the configuration. Raises ConfigError."""
    at = "quantization_config"
    refuse_unknown(at, found, _KNOWN)
    version = found.get("version") or found.get("format") or found.get("checkpoint_format")
    layout = str(version or "gemm").lower()
    if layout in _UNREAD or found.get("backend") == "llm-awq":
        raise ConfigError(
            f"config.json: {at} has AWQ weights of version {layout!r} (backend "
            f"{found.get('backend')!r}), which quire does not read; use a checkpoint of version "
            "gemm, which nearly all are"
        )
    require_value(f"{at}.version", layout, *LAYOUTS)
    bits = found.get("bits", found.get("w_bit"))
    require_value(f"{at}.bits", bits, *((4, 8) if LAYOUTS[layout] == "gemm" else (4,)))
    require_value(f"{at}.desc_act", found.get("desc_act"), None, False)
    require_value(f"{at}.dynamic", found.get("dynamic"), None, {})
    require_value(f"{at}.act_bits", found.get("act_bits"), None, 16, 32)
    pack_dtype = str(found.get("pack_dtype") or "int32").removeprefix("torch.")
    require_value(f"{at}.pack_dtype", pack_dtype, "int32")
    size = "group_size" if "group_size" in found else "q_group_size"
    stored = AwqFormat(
        bits=int(bits),
        layout=LAYOUTS[layout],
        group=read_group(found, at, size, 128),
        symmetric=not read_flag(found, at, "zero_point", True),
        head=read_flag(found, at, "lm_head", False),
    )
    if stored.layout == "gemv" and stored.group not in (0, 32, 64) and stored.group < 128:
        raise ConfigError(
            f"config.json: {at}.{size} is {stored.group}; version gemv has groups of 32, 64, or "
            "128 and more"
        )
    rules = unquantized(read_names(found, "modules_to_not_convert"))
    return QuantFacts(quant_method="awq", rules=rules, default=stored)
