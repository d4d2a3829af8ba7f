"""Model setup: finds a model and reads its small files."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire import env
from quire.config.facts import (
    ModelFacts,
    count_weights_in_headers,
    read_hf_config,
    read_model_facts,
)
from quire.config.media import read_media_facts
from quire.config.options import Options
from quire.config.pooling import ModelUse, choose_model_use
from quire.config.pooling_facts import read_pooling_facts
from quire.config.quant.gguf import with_stored_types
from quire.config.speculation import find_drafter as read_drafter_facts
from quire.config.speculation import with_verifier
from quire.engine.startup.adapter_numbers import count_adapter_numbers
from quire.engine.startup.drafter_setup import DrafterDescription, find_drafter
from quire.engine.startup.encoder_facts import media_encoder_facts
from quire.errors import ConfigError
from quire.models.base import LabelTokens, ModelConfig
from quire.models.build import read_model_config
from quire.platform import cpu
from quire.text.tokenizing.tokenizer import load_tokenizer
from quire.weights.files import has_headers, read_headers, weight_files
from quire.weights.files import resolve_model_folder as resolve_folder
from quire.weights.hub import Contents

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model that was found, as its small files describe it."""

    folder: Path
    model_type: str
    config: ModelConfig
    facts: ModelFacts
    options: Options  # that serve it: those given, unless they name a head
    drafter: DrafterDescription | None = None  # None: none has weights


def torch_device(kind: str, local_rank: int = 0) -> torch.device:
    """The device of a rank's tensors: the CPU, or that one of the visible GPUs."""
    return torch.device("cpu") if kind == cpu.name else torch.device(kind, local_rank)


def describe_model(options: Options, environment: env.Env) -> ModelDescription:
    """Find the model and read its small files. No weights are read."""
    given = options.model
    folder = model_folder(given.model, given.revision, options, environment)
    options = with_verifier(options, folder)
    section = options.model
    if section is not given:
        folder = model_folder(section.model, section.revision, options, environment)
    config_folder = (
        folder
        if section.hf_config_path is None
        else model_folder(
            section.hf_config_path, section.revision, options, environment, want="config"
        )
    )
    hf = read_hf_config(config_folder, section.hf_overrides, section.config_format)
    if config_folder != folder:
        hf = with_stored_types(hf, folder)
    pooling = read_pooling_facts(folder, hf, generates=options.pooling.wants_text)
    use = choose_model_use(options.pooling, pooling, section.model)
    model_type, model_config = read_model_config(
        hf,
        section.model_impl,
        config_folder if section.trust_remote_code else None,
        head=use.head,
        labels=len(use.labels),
        head_dtype=pooling.head_dtype() if use.labels else "float32",
        label_tokens=_label_tokens(use, folder, options, environment),
        language_model_only=options.media.language_model_only,
    )
    if model_config.wrapper_type is not None and model_config.media is None:
        log.info(
            "the checkpoint is a multimodal model (%s); its text half (%s) is served, and requests "
            "with images, video or audio are refused",
            model_config.wrapper_type,
            model_type,
        )
    weights = None
    if _has_headers(folder, options.load.load_format):
        headers = read_headers(folder, options.load.load_format)
        weights = count_weights_in_headers(headers, hf, head=use.has_logits)
    if (usual := model_config.usual_fields()) is not None:
        hf = read_hf_config(config_folder, lambda _: usual, section.config_format)
    facts = read_model_facts(
        folder,
        hf=hf,
        name=section.model,
        overrides=section.hf_overrides,
        generation_config=section.generation_config,
        override_generation_config=section.override_generation_config,
        weights=weights,
        pooling=pooling,
    )
    layers = model_config.attention_layers()
    encoder = facts.encoder if any(layer.cross for layer in layers) else None
    facts = replace(
        facts,
        layers=layers,
        states=model_config.states,
        kinds=model_config.kinds,
        encoder=encoder,
        media=None
        if (media := model_config.media) is None
        else read_media_facts(config_folder, media.family, media.hf),
        adapters=count_adapter_numbers(options, model_type, model_config, folder),
        media_encoder=media_encoder_facts(model_config),
    )
    own = read_drafter_facts(
        options.speculation,
        lambda name, revision: model_folder(name, revision, options, environment),
        name=section.model,
        hf=hf,
    )
    drafter = find_drafter(options, own, model_type, model_config, hf, folder)
    if own is not None and drafter is not None:
        own = replace(own, memory=drafter.memory)
    facts = replace(facts, drafter=own)
    return ModelDescription(folder, model_type, model_config, facts, options, drafter)


def _label_tokens(
    use: ModelUse, folder: Path, options: Options, environment: env.Env
) -> LabelTokens | None:
    """Find the ids of the tokens whose logits are labels. Raises ConfigError."""
    if not use.label_tokens:
        return None
    section = options.model
    if section.tokenizer is not None:
        folder = model_folder(
            section.tokenizer,
            section.tokenizer_revision or section.revision,
            options,
            environment,
            want="tokenizer",
        )
    tokenizer = load_tokenizer(
        folder, section.tokenizer_mode, trust_remote_code=section.trust_remote_code
    )
    ids = []
    for token in use.label_tokens:
        found = token if isinstance(token, int) else tokenizer.backend.token_to_id(token)
        if found is None:
            raise ConfigError(
                f"classifier_from_token: {token!r} is not a token of the tokenizer in {folder}; "
                "upper and lower case differ, and so does a leading space"
            )
        ids.append(found)
    return LabelTokens(tuple(ids), use.label_difference)


def _has_headers(folder: Path, load_format: str) -> bool:
    """Whether the shapes of the weights can be read before the weights are."""
    if load_format == "dummy":
        return False
    kinds = ("*.safetensors", "*.gguf")
    return any(any(folder.glob(one)) for one in kinds) and has_headers(
        weight_files(folder, load_format)[0]
    )


def model_folder(
    name: str,
    revision: str | None,
    options: Options,
    environment: env.Env,
    want: Contents = "model",
) -> Path:
    """Find the folder of a model, of its small files alone, or of a tokenizer."""
    if want == "model" and options.load.load_format == "dummy":
        want = "config"
    return resolve_folder(
        name,
        revision=revision,
        token=options.model.hf_token,
        download_dir=options.load.download_dir,
        env=environment,
        want=want,
        load_format=options.load.load_format,
    )
