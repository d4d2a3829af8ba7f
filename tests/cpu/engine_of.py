"""A whole engine over a tiny random model, with every knob of the scheduler and the cache in hand."""

import dataclasses

import torch

from quire.config.engine_config import (
    CacheSection,
    DeviceSection,
    EncoderSection,
    EngineConfig,
    LoadSection,
    ModelSection,
    ObserveSection,
    ParallelSection,
    SamplingSection,
    SchedulerSection,
    SpeculationSection,
)
from quire.config.memory.captured_steps import CAPTURED_TOKENS
from quire.config.memory.kv_format import KV_FORMATS
from quire.config.memory.kv_layout import block_bytes, group_layers
from quire.core.params import SamplingParams
from quire.core.scheduling.drafting import Drafting
from quire.core.types import Request, StopConditions
from quire.engine.build import build_core, build_scheduler
from quire.engine.startup.drafter_setup import load_drafter
from quire.engine.startup.executor_setup import attach_model_states, build_executor, load_pooler
from quire.models.build import assign_kv_tensors, build_model, read_model_config
from quire.runner.media.media_rows import attach_media_rows
from quire.text.prompt_embeds import EmbedsFormat, PackedEmbeds, pack_embeds
from tests.pure.core.builders import FunctionDrafter

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
WINDOWED = {
    **TINY,
    "model_type": "gemma2",
    "num_hidden_layers": 3,
    "sliding_window": 24,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_models = {}


def model_of(hf, dtype, device="cpu"):
    """Built once per shape and dtype: random weights, spread so that greedy choices are not ties."""
    key = (hf["model_type"], hf.get("head_dim"), hf.get("is_causal"), dtype, device)
    if key not in _models:
        model_type, config = read_model_config(hf)
        config = dataclasses.replace(config, bidirectional=hf.get("is_causal") is False)
        _models[key] = (
            build_model(
                model_type,
                config,
                load_format="dummy",
                dtype=dtype,
                device=device,
                progress=False,
                seed=7,
            ),
            config,
        )
    return _models[key]


def engine_of(
    hf=TINY,
    *,
    target_s=0.0,
    dtype=torch.float32,
    kv=None,
    num_blocks=400,
    block_size=16,
    host_blocks=0,
    budget=512,
    seqs=32,
    max_len=400,
    prefix=True,
    chunked=True,
    policy="fcfs",
    depth=1,
    threshold=0,
    processors=(),
    grammars=None,
    eager=False,
    device="cpu",
    drafts=0,
    propose=None,
    pooling=None,
    built=None,
    media=None,
    speculation=None,
    drafter=None,
    checkpoints=16,
    checkpoint_tokens=128,
):
    """drafts, propose: maximum of a row, and a function in place of a host drafter.

    built: (model, config) in place of the random model of these fields. kv: a name in KV_FORMATS.

    media: a MediaEncoderSection, of a built model with a media encoder.

    speculation: a SpeculationSection, with the DrafterDescription `drafter` of its method.

    checkpoints: of the states of a model with recurrent layers, every so many tokens.

    pooling: a PoolingSection. A model with is_causal false has no KV: prompts are computed whole.
    """
    model, model_config = built or model_of(hf, dtype, device)
    layers = model_config.attention_layers() + (() if drafter is None else drafter.memory.layers)
    groups, kv = group_layers(layers), kv or str(dtype).removeprefix("torch.")
    states = model_config.states
    if not groups:
        num_blocks = 0
    if not groups and not states:
        prefix, chunked = False, False
    config = EngineConfig(
        model=ModelSection(
            name="tiny",
            model_type=hf["model_type"],
            tokenizer="",
            tokenizer_mode="auto",
            skip_tokenizer_init=True,
            trust_remote_code=False,
            dtype=str(dtype).removeprefix("torch."),
            seed=0,
            vocab=hf["vocab_size"],
            revision=None,
            tokenizer_revision=None,
            served_names=("tiny",),
            chat_template=None,
            max_logprobs=-1,
            logprobs_mode="raw_logprobs",
            logits_processors=(),
            disable_sliding_window=False,
        ),
        cache=CacheSection(
            block_size=block_size,
            num_blocks=num_blocks,
            num_host_blocks=host_blocks,
            prefix_caching=prefix,
            dtype=kv,
            layers=layers,
            groups=groups,
            block_bytes=block_bytes(layers, groups, block_size, KV_FORMATS[kv]),
            states=states,
            state_checkpoints=checkpoints,
            state_checkpoint_tokens=checkpoint_tokens,
            draft_states=seqs if drafts or speculation else 0,
        ),
        scheduler=SchedulerSection(
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_model_len=max_len,
            chunked_prefill=chunked,
            max_num_partial_prefills=0,
            max_long_partial_prefills=0,
            long_prefill_token_threshold=threshold,
            inter_token_target_s=target_s,
            policy=policy,
            steps_in_flight=depth,
        ),
        load=LoadSection(
            format="auto" if drafter else "dummy",
            download_dir=None,
            hf_token=None,
            progress=False,
        ),
        device=DeviceSection(
            kind=device,
            attention_backend="auto",
            threads=1,
            captured_tokens=CAPTURED_TOKENS,
            enforce_eager=eager,
        ),
        parallel=ParallelSection(tensor=1),
        sampling=SamplingSection(defaults={}, eos_ids=()),
        observe=ObserveSection(log_stats=False, log_level=None),
        encoder=EncoderSection(
            max_len=max_len,
            max_batched_tokens=max(budget, max_len),
            start_id=0,
            forced_first=None,
            forced_last=(),
            speech=None,
            banned=(),
            banned_first=(),
        )
        if hf.get("is_encoder_decoder")
        else None,
        media_encoder=media,
        pooling=pooling,
        generates=bool(groups or states),
        speculation=speculation or SpeculationSection(),
    )
    attach_model_states(model, config, torch.device(device))
    if media is not None:
        attach_media_rows(model, media.cache_rows, dtype, torch.device(device))
    pooler = load_pooler(model, None, config, torch.device(device))
    loaded = None
    if drafter is not None:
        assign_kv_tensors(model, groups)
        loaded = load_drafter(drafter, model, config, torch.device(device))
    half = build_executor(model, config, processors, grammars, pooler, drafter=loaded)
    scheduler = build_scheduler(config, grammars)
    engine = build_core(
        config, scheduler, half, check=True, background=[] if grammars is None else [grammars]
    )
    if speculation is None:
        host = (
            None
            if propose is None
            else FunctionDrafter(
                lambda seq, tokens: propose(dataclasses.replace(seq, tokens=tokens))
            )
        )
        engine._scheduler._drafting = Drafting(host, max_drafts=drafts, adaptive=False)
    return engine


def request(
    name,
    prompt,
    max_tokens,
    *,
    n=1,
    seed=0,
    priority=0,
    constraint=None,
    thinking=None,
    eos=(),
    vectors=None,
    source=(),
    **params,
):
    """vectors: [n, width], in place of the first n tokens of the prompt. source: of an encoder."""
    params.setdefault("temperature", 0.0)
    if n > 1 and params["temperature"] == 0.0:
        params["temperature"] = 1.0
    given = SamplingParams(n=n, max_tokens=max_tokens, **params)
    packed = PackedEmbeds((), ())
    if vectors is not None:
        packed = pack_embeds(vectors, (), EmbedsFormat(vectors.shape[1], "float32"))
    return Request(
        id=name,
        prompt=tuple(prompt),
        stop=StopConditions(
            max_tokens, given.min_tokens, frozenset(eos), frozenset(given.stop_token_ids or ())
        ),
        params=given,
        n=n,
        seed=seed,
        priority=priority,
        read_prefix_cache=given.prompt_logprobs is None,
        constraint=constraint,
        thinking=thinking,
        extra_content=packed.extra_content,
        prompt_embeds=packed.spans,
        encoder_prompt=tuple(source),
    )


def run(engine, requests, *, stagger=0):
    """(id, index) -> tokens, and the updates; requests join `stagger` steps apart."""
    waiting, out, updates, step = list(requests), {}, [], 0
    while waiting or not engine.idle:
        while waiting and (stagger == 0 or step % stagger == 0):
            engine.add(waiting.pop(0))
            if stagger:
                break
        for update in engine.step():
            out.setdefault((update.request_id, update.index), []).extend(update.token_ids)
            updates.append(update)
        step += 1
        assert step < 20000, "no progress"
    ends = [(u.request_id, u.index) for u in updates if u.finish]
    assert sorted(ends) == sorted(set(ends)), "a sequence ended twice"
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.held_host_blocks == stats.held_blocks == 0, stats
    engine.shutdown()
    return out, updates
