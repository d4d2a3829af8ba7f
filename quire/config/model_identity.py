"""Model identity: the model type, and the fields of the language model, of any config.json.

    config.json, overrides merged -> hoist_text -> resolve_identity -> what the rest of quire reads

A multimodal checkpoint is a wrapper: its config.json nests that of a language model beside those of
its towers (vision, audio), and its tensors have prefixes. The text half is served by itself.

`architectures` decides before `model_type`: checkpoints of a renamed model often keep the class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from quire.config.architectures import (
    ALIASES,
    CLASSES,
    ENCODED_HALVES,
    WRAPPERS,
    ModelAlias,
)
from quire.config.conventions import conventions_of, with_usual_names
from quire.config.geospatial import as_multimodal, is_geospatial
from quire.errors import ConfigError
from quire.registry import PluginRegistry

Json = Mapping[str, Any]
T = TypeVar("T")

TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Names of the section that holds the text half."""
LANGUAGE_PREFIXES = (
    *("model.language_model.", "language_model.", "thinker.", "model.text_model."),
    *("language.", "model.llm.", "llm."),
)
"""Prefixes of the tensors of a language model in the checkpoint of a wrapper."""
FLAT_WRAPPERS = {
    "chatglm": "vision_config",
    "molmo": "",
    "phi3_v": "img_processor",
    "phi4_multimodal": "vision_config",
    "phi4mm": "embd_layer",
    "qwen": "visual",
    "qwen2_vl": "",
    "qwen2_5_vl": "",
}
"""Wrappers with the fields of the text half at the top, some in their older files only -> the field
that tells them from a model of text; "": their type does."""

_TYPES = {
    class_name: model_type
    for model_type, class_name in CLASSES.items()
    if list(CLASSES.values()).count(class_name) == 1
}
_OUTER_FIELDS = (
    *("tie_word_embeddings", "quantization_config", "compression_config"),
    *("num_labels", "id2label", "problem_type", "sentence_transformers", "head_dtype"),
    *("sbert_ce_default_activation_function", "classifier_from_token", "method"),
    *("matryoshka_dimensions", "is_matryoshka", "task_instructions", "projection_dim"),
)
_NOT_OF_TEXT = {
    "blip": ("is_encoder_decoder", "eos_token_id"),
    "paligemma": ("use_bidirectional_attention",),
}
"""Wrapper -> fields of its text half that are about prompts with media only, or without effect."""
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_CLASS_SUFFIX = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
_BIDIRECTIONAL = re.compile(
    r"(Llama|Mistral|Qwen2|Qwen3|Gemma2?)(Encoder|Bi(directional)?)(Model|For\w+)$"
)
"""Classes of checkpoints whose decoders attend in both directions: of LLM2Vec and Nemotron."""
_BY_POSITIONS = {("bert", "alibi"): "jina_bert", ("xlm-roberta", "rotary"): "jina_embeddings_v3"}
"""Model type and position_embedding_type -> the type that these models have here."""
_BY_FIELDS = (
    ("deepseek_v2", "use_mla", False, "deepseek"),
    ("deepseek_v2", "topk_method", "noaux_tc", "deepseek_v3"),
)
"""Model type, a field and its value -> the type that these models have here."""
_TOWER = re.compile(
    r"(?:model\.)?(?:encoder\.)?(?:patch_embed|cls_token|pos_embed|(?:temporal|location)_embed_enc)\b"
    r"|(?:model\.|thinker\.|transformer\.)?(?!text_)[^.]*"
    r"(?:vision|visual|image|video|audio|speech|projector|projection|connector|aligner"
    r"|patch_merger|whisper|resampler|perceiver|qformer|query_tokens|sep[ae]rator"
    r"|embed_tokens_extend|\bmlp1\b|\bmerger\b|\bvpm\b|\bapm\b|\btts\b|\btalker\b|\btoken2wav\b"
    r"|\bcode2wav\b)"
)

_SPEAKING = ("talker.", "token2wav.", "code2wav.")
"""Prefixes of the tensors of Qwen-Omni's that make speech, which are not loaded."""


def is_tower_tensor(name: str) -> bool:
    """Whether a wrapper's tensor belongs to a tower, or to what connects it to the text half."""
    return _TOWER.match(name) is not None


def encoder_tensors(tensors: Mapping[str, T]) -> Iterator[T]:
    """Yield what belongs to towers and to what connects them, without what makes speech."""
    for name, one in tensors.items():
        if is_tower_tensor(name) and not name.startswith(_SPEAKING):
            yield one


def wrapper_prefixes(own: Iterable[str]) -> tuple[str, ...]:
    """Prefixes of a language model's tensors inside any wrapper, longest first.

    own: the prefixes that they have by themselves.
    """
    inner = ("", *own)
    found = {f"{outer}{one}" for outer in ("", *LANGUAGE_PREFIXES) for one in inner} - {""}
    return tuple(sorted(found, key=lambda prefix: (-len(prefix), prefix)))


def media_family(hf: Json) -> str | None:
    """Return the file of quire.models.multimodal with the media encoder of a wrapper.

    hf: of resolve_identity(). None: it is no wrapper, or there is no file for it or its text half.
    """
    half = hf.get("model_type")
    if half not in ENCODED_HALVES and half not in PluginRegistry("quire.models").names():
        return None
    name = re.sub(r"\W", "_", str(hf.get("wrapper_type", ""))).lower()
    return name if name in PluginRegistry("quire.models.multimodal").names() else None


def hoist_text(hf: Json) -> dict[str, Any]:
    """Return the fields of the text half, with those of the wrapper that are about it.

    `wrapper_type` is then the wrapper's model type, and `wrapper_config` its whole file. Dtype,
    tied embeddings and quantization are the wrapper's where it states them; end tokens are those of
    both.
    """
    if is_geospatial(hf):
        hf = as_multimodal(hf)
    outer_type = hf.get("model_type")
    key = next((key for key in TEXT_SECTIONS if _is_text_half(hf.get(key), outer_type)), None)
    if key is None:
        return {**hf, **_as_flat_wrapper(hf)}
    inner = hoist_text(hf[key])
    for name in _NOT_OF_TEXT.get(outer_type, ()) if isinstance(outer_type, str) else ():
        inner.pop(name, None)
    wins = [name for name in _OUTER_FIELDS if hf.get(name) is not None]
    if any(hf.get(name) is not None for name in _DTYPE_FIELDS):
        wins += _DTYPE_FIELDS
    made = {**inner, **{name: hf.get(name) for name in wins}}
    ends = [*_listed(inner.get("eos_token_id")), *_listed(hf.get("eos_token_id"))]
    if ends:
        made["eos_token_id"] = list(dict.fromkeys(ends)) if len(set(ends)) > 1 else ends[0]
    made["architectures"] = inner.get("architectures")
    made["model_type"] = inner.get("model_type") or _known_half(outer_type) or outer_type
    made["wrapper_type"] = outer_type or "unnamed"
    made["wrapper_config"] = hf
    made["wrapper_architectures"] = hf.get("wrapper_architectures") or hf.get("architectures")
    return made


def _as_flat_wrapper(hf: Json) -> dict[str, Any]:
    """Return what marks a flat config.json as that of a wrapper; {}: it is none."""
    mark = FLAT_WRAPPERS.get(str(hf.get("model_type")))
    if mark is None or (mark and not hf.get(mark)):
        return {}
    return {"wrapper_type": hf["model_type"], "wrapper_config": hf.get("wrapper_config", hf)}


def resolve_identity(hf: Json) -> dict[str, Any]:
    """Return config.json as the rest of quire reads it: of a text model, its type resolved.

    Raises: ConfigError (it names no model, or in another form than text).
    """
    found = hoist_text(hf)
    classes, stated = found.get("architectures"), found.get("model_type")
    if stated is not None and not isinstance(stated, str):
        raise ConfigError(f"config.json: model_type is {stated!r:.80}; it must be a string")
    for stated_classes in (classes, found.get("wrapper_architectures")):
        if stated_classes is not None and not (
            isinstance(stated_classes, list) and all(isinstance(x, str) for x in stated_classes)
        ):
            raise ConfigError(
                f"config.json: architectures is {stated_classes!r:.80}; it must be a list of class "
                "names"
            )
    if isinstance(positions := found.get("position_embedding_type"), str):
        stated = _BY_POSITIONS.get((str(stated), positions), stated)
    names = [_TYPES.get(one, _CLASS_SUFFIX.sub("", one)) for one in classes or () if _named(one)]
    if not names and not stated:
        raise ConfigError(
            "config.json has neither architectures nor model_type, so it names no model; add one "
            'of them, or give --hf-overrides {"model_type": "llama"}'
        )
    served = (_served_as(name, found) for name in (*names, *([stated] if stated else [])))
    model = next(filter(None, served), None)
    if model is None:
        model = ModelAlias(_other_type(stated, classes or ()))
    for known, field, value, target in _BY_FIELDS:
        if model.target == known and found.get(field) == value:
            model = model._replace(target=target)
    found = {**model.defaults, **found, "model_type": model.target}
    if any(_BIDIRECTIONAL.match(one) for one in classes or ()):
        found.setdefault("is_causal", False)
    found = with_usual_names(found)
    if "wrapper_type" in found:
        found = {**conventions_of(found).nested_defaults, **found}
    return found


def _is_text_half(section: object, outer_type: object) -> bool:
    """Whether a nested section describes a language model, so far as one can see."""
    if not isinstance(section, Mapping) or not section:
        return False
    marks = ("model_type", "architectures", "num_hidden_layers", *TEXT_SECTIONS)
    return _known_half(outer_type) is not None or any(section.get(mark) for mark in marks)


def _known_half(outer_type: object) -> str | None:
    return WRAPPERS.get(outer_type) if isinstance(outer_type, str) else None


def _named(class_name: str) -> bool:
    """Whether a class generates text, so that its name counts."""
    return _CLASS_SUFFIX.search(class_name) is not None


def _served_as(name: str, hf: Json) -> ModelAlias | None:
    """Return the model of quire that has this name, or for which it is an alias."""
    names = {_plain(known): known for known in PluginRegistry("quire.models").names()}
    aliases = {_plain(one): alias for one, alias in ALIASES.items()}
    aliases |= {_plain(one): ALIASES[f"{one}_text"] for one in FLAT_WRAPPERS}
    found = aliases.get(_plain(name))
    if found is None or any(hf.get(field) for field in found.unless):
        found = ModelAlias(name)
    known = names.get(_plain(found.target))
    return None if known is None else found._replace(target=known)


def _other_type(stated: str | None, classes: Iterable[str]) -> str:
    """Return a type that quire has no file for: as stated, or of a class of transformers."""
    if stated is not None and stated in CLASSES:
        return stated
    named = [one for one in classes if _named(one)]
    found = next((_TYPES[one] for one in named if one in _TYPES), stated)
    return found or _CLASS_SUFFIX.sub("", named[0]).lower()


def _plain(name: str) -> str:
    """A name without what class names and model types write differently."""
    return re.sub(r"[_\-]", "", name).lower()


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]
