"""Reads rotary settings from config.json, in both styles.

older           rope_theta, rope_scaling {type or rope_type, ...}, partial_rotary_factor
transformers 5  rope_parameters {rope_theta, rope_type, ...}, maybe one per layer type
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.layers.rope import RopeConfig
from quire.layers.rope_scaling import (
    DynamicNTKScaling,
    FixedNTKScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRope,
    RopeScaling,
    UnscaledRope,
    YarnRopeScaling,
)
from quire.models.base import Hf, field_of, sizes_of

ALIASES = {"su": "longrope", "mrope": "default"}
"""mrope is the default with a position per axis: see `axes_of`."""
ROPE_KINDS = ("default", "linear", "dynamic", "ntk", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class RopeSection:
    """The rotary part of a config.json, for one kind of layer."""

    hf: Hf
    params: dict[str, Any]
    name: str  # of the field, for messages
    max_positions: int

    @property
    def kind(self) -> str:
        """Which scaling."""
        key = "rope_type" if self.params.get("rope_type") is not None else "type"
        found = field_of(self.params, key, str, default="default")
        found = ALIASES.get(found, found)
        if found not in ROPE_KINDS:
            raise ConfigError(
                f"config.json: {self.name}.{key} is {found!r}; supported: {', '.join(ROPE_KINDS)}"
            )
        return found

    @property
    def trained_len(self) -> int:
        """Positions the model was trained on."""
        own = field_of(self.params, TRAINED, int, default=self.max_positions)
        return field_of(self.hf, TRAINED, int, default=own)

    @property
    def factor(self) -> float:
        """How much longer than trained. Stated, or the ratio of the two lengths."""
        ratio = self.max_positions / self.trained_len
        optional = self.kind in ("yarn", "longrope")
        return self.number("factor", ratio) if optional else self.number("factor")

    def number(self, key: str, *default: float | None) -> float:
        """One number of the section."""
        if default:
            return field_of(self.params, key, float, default=default[0])
        try:
            return field_of(self.params, key, float)
        except ConfigError as error:
            raise ConfigError(f"{error} (in {self.name}, type {self.kind!r})") from None

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of numbers, of known length."""
        found = field_of(self.params, key, list)
        if len(found) != count or not all(type(x) in (int, float) for x in found):
            raise ConfigError(
                f"config.json: {self.name}.{key} has {len(found)} entries; "
                f"it must be {count} numbers, half the rotated size of a head"
            )
        return tuple(map(float, found))


TRAINED = "original_max_position_embeddings"


def section_of(hf: Hf, layer_type: str | None = None) -> RopeSection:
    """Find the rotary settings, those of one layer type if there are several."""
    positions = field_of(hf, "max_position_embeddings", int)
    for name in ("rope_scaling", "rope_parameters"):
        params = field_of(hf, name, dict, default={})
        nested = {key: value for key, value in params.items() if isinstance(value, dict)}
        if nested and layer_type is None:
            raise ConfigError(
                f"config.json: {name} differs by layer type ({', '.join(nested)}); this model "
                "supports one setting for all layers"
            )
        if nested:
            return RopeSection(
                hf, nested.get(layer_type or "", {}), f"{name}.{layer_type}", positions
            )
        if params:
            return RopeSection(hf, params, name, positions)
    return RopeSection(hf, {}, "rope_scaling", positions)


def rope_of(
    hf: Hf, head_dim: int, *, theta: float = 10000.0, section: RopeSection | None = None
) -> RopeConfig:
    """The rotary settings of a model. theta: the base if the config has none."""
    part = section or section_of(hf)
    base = part.number("rope_theta", field_of(hf, "rope_theta", float, default=theta))
    share = field_of(hf, "partial_rotary_factor", float, default=1.0)
    share = part.number("partial_rotary_factor", share)
    if part.kind == "proportional":
        return RopeConfig(base, head_dim, ProportionalRope(share, part.number("factor", 1.0)))
    dims = int(head_dim * share)
    if dims % 2 or not 0 < dims <= head_dim:
        raise ConfigError(
            f"config.json: partial_rotary_factor turns {dims} of head_dim {head_dim}; "
            "it must be an even number of them"
        )
    return RopeConfig(base, dims, _scaling(part, dims), axes=axes_of(part, dims // 2))


def axes_of(part: RopeSection, pairs: int) -> tuple[int, ...]:
    """Return the axis whose position turns each pair of channels; (): the model has one axis."""
    if part.params.get("mrope_section") is None:
        return ()
    sections = field_of(part.params, "mrope_section", list)
    if len(sections) != 3 or sum(sections) != pairs or min(sections) < 0:
        raise ConfigError(
            f"config.json: {part.name}.mrope_section is {sections!r:.80}; it must be three numbers "
            f"of channel pairs, {pairs} in all"
        )
    if not _is_interleaved(part):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], pairs), 3):
            axes[pair] = axis
    return tuple(axes)


def _is_interleaved(part: RopeSection) -> bool:
    """Whether the sections take turns: time, height, width, time, ... (Qwen3-VL)"""
    default = field_of(part.hf, "mrope_interleaved", bool, default=False)
    return field_of(part.params, "mrope_interleaved", bool, default=default)


def rotary_sizes_of(
    hf: Hf, *, act: str = "hidden_act", tied: bool = False, theta: float = 10000.0
) -> dict[str, Any]:
    """sizes_of, `rope`, and max_len as the scaling stretches it."""
    sizes = sizes_of(hf, act=act, tied=tied)
    rope = rope_of(hf, sizes["head_dim"], theta=theta)
    return {**sizes, "max_len": scaled_max_len(hf), "rope": rope}


def scaled_max_len(hf: Hf, section: RopeSection | None = None) -> int:
    """Positions a model serves when its scaling stretches max_position_embeddings."""
    part = section or section_of(hf)
    if part.kind in ("linear", "dynamic"):
        return int(part.max_positions * part.factor)
    if part.kind == "yarn":
        return int(part.trained_len * part.factor)
    return part.max_positions


def _scaling(part: RopeSection, dims: int) -> RopeScaling:
    if part.kind == "default":
        return UnscaledRope()
    if part.kind == "linear":
        return LinearRopeScaling(part.factor)
    if part.kind == "dynamic":
        return DynamicNTKScaling(part.factor, part.max_positions)
    if part.kind == "ntk":
        field_of(part.params, "mixed_b", float, default=None, one_of={None})
        return FixedNTKScaling(part.factor)
    if part.kind == "llama3":
        low, high = part.number("low_freq_factor"), part.number("high_freq_factor")
        if low >= high:
            raise ConfigError(
                f"config.json: {part.name}.low_freq_factor is {low}; it must be below "
                f"high_freq_factor, which is {high}"
            )
        return Llama3RopeScaling(part.factor, low, high, part.trained_len)
    if part.kind == "yarn":
        return _yarn(part)
    return LongRopeScaling(
        short=part.numbers("short_factor", dims // 2),
        long=part.numbers("long_factor", dims // 2),
        trained_len=part.trained_len,
        factor=part.factor,
        attention_factor=part.number("attention_factor", None),
    )


def _yarn(part: RopeSection) -> YarnRopeScaling:
    return YarnRopeScaling(
        part.factor,
        part.trained_len,
        beta_fast=part.number("beta_fast", 32.0) or 32.0,
        beta_slow=part.number("beta_slow", 1.0) or 1.0,
        attention_factor=part.number("attention_factor", None),
        mscale=part.number("mscale", None),
        mscale_all_dim=part.number("mscale_all_dim", None),
        truncate=field_of(part.params, "truncate", bool, default=True),
    )
