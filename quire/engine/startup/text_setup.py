"""Text set-up: builds the tokenizer and the input processor of an engine from its config.

It needs no torch, so that an API process starts fast and stays small.
"""

from __future__ import annotations

import random
import socket
import subprocess
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from quire import env
from quire.config.encoder_facts import SpeechFacts
from quire.config.engine_config import EngineConfig, ModelSection
from quire.core.params import SamplingParams
from quire.engine.supervise.process_pipe import spawn_process
from quire.errors import ConfigError, RequestError
from quire.grammar.frontends import from_params
from quire.grammar.frontends.from_params import StructuredDefaults
from quire.media.limits import MediaLimits
from quire.media.pipeline import MediaPipeline, PipelineSettings
from quire.media.processor import ProcessorFiles, processor_type
from quire.media.processors.whisper import Processor
from quire.media.recording_reader import RecordingReader
from quire.text.encoder_format import EncoderFormat
from quire.text.input_processor import InputProcessor
from quire.text.media_prompt import MediaReader
from quire.text.pooling_input import PoolingInputProcessor
from quire.text.prompt_embeds import EmbedsFormat
from quire.text.speech import SpeechFormat, SpeechTokens
from quire.text.templates.chat_template import load_chat_template
from quire.text.tokenizing.tokenizer import Tokenizer, load_tokenizer

ParamCheck = Callable[[SamplingParams], None]


def load_engine_tokenizer(config: EngineConfig, folder: Path | None) -> Tokenizer | None:
    """Load the tokenizer in this folder, by the config; None for None."""
    if folder is None:
        return None
    model = config.model
    return load_tokenizer(
        folder,
        model.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        lower_case=config.pooling is not None and config.pooling.lower_case,
    )


def build_input_processor(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    *,
    checks: Iterable[ParamCheck] = (),
    process: int = 0,
) -> InputProcessor:
    """Build the input processor for the engine of this config. process: its index, for seeds."""
    seed = config.model.seed
    return InputProcessor(
        tokenizer,
        max_model_len=config.scheduler.max_model_len,
        vocab_size=config.model.vocab,
        eos_ids=config.sampling.eos_ids,
        defaults=_default_params(config),
        max_logprobs=config.model.max_logprobs,
        seeds=random.Random(seed if process == 0 else f"{seed} {process}"),
        checks=checks,
        constrain=partial(from_params.params_to_constraint, house=structured_defaults(config)),
        embeds=_embeds_format(config.model),
        encoder=_encoder_format(config, tokenizer),
        media=build_media_reader(config, tokenizer),
        media_adapters=() if config.adapters is None else config.adapters.media,
    )


def build_media_reader(config: EngineConfig, tokenizer: Tokenizer | None) -> MediaReader | None:
    """Build what reads images, video and audio. None: the model reads text only.

    A tokenizer without a chat template gets that of the family, if it has one. Without a tokenizer
    items are read that are whole prompts. The worker processes start when they are needed. Raises
    ConfigError.
    """
    section = config.media
    kind = None if section is None else processor_type(section.family)
    if section is None or (tokenizer is None and not (kind and kind.is_whole_prompt)):
        return None
    files = ProcessorFiles(
        section.config,
        section.preprocessors,
        section.processor,
        encode=None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False),
        vocabulary=None if tokenizer is None else tokenizer.backend.token_to_id,
    )
    settings = PipelineSettings(
        limits=MediaLimits(counts=section.counts),
        kwargs=section.kwargs,
        io_kwargs=section.io_kwargs,
        cache_bytes=section.cache_bytes,
        workers=section.workers,
        folder=None if section.folder is None else Path(section.folder),
        domains=section.domains,
        takes_embeds=section.takes_embeds,
        interleaves=section.interleaves,
        trusts_kwargs=section.trusts_kwargs,
    )
    try:
        pipeline = MediaPipeline(section.family, files, settings, start_media_worker)
        if tokenizer is not None and tokenizer.chat_template is None:
            tokenizer.chat_template = pipeline.processor.fallback_template
        return MediaReader(pipeline, tokenizer, config.scheduler.max_model_len)
    except RequestError as error:
        raise ConfigError(str(error)) from None


def start_media_worker() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that decodes and processes media, and return the other end of its pipe."""
    ours, theirs = socket.socketpair()
    with theirs:
        environment = env.sandbox_environment()
        worker = spawn_process("quire.media.media_worker", theirs, env=environment)
    return worker, ours


def build_pooling_processor(
    config: EngineConfig, tokenizer: Tokenizer | None, media: MediaReader | None
) -> PoolingInputProcessor | None:
    """Build the input processor of pooling requests. None: the model takes none.

    media: that of the other input processor.
    """
    if config.pooling is None:
        return None
    return PoolingInputProcessor(
        tokenizer,
        config.pooling,
        max_model_len=config.scheduler.max_model_len,
        vocab_size=config.model.vocab,
        generates=config.generates,
        chat_template=load_chat_template(config.model.chat_template),
        media=media,
    )


def _encoder_format(config: EngineConfig, tokenizer: Tokenizer | None) -> EncoderFormat | None:
    section = config.encoder
    if section is None or section.start_id is None:
        return None
    return EncoderFormat(
        section.max_len,
        section.start_id,
        section.forced_first,
        frozenset(section.forced_last),
        section.banned,
        section.banned_first,
        None if section.speech is None else _speech_format(section.speech, tokenizer, config),
    )


def _speech_format(
    speech: SpeechFacts, tokenizer: Tokenizer | None, config: EngineConfig
) -> SpeechFormat:
    bins, frames = speech.features
    files = ProcessorFiles({"num_mel_bins": bins, "max_source_positions": frames // 2})
    tokens = None
    if tokenizer is not None:
        (end, *_) = sorted(config.sampling.eos_ids) or [tokenizer.eos_token_id or 0]
        tokens = SpeechTokens.from_tokenizer(tokenizer, end, multilingual=speech.multilingual)
    reader = RecordingReader("whisper", files, start_media_worker)
    return SpeechFormat(
        tokens, Processor(files), reader, speech.last_first_time, config.aligns_sources
    )


def _embeds_format(model: ModelSection) -> EmbedsFormat | None:
    if model.prompt_embeds_width is None:
        return None
    return EmbedsFormat(model.prompt_embeds_width, model.dtype)


def _default_params(config: EngineConfig) -> SamplingParams:
    try:
        return SamplingParams(**config.sampling.defaults)
    except RequestError as error:
        message = f"generation_config.json, or what overrides it: {error}"
        raise ConfigError(message) from None


def structured_defaults(config: EngineConfig) -> StructuredDefaults:
    """Return defaults of structured outputs, for requests that do not set them."""
    structured = config.structured
    return StructuredDefaults(
        structured.backend,
        disable_any_whitespace=structured.disable_any_whitespace,
        disable_additional_properties=structured.disable_additional_properties,
        enable_in_reasoning=structured.enable_in_reasoning,
    )
