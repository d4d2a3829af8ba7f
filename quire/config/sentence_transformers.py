"""Files of sentence-transformers in a model's folder: modules.json and what it names.

They are data: a module's type selects how its config is read, and nothing is imported by it. A
module, or a field of one, that is not known stops the start, because it may change vectors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar, cast

from quire.config.engine_config import DenseSection, PoolingMethod, Similarity
from quire.config.json_file import MAX_CONFIG_BYTES, read_json_object, read_text
from quire.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
FolderKind = Literal["embed", "classify", "sparse", "multi_vector"]

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Config of the Transformer module, whose name was once that of the model type."""
PACKAGES = ("sentence_transformers", "pylate")
ADAPTER_TYPE = "custom_st.Transformer"
"""Code of jina-embeddings-v3: it selects an adapter by a task, and without one is a Transformer."""
KINDS: dict[str, FolderKind] = {
    "SentenceTransformer": "embed",
    "CrossEncoder": "classify",
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "multi_vector",
    "ColBERT": "multi_vector",
}
"""model_type of config_sentence_transformers.json -> what the whole is."""
MODULES: dict[FolderKind, tuple[str, ...]] = {
    "embed": ("Pooling", "Dense", "Normalize"),
    "classify": ("LogitScore",),
    "sparse": ("SpladePooling",),
    "multi_vector": ("Dense", "MultiVectorMask", "Normalize"),
}
"""Modules behind the Transformer, in their order; a Dropout may be anywhere."""
MODES: dict[str, PoolingMethod] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
"""pooling_mode of 1_Pooling/config.json -> method."""
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The same in older files, with a flag for each mode; in the order of concatenation."""
ACTIVATION_CLASSES = (
    *("Identity", "Tanh", "Sigmoid", "Softmax", "LogSoftmax", "LogSigmoid", "ReLU", "ReLU6"),
    *("LeakyReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Softplus", "Softsign"),
    *("Hardtanh", "Hardsigmoid", "Hardswish"),
)
"""Classes of torch.nn with the parameters that they have by default; lower case in sections."""
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_EXPANSION_KEYS = ("query_length", "document_length", "query_expansion")
_UNUSED_KEYS = (
    *("transformer_task", "modality_config", "module_output_name", "unpad_inputs"),
    *("model_args", "model_kwargs", "module_input_name"),
)
"""Fields that change no number."""
_KIND_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    str: "a string",
    dict: "an object",
    list: "a list",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderModules:
    """What the files of sentence-transformers state about a model."""

    kind: FolderKind = "embed"
    methods: tuple[PoolingMethod, ...] = ()  # (): no module pools
    include_prompt: bool = True
    dense: tuple[DenseSection, ...] = ()
    normalize: bool = False
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: Similarity = "cosine"
    truncate_dim: int | None = None
    activation: str | None = None  # of a CrossEncoder's logits
    score_tokens: tuple[int, ...] = ()  # a logit of the last token is the score, or true - false
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of config_sentence_transformers.json: those of ColBERT models of PyLate."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of sentence_bert_config.json about the lengths of queries and documents."""
    mask: Mapping[str, Any] = field(default_factory=dict)  # config of MultiVectorMask


def read_modules(folder: Path) -> FolderModules | None:
    """Read the files; None if there is no modules.json. Raises ConfigError, with every problem."""
    if not (folder / MODULES_FILE).is_file():
        return None
    reader = _FolderReader(folder)
    for part in (reader.read_settings, reader.read_transformer, reader.read_modules):
        with reader.collect():
            part()
    if len(reader.problems) > 1:
        listed = "".join(f"\n  - {one}" for one in reader.problems)
        raise ConfigError(f"{len(reader.problems)} problems of {folder}:{listed}")
    if reader.problems:
        raise ConfigError(reader.problems[0])
    return FolderModules(**reader.found)


def weight_folders(folder: Path) -> list[str]:
    """Return the folders of modules with weights of their own; [] if the files are not supported,
    which matters only if the model pools."""
    if not (folder / MODULES_FILE).is_file():
        return []
    try:
        return [path for kind, path in _FolderReader(folder).entries() if kind == "Dense"]
    except ConfigError:
        return []


def activation_of(name: object, where: str) -> str:
    """Return the activation of a class of torch. Raises ConfigError. where: for the message."""
    package, _, kind = str(name).rpartition(".")
    if not package.startswith("torch.nn") or kind not in ACTIVATION_CLASSES:
        allowed = ", ".join(ACTIVATION_CLASSES)
        raise ConfigError(f"{where} is {name!r:.80}; it must be a class of torch.nn: {allowed}")
    return kind.lower()


class _JsonFields:
    """Typed reads of one file. A field that is not read is an error, unless it is empty."""

    def __init__(self, file: Path, *, optional: bool = False) -> None:
        self.file = file
        self._left: dict[str, Any] = {}
        if file.is_file():
            self._left = read_json_object(file, MAX_CONFIG_BYTES)
        elif not optional:
            raise ConfigError(f"{file} is missing; {MODULES_FILE} names its folder")

    def __contains__(self, key: str) -> bool:
        return self._left.get(key) is not None

    def take(self, key: str, kind: type[T], default: T) -> T:
        """Return a field, `default` if it is null or absent."""
        return cast(T, self.take_any(key, (kind,), default))

    def take_any(self, key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        """Return a field of one of these types, `default` if it is null or absent."""
        value = self._left.pop(key, None)
        if value is None:
            return default
        if type(value) not in kinds:
            raise self.error(key, value, " or ".join(_KIND_NAMES[kind] for kind in kinds))
        return value

    def count(self, *keys: str, least: int = 1) -> int | None:
        """Return the first of these fields that is there."""
        found = [(key, self.take_any(key, (int,))) for key in keys]
        for key, value in found:
            if value is not None and value < least:
                raise self.error(key, value, f"an integer >= {least}")
        return next((value for _, value in found if value is not None), None)

    def choice(self, key: str, allowed: Collection[str], default: str) -> str:
        """Return a field that is one of these."""
        value = self.take(key, str, default)
        if value not in allowed:
            raise self.error(key, value, f"one of {', '.join(allowed)}")
        return value

    def activation(self, default: str) -> str:
        """Return activation_function."""
        name = self.take("activation_function", str, default)
        return activation_of(name, f"{self.file}: activation_function")

    def rest(self, unused: Collection[str] = ()) -> dict[str, Any]:
        """Return the fields that were not read, without empty ones and those in `unused`."""
        return {key: value for key, value in self._left.items() if value and key not in unused}

    def refuse_rest(self, unused: Collection[str] = _UNUSED_KEYS) -> None:
        """Raise ConfigError for a field that was not read."""
        for key, value in self.rest(unused).items():
            shown = json.dumps(value)
            raise ConfigError(
                f"{self.file}: {key} is {shown:.80}; quire does not support this field, which may "
                "change vectors: remove it if it does not"
            )

    def error(self, key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.file}: {key} is {value!r:.80}; it must be {allowed}")


class _FolderReader:
    """Reads the files of one folder into the fields of FolderModules."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self.found: dict[str, Any] = {}

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add a ConfigError to the problems."""
        try:
            yield
        except ConfigError as error:
            self.problems.append(str(error))

    def read_settings(self) -> None:
        fields = _JsonFields(self.folder / SETTINGS_FILE, optional=True)
        if "model_type" in fields:
            self.found["kind"] = KINDS[fields.choice("model_type", KINDS, "")]
        prompts = fields.take("prompts", dict, {})
        for name, text in prompts.items():
            if not isinstance(text, str):
                raise fields.error(f"prompts.{name}", text, "a string")
        default = fields.take_any("default_prompt_name", (str,))
        if default is not None and default not in prompts:
            allowed = f"null or one of its prompts ({', '.join(prompts) or 'there are none'})"
            raise fields.error("default_prompt_name", default, allowed)
        self.found |= {"prompts": prompts, "default_prompt": default}
        if self.found.get("kind") in ("sparse", "multi_vector"):
            fields.take_any("similarity_fn_name", (str,))
        else:
            self.found["similarity"] = fields.choice("similarity_fn_name", SIMILARITIES, "cosine")
        self.found["truncate_dim"] = fields.count("truncate_dim")
        if "activation_fn" in fields:
            name = fields.take("activation_fn", str, "")
            self.found["activation"] = activation_of(name, f"{fields.file}: activation_fn")
        self.found["settings"] = fields.rest(("__version__", "keep_in_fp32_modules"))

    def read_transformer(self) -> None:
        name = next((name for name in TRANSFORMER_FILES if (self.folder / name).is_file()), None)
        if name is None:
            return
        fields = _JsonFields(self.folder / name)
        self.found["max_seq_length"] = fields.count("max_seq_length")
        self.found["do_lower_case"] = fields.take("do_lower_case", bool, False)
        self.found["transformer"] = {
            key: value for key, value in fields.rest().items() if key in _EXPANSION_KEYS
        }
        fields.refuse_rest((*_UNUSED_KEYS, *_EXPANSION_KEYS))

    def read_modules(self) -> None:
        entries = self.entries()
        kinds = [kind for kind, _ in entries]
        if "kind" not in self.found:
            self.found["kind"] = self._infer_kind(kinds)
        allowed = MODULES[self.found["kind"]]
        places = [allowed.index(kind) for kind in kinds[1:] if kind in allowed]
        for kind in kinds[1:]:
            if kind not in allowed:
                self.problems.append(
                    f"{self._modules_file}: a {kind} module is not supported in this model; "
                    f"supported behind the Transformer: {', '.join(allowed)}"
                )
        if places != sorted(places):
            self.problems.append(
                f"{self._modules_file}: the modules are {', '.join(kinds)}; supported is the order "
                f"Transformer, {', '.join(allowed)}"
            )
        required = allowed[0] if self.found["kind"] in ("embed", "sparse") else None
        if required is not None and kinds.count(required) != 1:
            self.problems.append(
                f"{self._modules_file}: there must be one {required} module, and there are "
                f"{kinds.count(required)}"
            )
        for kind, path in entries[1:]:
            with self.collect():
                optional = kind in ("Normalize", "MultiVectorMask")
                file = self.folder / path / "config.json"
                _READERS[kind](self, _JsonFields(file, optional=optional), path)
        if self.found["kind"] == "multi_vector" and "MultiVectorMask" not in kinds:
            self.found["normalize"] = True  # PyLate does, without a module

    @property
    def _modules_file(self) -> Path:
        return self.folder / MODULES_FILE

    def entries(self) -> list[tuple[str, str]]:
        """Return kind and path of each module that computes something."""
        file = self._modules_file
        try:
            listed = json.loads(read_text(file, MAX_CONFIG_BYTES))
        except (ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(listed, list) or not listed:
            raise ConfigError(f"{file} must hold a list of modules, and it is {listed!r:.80}")
        found = []
        for at, entry in enumerate(listed):
            stated = entry.get("type") if isinstance(entry, dict) else None
            path = entry.get("path", "") if isinstance(entry, dict) else None
            if not isinstance(stated, str) or not isinstance(path, str):
                raise ConfigError(
                    f"{file}: module {at} is {entry!r:.80}; it must be an object with a type and a "
                    "path"
                )
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise ConfigError(
                    f"{file}: the path of module {at} is {path!r:.80}; it must be inside the folder"
                )
            kind = self._module_kind(stated, at)
            if at == 0 and path not in ("", "."):
                raise ConfigError(
                    f"{file}: the path of the Transformer is {path!r}; move the files in that "
                    'folder to the model\'s, and set the path to ""'
                )
            if kind != "Dropout":
                found.append((kind, path))
        return found

    def _module_kind(self, stated: str, at: int) -> str:
        package, _, kind = stated.partition(".")[0], "", stated.rpartition(".")[2]
        if kind == "MLMTransformer" or stated == ADAPTER_TYPE:
            package, kind = PACKAGES[0], "Transformer"
        if package == "pylate":
            self.found.setdefault("kind", "multi_vector")
        known = (*_READERS, "Transformer", "Dropout")
        if package not in PACKAGES or kind not in known or (at == 0) != (kind == "Transformer"):
            place = "the first module must be a Transformer" if at == 0 else "supported are"
            some = "" if at == 0 else f" {', '.join(_READERS)}"
            raise ConfigError(
                f"{self._modules_file}: module {at} is of type {stated!r:.120}; {place}{some} of "
                "sentence_transformers or pylate (types are not imported); with runner=generate "
                "these files are not read"
            )
        return kind

    def _infer_kind(self, kinds: list[str]) -> FolderKind:
        """Return what a folder is whose settings do not state it."""
        if "SpladePooling" in kinds:
            return "sparse"
        if "MultiVectorMask" in kinds:
            return "multi_vector"
        return "classify" if "LogitScore" in kinds else "embed"

    # -- modules ----------------------------------------------------------------------------

    def read_pooling(self, fields: _JsonFields, path: str) -> None:
        flags = {mode: fields.take(flag, bool, False) for flag, mode in FLAGS.items()}
        stated = fields.take_any("pooling_mode", (str, list))
        if stated is None:
            modes = [mode for mode, on in flags.items() if on] or ["mean"]
        else:
            modes = [stated] if isinstance(stated, str) else stated
        if not modes or not all(isinstance(mode, str) and mode in MODES for mode in modes):
            allowed = f"{', '.join(MODES)}, or a list of them"
            raise fields.error("pooling_mode", stated, allowed)
        self.found["methods"] = tuple(MODES[mode] for mode in modes)
        self.found["include_prompt"] = fields.take("include_prompt", bool, True)
        fields.count("embedding_dimension", "word_embedding_dimension")
        fields.refuse_rest()

    def read_dense(self, fields: _JsonFields, path: str) -> None:
        inputs, outputs = fields.count("in_features"), fields.count("out_features")
        if inputs is None or outputs is None:
            raise ConfigError(f"{fields.file}: in_features and out_features must be there")
        before = self.found.get("dense", ())
        if before and before[-1].outputs != inputs:
            raise fields.error("in_features", inputs, f"{before[-1].outputs}, as the layer before")
        section = DenseSection(
            folder=path,
            inputs=inputs,
            outputs=outputs,
            bias=fields.take("bias", bool, True),
            activation=fields.activation("torch.nn.modules.activation.Tanh"),
        )
        self.found["dense"] = (*before, section)
        fields.refuse_rest()

    def read_normalize(self, fields: _JsonFields, path: str) -> None:
        self.found["normalize"] = True
        fields.refuse_rest()

    def read_splade(self, fields: _JsonFields, path: str) -> None:
        fields.choice("pooling_strategy", ("max",), "max")
        fields.choice("activation_function", ("relu",), "relu")
        fields.count("embedding_dimension", "word_embedding_dimension", "chunk_size")
        self.found["methods"] = ("splade",)
        fields.refuse_rest()

    def read_mask(self, fields: _JsonFields, path: str) -> None:
        self.found["mask"] = fields.rest()

    def read_logit_score(self, fields: _JsonFields, path: str) -> None:
        true = fields.count("true_token_id", least=0)
        false = fields.count("false_token_id", least=0)
        if true is None:
            raise ConfigError(f"{fields.file}: true_token_id must be there")
        self.found["score_tokens"] = (true,) if false is None else (false, true)
        fields.refuse_rest()


_READERS: dict[str, Callable[[_FolderReader, _JsonFields, str], None]] = {
    "Pooling": _FolderReader.read_pooling,
    "Dense": _FolderReader.read_dense,
    "Normalize": _FolderReader.read_normalize,
    "SpladePooling": _FolderReader.read_splade,
    "MultiVectorMask": _FolderReader.read_mask,
    "LogitScore": _FolderReader.read_logit_score,
}
"""Type of a module behind the Transformer -> how its config is read."""
