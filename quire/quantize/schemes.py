"""Schemes: how compressed-tensors stores a quantized matrix, and what config.json says of it.

Source: https://github.com/vllm-project/compressed-tensors. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quire.config.quant.ggml_mixes import MIXES
from quire.errors import ConfigError

BLOCK = 128
BITS = (2, 3, 4, 5, 6, 8)

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Name of a tensor beside its module -> (dtype as safetensors names it, shape)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way to store matrices [O, I]."""

    name: str
    format: str
    bits: int
    kind: str = "int"  # or "float"
    group: int = 0  # inputs that share a scale; 0: all
    block: int = 0  # side of the squares that share a scale
    symmetric: bool = True
    activations: str | None = None  # quantized in the same way, per "token" or "group"

    @property
    def strategy(self) -> str:
        """The scheme's name for which weights share a scale."""
        if self.format.startswith("nvfp4"):
            return "tensor_group"
        return "block" if self.block else "group" if self.group else "channel"

    def refusal(self, outputs: int, inputs: int, *, fused: bool) -> str | None:
        """Return why a matrix cannot be stored so; None: it can.

        fused: it is multiplied as one with others.
        """
        if self.block and fused and outputs % self.block:
            return f"{outputs} outputs of a fused layer are not whole blocks of {self.block}"
        if self.group and inputs % self.group:
            return f"{inputs} inputs are not whole groups of {self.group}"
        if self.format.endswith("fp4-pack-quantized") and inputs % 2:
            return f"{inputs} inputs do not fill bytes"
        return None

    def layout(self, shape: tuple[int, ...], dtype: str) -> Layout:
        """Return the tensors of a matrix. dtype: of the unquantized one."""
        outputs, inputs = shape
        groups = -(-inputs // self.group) if self.group else 1
        if self.format == "pack-quantized":
            found: Layout = {
                "weight_packed": ("I32", (outputs, words(inputs, self.bits))),
                "weight_scale": (dtype, (outputs, groups)),
                "weight_shape": ("I64", (2,)),
            }
            if not self.symmetric:
                found["weight_zero_point"] = ("I32", (words(outputs, self.bits), groups))
            return found
        if self.format == "int-quantized":
            return {"weight": ("I8", (outputs, inputs)), "weight_scale": (dtype, (outputs, 1))}
        if self.format == "float-quantized":
            blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK)) if self.block else (outputs, 1)
            return {"weight": ("F8_E4M3", (outputs, inputs)), "weight_scale": ("F32", blocks)}
        scale = "F8_E4M3" if self.strategy == "tensor_group" else "U8"
        found = {
            "weight_packed": ("U8", (outputs, inputs // 2)),
            "weight_scale": (scale, (outputs, groups)),
        }
        if self.strategy == "tensor_group":
            found["weight_global_scale"] = ("F32", (1,))
        return found

    def config(self, ignore: Iterable[str]) -> dict[str, Any]:
        """Return the quantization_config. ignore: modules that are not quantized."""
        weights: dict[str, Any] = {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "group_size": self.group or None,
            "dynamic": False,
        }
        if self.block:
            weights["block_structure"] = [BLOCK, BLOCK]
        if self.strategy == "tensor_group":
            weights["scale_dtype"] = "torch.float8_e4m3fn"
        elif self.format == "mxfp4-pack-quantized":
            weights["scale_dtype"] = "torch.uint8"
        inputs = None
        if self.activations:
            inputs = {
                "num_bits": self.bits,
                "type": self.kind,
                "symmetric": True,
                "strategy": self.activations,
                "group_size": BLOCK if self.activations == "group" else None,
                "dynamic": True,
            }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": sorted(ignore),
            "kv_cache_scheme": None,
        }


SCHEMES = {
    "int4": Scheme(name="int4", format="pack-quantized", bits=4, group=128),
    "int8": Scheme(name="int8", format="pack-quantized", bits=8, group=128),
    "w8a8": Scheme(name="w8a8", format="int-quantized", bits=8, activations="token"),
    "fp8": Scheme(
        name="fp8", format="float-quantized", bits=8, kind="float", activations="token"
    ),
    "fp8_block": Scheme(
        name="fp8_block", format="float-quantized", bits=8, kind="float", block=BLOCK,
        activations="group",
    ),
    "mxfp4": Scheme(
        name="mxfp4", format="mxfp4-pack-quantized", bits=4, kind="float", group=32
    ),
    "nvfp4": Scheme(
        name="nvfp4", format="nvfp4-pack-quantized", bits=4, kind="float", group=16
    ),
}  # fmt: skip
"""Values of --to that are written as compressed-tensors."""

FORMATS = (*SCHEMES, *MIXES)
"""All values of --to."""


def choose_scheme(
    name: str, *, bits: int | None, group_size: int | None, symmetric: bool
) -> Scheme:
    """Return the scheme of a format with the user's settings. Raises ConfigError."""
    found = SCHEMES[name]
    if found.format != "pack-quantized":
        given = {"--bits": bits, "--group-size": group_size, "--asymmetric": not symmetric or None}
        if extra := [flag for flag, value in given.items() if value is not None]:
            raise ConfigError(
                f"--to {name} has fixed groups and bits; {', '.join(extra)} is for int4 and int8"
            )
        return found
    bits = found.bits if bits is None else bits
    if bits not in BITS:
        raise ConfigError(f"--bits is {bits}; it must be one of {', '.join(map(str, BITS))}")
    group = found.group if group_size is None else group_size
    if group != -1 and group != 0 and (group < 16 or group % 16):
        raise ConfigError(
            f"--group-size is {group}; it must be a multiple of 16, or -1: all inputs"
        )
    return Scheme(
        name=name, format=found.format, bits=bits, group=max(group, 0), symmetric=symmetric
    )


def words(count: int, bits: int) -> int:
    """Return the int32 words that hold so many codes, without gaps."""
    return -(-count * bits // 32)
