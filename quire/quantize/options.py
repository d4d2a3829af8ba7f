"""What `quire quantize` is asked for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.config.quant.ggml_mixes import MIXES
from quire.errors import ConfigError
from quire.quantize.schemes import FORMATS, SCHEMES

ALGORITHMS = ("rtn", "gptq", "awq")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """The settings of one run. Raises ConfigError for those that do not go together."""

    model: str
    out: Path
    to: str  # of schemes.FORMATS
    revision: str | None = None
    bits: int | None = None  # None: those of the format
    group_size: int | None = None  # -1: all inputs; None: that of the format
    symmetric: bool = True
    data: Path | None = None  # texts for calibration
    algorithm: str | None = None  # None: gptq with data for int4 and int8, else rtn
    samples: int = 128
    seqlen: int = 512
    seed: int = 0
    act_order: bool = False  # GPTQ: columns of large activations first
    damp: float = 0.01  # GPTQ: share of the mean diagonal that is added to it
    ignore: tuple[str, ...] = ()
    lm_head: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.to not in FORMATS:
            raise ConfigError(f"--to is {self.to!r}; it must be one of {', '.join(FORMATS)}")
        if self.algorithm not in (None, *ALGORITHMS):
            raise ConfigError(
                f"--algorithm is {self.algorithm!r}; it must be one of {', '.join(ALGORITHMS)}"
            )
        if self.algorithm in ("gptq", "awq"):
            if self.data is None:
                raise ConfigError(f"--algorithm {self.algorithm} needs texts: give --data FILE")
            if not self.is_packed:
                raise ConfigError(
                    f"--algorithm {self.algorithm} is for int4 and int8, not {self.to}"
                )
        if self.act_order and self.chosen_algorithm != "gptq":
            raise ConfigError("--act-order is for GPTQ: give --data FILE and --to int4 or int8")
        for name, value in (("--samples", self.samples), ("--seqlen", self.seqlen)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if not 0.0 < self.damp <= 1.0:
            raise ConfigError(f"--damp is {self.damp}; it must be above 0, and at most 1")
        if self.is_gguf:
            given = {"--bits": self.bits, "--group-size": self.group_size}
            given |= {"--asymmetric": None if self.symmetric else 1}
            given |= {"--lm-head": 1 if self.lm_head else None}
            if extra := [flag for flag, value in given.items() if value is not None]:
                raise ConfigError(
                    f"--to {self.to} has fixed blocks; {', '.join(extra)} cannot be given"
                )

    @property
    def is_gguf(self) -> bool:
        """Whether a GGUF file is written."""
        return self.to in MIXES

    @property
    def is_packed(self) -> bool:
        """Whether matrices become packed integers, which calibration may choose."""
        return self.to in SCHEMES and SCHEMES[self.to].format == "pack-quantized"

    @property
    def chosen_algorithm(self) -> str:
        """The algorithm: GPTQ where it is possible."""
        if self.algorithm is not None:
            return self.algorithm
        return "gptq" if self.data is not None and self.is_packed else "rtn"
