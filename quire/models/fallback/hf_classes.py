"""Config and model class of a config.json, by transformers or by code in the model's folder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.config.architectures import CLASSES, similar_names
from quire.errors import ConfigError
from quire.models.base import HeadKind

log = logging.getLogger(__name__)

AUTO_CONFIG, AUTO_MODEL = "AutoConfig", "AutoModelForCausalLM"
ENCODER_CLASSES: dict[HeadKind, tuple[str, ...]] = {
    "none": ("AutoModelForMaskedLM", "AutoModelForTokenClassification"),
    "lm": ("AutoModelForMaskedLM",),
    "classify": ("AutoModelForSequenceClassification",),
    "token_classify": ("AutoModelForTokenClassification",),
}
"""Head -> classes of transformers with the same layers; those for none lose theirs."""
NOT_A_FIELD = ("quantization_config", "compression_config", "auto_map", "transformers_version")
"""Keys of config.json that do not describe the model's computation."""


def import_transformers() -> Any:
    """Return the module. Raises ConfigError if it is not installed or too old."""
    try:
        import transformers
        from transformers import AttentionInterface  # noqa: F401
        from transformers.masking_utils import AttentionMaskInterface  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "this model is not native to quire, and runs through transformers, which is missing or "
            f"too old ({error}): pip install 'transformers>=5.0'"
        ) from None
    return transformers


def read_config(hf: Mapping[str, Any], code: Path | None) -> Any:
    """Return the PreTrainedConfig of a config.json.

    code: the model's folder, if its Python code may run. Raises ConfigError.
    """
    transformers = import_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(hf.get("model_type", ""))
    fields = {key: _with_floats(value) for key, value in hf.items() if key not in NOT_A_FIELD}
    if model_type in CONFIG_MAPPING:
        found = CONFIG_MAPPING[model_type]
    elif AUTO_CONFIG in _auto_map(hf):
        found = _load_code(hf, AUTO_CONFIG, code)
    else:
        near = similar_names(model_type)
        hint = (
            f"did you mean {' or '.join(near)}?" if near else "`quire models` lists what is known"
        )
        raise ConfigError(
            f"models of type {model_type!r:.80} are known to neither quire nor transformers "
            f"{transformers.__version__}; {hint}"
        )
    try:
        return found.from_dict(fields)
    except Exception as error:  # its own checks, of many kinds
        reason = " ".join(str(error).split())
        raise ConfigError(f"config.json: transformers cannot read it: {reason:.300}") from error


def _with_floats(value: Any) -> Any:
    """Return a value of config.json; transformers writes {"__float__": "Infinity"} for infinity."""
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"__float__"}:
        return float(value["__float__"])
    return {key: _with_floats(one) for key, one in value.items()}


def model_class(config: Any, hf: Mapping[str, Any], code: Path | None) -> type[Any]:
    """Return the causal language model class of a config. Raises ConfigError."""
    from transformers import AutoModelForCausalLM

    try:
        found: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        if AUTO_MODEL in _auto_map(hf):
            return _load_code(hf, AUTO_MODEL, code)
        found = _class_of(CLASSES.get(config.model_type, ""))
        if found is None or found.config_class is not type(config):
            raise ConfigError(
                f"models of type {hf.get('model_type')!r:.80} are not supported: transformers has "
                "no causal language model for them"
            ) from None
    if not isinstance(found, (list, tuple)):
        return found
    names = hf.get("architectures") or ()
    return next((one for one in found if one.__name__ in names), found[0])


def encoder_class(config: Any, head: HeadKind) -> type[Any]:
    """Return the class of an encoder that has this head. Raises ConfigError."""
    import transformers

    for auto in ENCODER_CLASSES[head]:
        found = getattr(transformers, auto)._model_mapping.get(type(config), None)
        if found is not None:
            kind: type[Any] = found[0] if isinstance(found, (list, tuple)) else found
            return kind
    raise ConfigError(
        f"models of type {config.model_type!r:.80} are not supported with this head ({head}): "
        "transformers has no class for it"
    )


def _class_of(name: str) -> type[Any] | None:
    """Return the causal language model class of transformers that has this name."""
    import transformers

    return getattr(transformers, name, None) if name.endswith("ForCausalLM") else None


def _auto_map(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    found = hf.get("auto_map")
    return found if isinstance(found, Mapping) else {}


def _load_code(hf: Mapping[str, Any], key: str, code: Path | None) -> type[Any]:
    """Import a class from Python code in the model's folder."""
    name = _auto_map(hf)[key]
    if code is None:
        raise ConfigError(
            f"models of type {hf.get('model_type')!r:.80} run Python code of the model's folder "
            f"({name}); read it, and set trust_remote_code to run it"
        )
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if not isinstance(name, str) or "--" in name:
        raise ConfigError(
            f"config.json: auto_map.{key} is {name!r:.80}; only code in the model's own folder is "
            "run (file.Class)"
        )
    log.warning("running Python code of the model's folder: %s of %s", name, code)
    try:
        found: type[Any] = get_class_from_dynamic_module(name, str(code))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the model's code {name} cannot be imported: {reason:.300}") from error
    return found


def build_skeleton(
    cls: type[Any], config: Any, dtype: torch.dtype, attention: str, experts: str | None = None
) -> Any:
    """Return the model with parameters on the meta device and buffers with their values."""
    settings = {"dtype": dtype, "attn_implementation": attention}
    if experts is not None:
        settings["experts_implementation"] = experts
    with torch.device("cpu"), _parameters_on_meta():
        skeleton = cls._from_config(config, **settings).eval()
    for module in skeleton.modules():
        if getattr(getattr(module, "config", None), "pad_token_id", None) is not None:
            vars(module.config)["pad_token_id"] = None  # else inputs are searched for it, to warn
    return skeleton


_patching = threading.Lock()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within, parameters that this thread registers have no memory; buffers are as ever."""
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == thread and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(module, name, param)

    with _patching:
        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]
