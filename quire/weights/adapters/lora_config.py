"""adapter_config.json of PEFT. What would change the sum and cannot be computed is refused by key.

The file is untrusted: its size, its numbers and the time of its patterns are bounded.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.json_file import read_json_object
from quire.config.quant.fields import check_pattern
from quire.errors import ConfigError
from quire.weights.adapters.folder import CONFIG_FILE, require_regular

MAX_BYTES = 16 << 20
MAX_RANK = 1 << 16
MAX_PATTERNS = 1 << 16
MAX_WILD_PATTERNS = 64
MAX_PATTERN_SECONDS = 0.5
"""Processor time that an adapter's patterns may take together."""
MAX_TOKENS = 1 << 20

MERGE = "merge the adapter into the model with peft's merge_and_unload and serve the result"
REFUSED: Mapping[str, str] = {
    "alora_invocation_tokens": "the adapter is to act from some token on; train it without",
    "layer_replication": f"it repeats layers of the model; {MERGE}",
    "use_qalora": f"it pools the inputs of A; {MERGE}",
    "use_bdlora": "its matrices are block-diagonal; save it as an ordinary LoRA",
    "arrow_config": "it routes among adapters; serve one of them",
    "kasa_config": f"it changes the base weights; {MERGE}",
    "monteclora_config": f"it samples its weights; {MERGE}",
}
"""Keys that change what the adapter computes, and why or what to do. Refused if they are set."""

IGNORED = frozenset(
    (
        *("task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "target_modules", "exclude_modules", "lora_dropout", "loftq_config"),
        *("layers_to_transform", "layers_pattern", "megatron_config", "megatron_core"),
        *("eva_config", "corda_config", "lora_ga_config", "velora_config", "qalora_group_size"),
        *("runtime_config", "fan_in_fan_out", "enable_lora", "merge_weights", "mica_config"),
        *("modules_to_save", "ensure_weight_tying"),
    )
)
"""Keys of training, or that the tensors' names decide."""

CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "true", "false")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The fields that a sum depends on."""

    rank: int
    alpha: float
    rslora: bool = False
    ranks: PatternMap = field(default_factory=lambda: PatternMap("rank_pattern", {}))
    alphas: PatternMap = field(default_factory=lambda: PatternMap("alpha_pattern", {}))
    dora: bool = False
    lora_bias: bool = False
    parameters: tuple[str, ...] = ()  # suffixes of target_parameters
    tokens: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = None
    base_model: str | None = None
    peft: tuple[int, int] | None = None  # the version that wrote the file, if it states one
    warnings: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """Return the rank that the config states for a module."""
        return int(self.ranks.find(module, self.rank))

    def tokens_of(self, module: str) -> tuple[int, ...] | None:
        """Return the token ids of the rows of a module; None: the config has none."""
        if not isinstance(self.tokens, Mapping):
            return self.tokens
        ends = (ids for name, ids in self.tokens.items() if f".{module}".endswith(f".{name}"))
        return next(ends, None)

    def scale_of(self, module: str) -> float:
        """Return what the product of a module's matrices is multiplied by."""
        rank = self.rank_of(module)
        alpha = self.alphas.find(module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


class PatternMap:
    """Values by patterns of module names. The first pattern that matches counts.

    A pattern matches a whole name, or its end after a dot. Those without operators are looked up.
    """

    def __init__(self, key: str, values: Mapping[str, float]) -> None:
        """Raises ConfigError for patterns that may take long."""
        self._key = key
        self._seconds = 0.0
        self._values = list(values.values())
        self._plain: dict[str, int] = {}  # suffix -> place among all
        self._wild: list[tuple[int, re.Pattern[str]]] = []
        for i, pattern in enumerate(values):
            plain = pattern.removesuffix("$").replace(r"\.", ".")
            if re.fullmatch(r"\^?[\w.\-]+", plain):
                self._plain.setdefault(plain, i)
                continue
            check_pattern(pattern, key, CONFIG_FILE)
            self._wild.append((i, re.compile(rf"(.*\.)?({pattern})$")))
        if len(self._wild) > MAX_WILD_PATTERNS:
            raise ConfigError(
                f"{CONFIG_FILE}: {key} has {len(self._wild)} regular expressions; the maximum is "
                f"{MAX_WILD_PATTERNS}: write names of modules"
            )

    def find(self, module: str, default: float) -> float:
        """Return the value for a module. Raises ConfigError if patterns take too long."""
        if not self._values:
            return default
        parts = module.split(".")
        ends = [f"^{module}", *(".".join(parts[i:]) for i in range(len(parts)))]
        first = min((self._plain[end] for end in ends if end in self._plain), default=-1)
        for i, pattern in self._wild:
            if 0 <= first < i:
                break
            if self._matches(pattern, module):
                first = i
                break
        return default if first < 0 else self._values[first]

    def _matches(self, pattern: re.Pattern[str], module: str) -> bool:
        began = time.thread_time()
        found = pattern.match(module) is not None
        self._seconds += time.thread_time() - began
        if self._seconds > MAX_PATTERN_SECONDS:
            raise ConfigError(
                f"{CONFIG_FILE}: the patterns of {self._key} take longer to match than "
                f"{MAX_PATTERN_SECONDS} s, the last of them {pattern.pattern!r:.80}: write names "
                "of modules"
            )
        return found


def read_lora_config(folder: Path) -> LoraConfig:
    """Read a folder's adapter_config.json. Raises ConfigError."""
    path = folder / CONFIG_FILE
    if not path.exists():
        raise ConfigError(f"{folder} has no {CONFIG_FILE}: it is not a LoRA adapter")
    require_regular(path)
    return parse_lora_config(read_json_object(path, MAX_BYTES))


def parse_lora_config(found: Mapping[str, Any]) -> LoraConfig:
    """Return the fields of a parsed file. Raises ConfigError by key."""
    kind = _field(found, "peft_type", str)
    if kind.upper() != "LORA":
        raise _refuse("peft_type", kind, f"quire serves LORA; {MERGE}")
    for key, why in REFUSED.items():
        if found.get(key) not in (None, False, [], {}):
            raise _refuse(key, found[key], why)
    if (bias := found.get("bias")) not in (None, "none"):
        raise _refuse("bias", bias, f"the base model's biases would change; {MERGE}")
    _check_init(found.get("init_lora_weights"))
    config = LoraConfig(
        rank=_number(found, "r", int, least=1, most=MAX_RANK),
        alpha=_number(found, "lora_alpha", float),
        rslora=_flag(found, "use_rslora"),
        ranks=_patterns(found, "rank_pattern", int, least=1, most=MAX_RANK),
        alphas=_patterns(found, "alpha_pattern", float),
        dora=_flag(found, "use_dora"),
        lora_bias=_flag(found, "lora_bias"),
        parameters=_names(found, "target_parameters"),
        tokens=_tokens(found.get("trainable_token_indices")),
        peft=_version(found.get("peft_version")),
        base_model=base if isinstance(base := found.get("base_model_name_or_path"), str) else None,
        warnings=_unknown(found),
    )
    if config.dora and config.lora_bias:
        raise _refuse("lora_bias", True, "it has no meaning with use_dora")
    return config


def _check_init(value: object) -> None:
    """Refuse kinds that changed the base weights before training."""
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, str):
        raise _refuse("init_lora_weights", value, "it must be true, false or a name")
    kind = value.lower()
    if kind.startswith(CHANGED_BASE):
        raise _refuse(
            "init_lora_weights",
            value,
            "the base weights were changed when training began, so the adapter does not fit the "
            "model; convert it with peft's save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...), or serve the changed base model that "
            "training saved and write true here",
        )
    if kind not in PLAIN_INITS:
        known = ", ".join(PLAIN_INITS[:-2])
        raise _refuse("init_lora_weights", value, f"known are true, false, {known}")


def _patterns(
    found: Mapping[str, Any], key: str, kind: Callable[[Any], float], **bounds: float
) -> PatternMap:
    given = found.get(key)
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise _refuse(key, given, "it must be an object of patterns and numbers")
    if len(given) > MAX_PATTERNS:
        raise ConfigError(
            f"{CONFIG_FILE}: {key} has {len(given)} patterns; the maximum is {MAX_PATTERNS}"
        )
    label = {f"{key}[{name!r:.80}]": value for name, value in given.items()}
    values = [_number(label, name, kind, **bounds) for name in label]
    return PatternMap(key, dict(zip(given, values, strict=True)))


def _tokens(given: object) -> tuple[int, ...] | dict[str, tuple[int, ...]] | None:
    """Return the indices of trainable tokens: of the embedding, or by the name of the module."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return {str(name): _indices(one) for name, one in given.items()}
    return _indices(given)


def _indices(given: object) -> tuple[int, ...]:
    key = "trainable_token_indices"
    if not isinstance(given, list) or not all(type(one) is int and one >= 0 for one in given):
        raise _refuse(key, given, "it must be a list of token ids, or lists by module")
    if len(set(given)) != len(given) or len(given) > MAX_TOKENS:
        raise ConfigError(
            f"{CONFIG_FILE}: {key} has {len(given)} token ids; each must be there once, and at "
            f"most {MAX_TOKENS}"
        )
    return tuple(given)


def _version(given: object) -> tuple[int, int] | None:
    found = re.match(r"(\d{1,9})\.(\d{1,9})", given) if isinstance(given, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def _unknown(found: Mapping[str, Any]) -> tuple[str, ...]:
    known = IGNORED | REFUSED.keys() | _READ
    strange = [
        key for key in sorted(found) if key not in known and found[key] not in (None, False, "")
        and found[key] not in ([], {}, 0)
    ]  # fmt: skip
    if not strange:
        return ()
    return (f"{CONFIG_FILE} has keys that quire does not know: {', '.join(strange):.300}",)


_READ = frozenset(
    (
        *("peft_type", "bias", "init_lora_weights", "r", "lora_alpha", "use_rslora"),
        *("rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "target_parameters"),
        *("trainable_token_indices", "peft_version"),
    )
)


def _field(found: Mapping[str, Any], key: str, kind: type) -> Any:
    value = found.get(key)
    if value is None:
        raise ConfigError(f"{CONFIG_FILE}: {key} is missing")
    if type(value) is not kind:
        raise _refuse(key, value, f"it must be a {kind.__name__}")
    return value


def _number(
    found: Mapping[str, Any],
    key: str,
    kind: Callable[[Any], Any],
    *,
    least: float = -1e9,
    most: float = 1e9,
) -> Any:
    value = found.get(key)
    if value is None:
        raise ConfigError(f"{CONFIG_FILE}: {key} is missing")
    whole = type(value) is int or (type(value) is float and value.is_integer())
    if not (whole or (kind is float and type(value) is float)) or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise _refuse(key, value, f"it must be {what} from {least:g} to {most:g}")
    return kind(value)


def _flag(found: Mapping[str, Any], key: str) -> bool:
    value = found.get(key)
    if value is not None and not isinstance(value, bool):
        raise _refuse(key, value, "it must be true or false")
    return bool(value)


def _names(found: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = found.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _refuse(key, value, "it must be a list of names")
    return tuple(value)


def _refuse(key: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{CONFIG_FILE}: {key} is {value!r:.80}; {why}")
