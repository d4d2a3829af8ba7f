"""Quantizes a checkpoint, one decoder layer after another.

    read the headers -> choose matrices -> for each layer: read, quantize, write -> the other files

At most one layer is in memory, and with --data the activations between two layers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quire.errors import ConfigError
from quire.log import BestEffortStream
from quire.quantize import awq
from quire.quantize.calibrate import Calibrator, require_decoder
from quire.quantize.calibrated import Calibrated
from quire.quantize.calibration_data import read_sequences
from quire.quantize.compressed_out import CompressedOut
from quire.quantize.gguf_out import GgufOut
from quire.quantize.options import QuantizeOptions
from quire.quantize.out_folder import OutFolder
from quire.quantize.schemes import choose_scheme
from quire.quantize.source import Checkpoint, plain_reasons, read_checkpoint
from quire.weights.files import resolve_model_folder

QuantizeTarget = CompressedOut | GgufOut
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """What a run writes.

    sizes: tensor of the source -> (what it becomes, bytes); plain: matrices that stay unquantized,
    with the reason.
    """

    sizes: dict[str, tuple[str, int]]
    plain: dict[str, str]
    source_bytes: int
    out_bytes: int


def make_plan(options: QuantizeOptions) -> QuantizePlan:
    """Return what a run would write. Writes nothing."""
    with read_checkpoint(_model_folder(options)) as checkpoint:
        return _plan_of(_make_target(options, checkpoint, OutFolder(options.out, {})))


def quantize_model(options: QuantizeOptions, *, progress: bool = True) -> dict[str, Any]:
    """Run, or continue, and return the report. Raises ConfigError, WeightError."""
    folder = _model_folder(options)
    if options.out.resolve() == folder.resolve():
        raise ConfigError(f"{options.out} is the model itself; give another folder")
    with read_checkpoint(folder) as checkpoint:
        out = OutFolder(options.out, _settings(options, checkpoint))
        target = _make_target(options, checkpoint, out)
        plan = _plan_of(target)
        if out.open():
            log.info("%s is finished already", options.out)
        else:
            out.require_space(plan.out_bytes + target.extra_bytes())
            _write(options, checkpoint, target, progress)
            target.finish()
            report = {
                "plain": plan.plain,
                "source_bytes": plan.source_bytes,
                "out_bytes": plan.out_bytes,
            }
            out.finish(report)
        return {
            "errors": out.errors, "plain": plan.plain, "source_bytes": plan.source_bytes,
            "out_bytes": plan.out_bytes,
        }  # fmt: skip


def _write(
    options: QuantizeOptions, checkpoint: Checkpoint, target: QuantizeTarget, progress: bool
) -> None:
    from tqdm import tqdm

    device = _device(options.device)
    calibrator = _make_calibrator(options, checkpoint, target, device)
    units = tqdm(
        range(len(target.units)), desc="Quantizing", unit="layer", disable=not progress,
        file=BestEffortStream(sys.stderr), dynamic_ncols=True,
    )  # fmt: skip
    for unit in units:
        done = target.has(unit)
        if calibrator is None or unit == 0:
            if not done:
                target.write_unit(unit, Calibrated(), device)
            continue
        if not any(not target.has(later) for later in range(unit, len(target.units))):
            break  # no layer is left that needs the states
        number = unit - 1 if unit <= checkpoint.layers else None
        if done:
            assert number is not None
            values = None  # of GGUF files and rounding to nearest: those of the source
            if isinstance(target, CompressedOut) and options.chosen_algorithm != "rtn":
                values = target.values_of(unit)
            calibrator.advance(number, values)
        else:
            target.write_unit(unit, calibrator.calibrate(number, target.is_quantized), device)


def _make_calibrator(
    options: QuantizeOptions,
    checkpoint: Checkpoint,
    target: QuantizeTarget,
    device: torch.device,
) -> Calibrator | None:
    """What runs the model over the texts; None: there are no texts."""
    if options.data is None:
        return None
    sequences = read_sequences(
        options.data, checkpoint.folder,
        samples=options.samples, seqlen=options.seqlen, seed=options.seed,
    )  # fmt: skip
    scheme = target.scheme if isinstance(target, CompressedOut) else None
    made = Calibrator(checkpoint, options, scheme, sequences, device)
    made.embed()
    return made


def _make_target(
    options: QuantizeOptions, checkpoint: Checkpoint, out: OutFolder
) -> QuantizeTarget:
    if options.data is not None:
        require_decoder(checkpoint)
    if options.chosen_algorithm == "awq":
        awq.require_folds(checkpoint.model_type)
    if options.is_gguf:
        plain = plain_reasons(checkpoint, _fits_any, options.ignore, head=True)
        name = re.sub(r"[^\w.-]+", "-", Path(options.model).name) or "model"
        return GgufOut(checkpoint, options.to, plain, out, name)
    scheme = choose_scheme(
        options.to, bits=options.bits, group_size=options.group_size, symmetric=options.symmetric
    )
    if options.lm_head and checkpoint.config.tied:
        raise ConfigError("--lm-head: the output head shares the embedding's weight in this model")
    plain = plain_reasons(checkpoint, scheme.refusal, options.ignore, head=options.lm_head)
    return CompressedOut(checkpoint, scheme, plain, out)


def _fits_any(outputs: int, inputs: int, *, fused: bool) -> None:
    """Every matrix has some type in a GGUF file."""


def _plan_of(target: QuantizeTarget) -> QuantizePlan:
    sizes = target.sizes()
    before = sum(one.nbytes for one in target.checkpoint.tensors)
    return QuantizePlan(sizes, dict(target.plain), before, sum(size for _, size in sizes.values()))


def _model_folder(options: QuantizeOptions) -> Path:
    return resolve_model_folder(options.model, revision=options.revision)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _settings(options: QuantizeOptions, checkpoint: Checkpoint) -> dict[str, Any]:
    """What decides every byte of the result."""
    found = asdict(options) | {"model": str(checkpoint.folder.resolve())}
    del found["out"], found["device"]
    found["ignore"] = list(options.ignore)
    found["data"] = None if options.data is None else _digest(options.data)
    found["source"] = {
        path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in checkpoint.files()
    }
    found["config"] = _digest(checkpoint.folder / "config.json")
    found["quire"] = importlib.metadata.version("quire-llm")
    return found


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
