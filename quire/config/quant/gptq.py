"""Reads quant_method "gptq" (AutoGPTQ, GPTQModel, transformers, auto-round).

Source: https://github.com/ModelCloud/GPTQModel, https://arxiv.org/abs/2210.17323
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quire.config.quant.facts import LayerRule, QuantFacts, WeightFormat
from quire.config.quant.fields import (
    Json,
    check_pattern,
    read_group_size,
    refuse_unknown,
    require_value,
)
from quire.config.quant.held import LEAST_GROUP, MatrixFacts, group_bits
from quire.errors import ConfigError

log = logging.getLogger(__name__)

BITS = (2, 3, 4, 8)
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what is added to a stored zero."""

_INFORMATIVE = """quant_method method version meta model_name_or_path model_file_base_name tokenizer
    dataset batch_size damp_percent damp_auto_increment static_groups true_sequential mse
    parallel_packing act_group_aware gptaq foem hessian fallback failsafe pack_impl
    process use_cuda_fp16 model_seqlen block_name_to_quantize
    module_name_preceding_first_block pad_token_id max_input_length cache_block_outputs backend
    use_exllama disable_exllama exllama_config offload_to_disk offload_to_disk_path
    compute_device_filter hyb_act auto_forward_data_parallelism vram_strategy
    wait_for_submodule_finalizers gc_mode moe preprocessors"""
_AUTO_ROUND = """autoround_version iters lr minmax_lr nsamples seqlen gradient_accumulate_steps
    enable_minmax_tuning enable_quanted_input enable_norm_bias_tuning low_gpu_mem_usage amp
    scale_dtype quant_lm_head model_free to_quant_block_names batch_size dataset super_bits
    super_group_size enable_alg_ext momentum optimizer"""
AUTO_ROUND_FIELDS = frozenset(_AUTO_ROUND.split())
"""How auto-round found the weights."""
_MUST_BE_OFF = ("rotation", "adapter", "is_marlin_format", "act_bits", "act_data_type")
_READ = """bits group_size desc_act sym lm_head checkpoint_format format pack_dtype dynamic
    modules_in_block_to_quantize data_type"""
_KNOWN = frozenset([*_INFORMATIVE.split(), *_READ.split(), *_MUST_BE_OFF]) | AUTO_ROUND_FIELDS
_RULE_FIELDS = "bits group_size sym desc_act mse damp_percent damp_auto_increment adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqFormat(WeightFormat):
    """Integers in int32 words, with a scale and a zero per output and group of inputs."""

    method: ClassVar[str] = "gptq"
    bits: int
    group: int  # inputs that share a scale; 0: all of them
    symmetric: bool  # all zeros are in the middle
    zero_offset: int  # what is added to a stored zero
    act_order: bool = False  # inputs of a group are not neighbours
    head: bool = False  # the output head is quantized, too

    def stored_size(self, matrix: MatrixFacts) -> tuple[int, int]:
        words, outputs = matrix.tensor("qweight").shape
        return outputs, words * 32 // self.bits

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        inputs = matrix.inputs
        group = math.gcd(self.group or inputs, inputs)
        if group < min(LEAST_GROUP, inputs):
            return 16
        numbers = matrix.float_bits("scales") + 8 * (not self.symmetric)
        order = 32 / matrix.outputs if self.act_order and matrix.has("g_idx") else 0
        return group_bits(self.bits, group, numbers, inputs, device) + order


def read(found: Json) -> QuantFacts:
    """Read the configuration. Raises ConfigError."""
    at = "quantization_config"
    refuse_unknown(at, found, _KNOWN)
    for field in _MUST_BE_OFF:
        if field in found and found[field] not in (None, False, {}, [], 16, 32, "float"):
            raise ConfigError(
                f"config.json: {at}.{field} is {found[field]!r:.80}; quire reads GPTQ "
                "checkpoints without it"
            )
    stored = found.get("checkpoint_format") or found.get("format") or "gptq"
    require_value(f"{at}.checkpoint_format", stored, *ZERO_OFFSETS)
    pack_dtype = str(found.get("pack_dtype", "int32")).removeprefix("torch.")
    require_value(f"{at}.pack_dtype", pack_dtype, "int32")
    require_value(f"{at}.data_type", found.get("data_type", "int"), "int")
    require_value(f"{at}.desc_act", found.get("desc_act", False), None, False, True)
    base = GptqFormat(
        bits=_bits(found, at),
        group=read_group(found, at),
        symmetric=read_flag(found, at, "sym", True),
        zero_offset=ZERO_OFFSETS[stored],
        act_order=bool(found.get("desc_act")),
        head=read_flag(found, at, "lm_head", False),
    )
    facts = QuantFacts(
        quant_method="gptq",
        rules=(*_dynamic_rules(found.get("dynamic"), base), *_named_rules(found, base)),
        default=None if found.get("modules_in_block_to_quantize") else base,
    )
    if not base.symmetric:
        log.warning(
            "config.json: %s.sym is false, so zero points are read as checkpoint_format %r has "
            "them; some writers state the wrong one: if the text is noise, set the other (%s)",
            at,
            stored,
            " or ".join(ZERO_OFFSETS),
        )
    return facts


def read_group(found: Json, at: str, key: str = "group_size", default: object = None) -> int:
    """Return the inputs per group; 0 where the field is -1: all of them."""
    return read_group_size(f"{at}.{key}", found.get(key, default), -1) or 0


def read_flag(found: Json, at: str, key: str, default: bool) -> bool:
    """Return a field that is true or false."""
    value = found.get(key, default)
    require_value(f"{at}.{key}", value, True, False)
    return bool(value)


def _bits(found: Json, at: str) -> int:
    require_value(f"{at}.bits", found.get("bits"), *BITS)
    return int(found["bits"])


def _dynamic_rules(dynamic: object, base: GptqFormat) -> Iterator[LayerRule]:
    """The rules of `dynamic`: those that exclude layers go first, then the first match decides."""
    at = "quantization_config.dynamic"
    if not isinstance(dynamic, Mapping):
        require_value(at, dynamic, None, False)
        return
    changed: list[LayerRule] = []
    for key, changes in dynamic.items():
        sign = key[:2] if key[:2] in ("+:", "-:") else ""
        pattern = key[len(sign) :]
        check_pattern(pattern, at)
        if sign == "-:":
            yield LayerRule(f"re:{pattern}", None)
        else:
            changed.append(LayerRule(f"re:{pattern}", _changed(base, changes, f"{at}[{key!r}]")))
    yield from changed


def _changed(base: GptqFormat, changes: Any, at: str) -> GptqFormat:
    if not isinstance(changes, Mapping):
        raise ConfigError(f"config.json: {at} is {changes!r:.80}; it must be an object")
    refuse_unknown(at, changes, frozenset(_RULE_FIELDS.split()))
    require_value(f"{at}.adapter", changes.get("adapter"), None)
    return replace(
        base,
        bits=_bits({"bits": base.bits, **changes}, at),
        group=read_group(changes, at) if "group_size" in changes else base.group,
        symmetric=read_flag(changes, at, "sym", base.symmetric),
        act_order=read_flag(changes, at, "desc_act", base.act_order),
    )


def _named_rules(found: Json, base: GptqFormat) -> Iterator[LayerRule]:
    """The rules of `modules_in_block_to_quantize`: names, or lists of names."""
    at = "quantization_config.modules_in_block_to_quantize"
    names = found.get("modules_in_block_to_quantize") or ()
    if not isinstance(names, list | tuple):
        raise ConfigError(f"config.json: {at} is {names!r:.80}; it must be a list of names")
    for one in names:
        for name in one if isinstance(one, list) else (one,):
            if not isinstance(name, str):
                raise ConfigError(f"config.json: {at} has {name!r:.80}; it must have names")
            yield LayerRule(name, base)
    if names and base.head:
        yield LayerRule("lm_head", base)
