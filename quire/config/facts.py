"""Facts: properties of the model's files and of the device, independent of the options.

Model facts are read from config.json by the keys that models share and by the conventions that the
model's file states, so that a model can be planned without its code. quire.models reads the same
file strictly, and its attention_layers() replace `layers` when an engine is built.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from quire.config import recurrent_layers
from quire.config.conventions import conventions_of, fill_defaults, spare_layers
from quire.config.drafters import DrafterFacts
from quire.config.encoder_facts import EncoderFacts as EncoderFacts
from quire.config.encoder_facts import SpeechFacts, image_reader, longest_image
from quire.config.json_file import (
    MAX_CONFIG_BYTES,
    check_sizes,
    raise_as_config_error,
    read_json_object,
)
from quire.config.media import MediaFacts
from quire.config.memory.kv_layout import LayerFacts
from quire.config.memory.part_facts import AdapterNumbers, MediaEncoderFacts
from quire.config.memory.state_layout import StateFacts
from quire.config.memory.weight_facts import WeightFacts, count_media, count_tensors
from quire.config.mistral_format import PARAMS_FILE, config_of_params, read_params
from quire.config.model_identity import (
    TEXT_SECTIONS,
    encoder_tensors,
    hoist_text,
    is_tower_tensor,
    media_family,
    resolve_identity,
)
from quire.config.pooling_facts import PoolingFacts, is_bidirectional, read_pooling_facts
from quire.config.quant.facts import QuantFacts
from quire.config.quant.held import Header, MatrixFacts
from quire.config.quant.read import read_quantization
from quire.config.quant.side_files import with_side_file
from quire.errors import ConfigError

Json = Mapping[str, Any]
ConfigFormat = Literal["auto", "hf", "mistral"]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
LENGTH_KEYS = (
    "attention_chunk_size",
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_target_positions",
    "max_trained_positions",
)
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model", "n_embed", "dim")
UNSCALED_ROPE = ("default", "ntk", "su", "longrope", "llama3", "mrope", "proportional")
OUTPUT_HEADS = ("lm_head.", "cls.", "embed_out.", "vocab_transform.", "vocab_projector.")
"""First parts of the names of output heads, also of encoders that predict masked tokens."""
DEFAULT_ENCODER_LEN = 512
"""Tokens of a source, if config.json states no length: positions are relative."""
MAX_TOKENIZER_LENGTH = 10**9
"""Tokenizers without a length limit have 10**30."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as its files describe it."""

    name: str
    model_type: str
    architectures: tuple[str, ...]
    dtype: str | None  # of the checkpoint; None: not stated
    max_len: int | None
    vocab: int
    hidden: int
    embedding: int  # numbers of a token's embedding, before what projects it to `hidden`
    mlp: int
    heads: int
    layers: tuple[LayerFacts, ...]  # what each keeps in the cache; (): there is none
    states: tuple[StateFacts, ...] = ()  # what each recurrent layer keeps
    kinds: tuple[str, ...] = ()  # of each layer: quire.config.recurrent_layers; (): all attend
    weights: WeightFacts
    eos_ids: tuple[int, ...] = ()
    generation: Json
    quantization: QuantFacts | None = None  # of the checkpoint
    rotary: int = 0  # angles kept per position, in float32; 0: no rotary positions
    experts: int = 0  # of a layer
    top_k: int = 0  # experts a token goes to; 0: no mixture of experts
    expert_mlp: int = 0
    encoder: EncoderFacts | None = None  # None: a decoder alone
    media: MediaFacts | None = None  # None: it reads text only
    fits_float16: bool = True  # False: its activations overflow there
    pooling: PoolingFacts = field(default_factory=PoolingFacts)
    adapters: AdapterNumbers = field(default_factory=AdapterNumbers)  # of an engine that has them
    media_encoder: MediaEncoderFacts | None = None  # None: it reads text only
    drafter: DrafterFacts | None = None  # what makes drafts with weights; None: nothing does


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The device an engine runs on."""

    kind: str  # "cpu", "cuda"
    total_bytes: int
    free_bytes: int
    name: str = ""
    threads: int = 1
    count: int = 1
    capability: tuple[int, int] = (0, 0)  # of a CUDA device
    host_free_bytes: int | None = None  # of the host of a GPU; None: unknown, or it is the device

    @property
    def has_fp8(self) -> bool:
        """Whether FP8 numbers are multiplied: not by GPUs before Ada. Unknown GPUs are newer."""
        return not (0, 0) < self.capability < (8, 9)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; {} if there is no file. Raises ConfigError."""
    return read_json_object(path, MAX_CONFIG_BYTES) if path.is_file() else {}


def read_hf_config(
    folder: Path,
    overrides: Json | Callable[..., Any] | None = None,
    config_format: ConfigFormat = "auto",
) -> dict[str, Any]:
    """Read config.json of a model's folder, merge hf_overrides into it, and resolve what it names.

    Overrides may nest as the file does; those that do not also reach its text half.
    """
    hf = with_side_file(folder, read_config_file(folder, config_format))
    check_sizes(hf)
    if callable(overrides):
        changed = overrides(copy.deepcopy(hf))
        if not isinstance(changed, dict):
            message = "hf_overrides: the function must return the config as a dict"
            raise ConfigError(f"{message}, got {type(changed).__name__}")
        after = hoist_text(changed)
    else:
        overrides = overrides or {}
        flat = {key: value for key, value in overrides.items() if key not in TEXT_SECTIONS}
        after = merge_dicts(hoist_text(merge_dicts(hf, overrides)), flat)
    after = merge_rope_overrides(hoist_text(hf), after)
    check_sizes(after)
    return resolve_identity(after)


def read_config_file(folder: Path, config_format: ConfigFormat = "auto") -> dict[str, Any]:
    """Read config.json, or params.json as one. auto: config.json if there is one.

    Raises: ConfigError (neither is there, or not the one that is demanded).
    """
    path = folder / "config.json"
    stated = (folder / PARAMS_FILE).is_file() and not path.is_file()
    if config_format == "mistral" or (config_format == "auto" and stated):
        with raise_as_config_error(PARAMS_FILE):
            return config_of_params(read_params(folder))
    if path.is_file():
        return read_json(path)
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    found = ", ".join(names[:8]) or "nothing"
    raise ConfigError(f"no config.json in {folder} (found: {found}); give a model's folder")


def merge_rope_overrides(before: Json, after: dict[str, Any]) -> dict[str, Any]:
    """Return `after`, with rotary settings of the older style moved into rope_parameters.

    Newer checkpoints have rope_parameters, which would hide the older settings.
    """
    inner = after.get("rope_parameters")
    if not isinstance(inner, Mapping) or inner != before.get("rope_parameters"):
        return after
    scaling = after.get("rope_scaling")
    settings = dict(scaling) if scaling and scaling != before.get("rope_scaling") else {}
    if "type" in settings:
        settings.setdefault("rope_type", settings.pop("type"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if after.get(key) != before.get(key):
            settings.setdefault(key, after[key])
    if not settings:
        return after
    if any(isinstance(value, Mapping) for value in inner.values()):
        raise ConfigError(
            "hf_overrides: this model has rotary settings per layer type; override rope_parameters"
        )
    rest = {key: value for key, value in after.items() if key != "rope_scaling"}
    return rest | {"rope_parameters": {**inner, **settings}}


def merge_dicts(base: Json, over: Json) -> dict[str, Any]:
    """Merge `over` into `base`, recursively for dicts."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merge_dicts(out[key], value) if both else value
    return out


def read_generation_config(folder: Path, source: str, overrides: Json) -> dict[str, Any]:
    """Read sampling defaults: generation_config.json of the model or a folder, with overrides."""
    if source in ("vllm", "quire", "none"):
        return dict(overrides)
    if source != "auto" and not (Path(source) / "generation_config.json").is_file():
        allowed = '"auto", "vllm", "quire" or a folder with a generation_config.json'
        raise ConfigError(f"generation_config must be {allowed}, got {source!r}")
    where = folder if source == "auto" else Path(source)
    return merge_dicts(read_json(where / "generation_config.json"), overrides)


def read_model_facts(
    folder: Path,
    *,
    hf: Json | None = None,
    name: str | None = None,
    overrides: Json | Callable[..., Any] | None = None,
    generation_config: str = "auto",
    override_generation_config: Json | None = None,
    weights: WeightFacts | None = None,
    pooling: PoolingFacts | None = None,
) -> ModelFacts:
    """Read the facts from the small files of a model's folder.

    hf: what read_hf_config() returned, with the same overrides; None: it is called. pooling: of
    read_pooling_facts(); None: it is called.
    """
    hf = read_hf_config(folder, overrides) if hf is None else hf
    files = read_json(folder / "generation_config.json")
    generation = read_generation_config(folder, generation_config, override_generation_config or {})
    tokenizer_length = read_json(folder / "tokenizer_config.json").get("model_max_length")
    if isinstance(overrides, Mapping) and not overrides.keys().isdisjoint(LENGTH_KEYS):
        tokenizer_length = None  # a length that the user sets is meant
    return model_facts(
        hf,
        name=name or str(folder),
        generation=generation,
        eos=(files.get("eos_token_id"), generation.get("eos_token_id")),
        forced={**files, **generation},
        tokenizer_length=tokenizer_length,
        weights=weights,
        pooling=read_pooling_facts(folder, hf) if pooling is None else pooling,
    )


def model_facts(
    hf: Json,
    *,
    name: str = "",
    generation: Json | None = None,
    eos: Sequence[object] = (),
    tokenizer_length: object = None,
    weights: WeightFacts | None = None,
    forced: Json | None = None,
    pooling: PoolingFacts | None = None,
) -> ModelFacts:
    """Return the facts from config.json as a dict. Raises ConfigError.

    forced: a generation config, whatever the sampling defaults are. pooling: with the other files.
    """
    with raise_as_config_error("config.json"):
        facts = _model_facts(hf, name, generation, eos, tokenizer_length, weights, forced or {})
        return replace(facts, pooling=pooling or PoolingFacts(hf=hf))


def _model_facts(
    hf: Json,
    name: str,
    generation: Json | None,
    eos: Sequence[object],
    tokenizer_length: object,
    weights: WeightFacts | None,
    forced: Json,
) -> ModelFacts:
    hf = fill_defaults(hf)
    layers, states = layer_facts(hf), recurrent_layers.state_facts(hf)
    if not layers and not states:
        raise ConfigError("config.json: it has no attention layers")
    cached = () if is_bidirectional(hf) else layers
    return ModelFacts(
        name=name,
        model_type=str(hf.get("model_type", "")),
        architectures=tuple(hf.get("architectures") or ()),
        dtype=_dtype(hf.get("dtype") or hf.get("torch_dtype")),
        max_len=context_length(hf, tokenizer_length),
        vocab=_int(hf, "vocab_size"),
        hidden=_int(hf, *HIDDEN_KEYS),
        embedding=_int(hf, *conventions_of(hf).embedding_keys, *HIDDEN_KEYS),
        mlp=int(hf.get("shared_intermediate_size") or _mlp(hf)),
        heads=_heads(hf),
        layers=cached,
        states=states,
        kinds=recurrent_layers.layer_kinds(hf),
        weights=weights or estimate_weights(hf, layers),
        eos_ids=_ids(hf.get("eos_token_id"), *eos),
        generation=dict(generation or {}),
        quantization=read_quantization(hf),
        rotary=_rotary(hf, layers),
        experts=_experts(hf)[0],
        top_k=(top_k := _experts(hf)[1]),
        expert_mlp=int(hf.get("moe_intermediate_size") or _mlp(hf)) if top_k else 0,
        fits_float16=conventions_of(hf).fits_float16,
        encoder=_encoder(hf, forced) if hf.get("is_encoder_decoder") else image_reader(hf),
    )


def _encoder(hf: Json, forced: Json) -> EncoderFacts:
    """Fields of the generation config, which older models have in config.json, win."""
    found = {**hf, **{key: value for key, value in forced.items() if value is not None}}
    start = _ids(found.get("decoder_start_token_id"), found.get("bos_token_id"))
    if not start:
        raise ConfigError(
            "config.json: decoder_start_token_id is missing: it is the decoder's first token; set "
            'it with hf_overrides={"decoder_start_token_id": ...}'
        )
    speech = SpeechFacts.from_hf(found) if conventions_of(hf).source == "audio" else None
    longest = longest_image(hf) or context_length(hf) or DEFAULT_ENCODER_LEN
    words = [word for word in found.get("bad_words_ids") or () if len(word) == 1]
    return EncoderFacts(
        max_len=speech.positions if speech else longest,
        speech=speech,
        start_id=start[0],
        forced_first=next(iter(_ids(found.get("forced_bos_token_id"))), None),
        forced_last=_ids(found.get("forced_eos_token_id")),
        banned=_ids(found.get("suppress_tokens"), *words),
        banned_first=_ids(found.get("begin_suppress_tokens")),
    )


def _rotary(hf: Json, layers: Sequence[LayerFacts]) -> int:
    """Length of a row of the rotary tables: a cosine and a sine for every other dimension."""
    unrotated = hf.get("alibi") or hf.get("position_embedding_type") == "nope"
    if conventions_of(hf).positions_kind != "rotary" or unrotated:
        return 0
    sizes = {layer.head_dim for layer in layers}
    if len(sizes) > 1:  # a table for each, of whole heads
        return sum(sizes)
    rope = hf.get("rope_parameters") or {}
    shares = (rope.get("partial_rotary_factor"), hf.get("partial_rotary_factor"))
    share = next((share for share in (*shares, hf.get("rotary_pct")) if share), 1)
    dims = hf.get("qk_rope_head_dim") or hf.get("rotary_dim") or int(layers[0].head_dim * share)
    return int(dims) * _rope_tables(hf, rope)


def _rope_tables(hf: Json, rope: Json) -> int:
    """How many tables there are: layers with a window, and queries, may have one of their own."""
    if kinds := [section for section in rope.values() if isinstance(section, Mapping)]:
        return 1 + any(section != kinds[0] for section in kinds)
    unscaled = conventions_of(hf).windows_unscaled and bool(hf.get("rope_scaling"))
    own = hf.get("rope_local_base_freq") or rope.get("llama_4_scaling_beta")
    return 2 if unscaled or own or hf.get("attn_temperature_tuning") else 1


def _experts(hf: Json) -> list[int]:
    """[experts of a layer, experts per token], under any of the names that models use."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    per_token = ("num_experts_per_tok", "experts_per_token", "top_k_experts")
    found = [next((int(hf[n]) for n in some if hf.get(n)), 0) for some in (names, per_token)]
    return found if found[0] and recurrent_layers.count_experts(hf, 1) else [0, 0]


def layer_facts(hf: Json) -> tuple[LayerFacts, ...]:
    """Return KV heads, head size and window of each layer."""
    if hf.get("kv_lora_rank"):
        latent = _int(hf, "kv_lora_rank")
        kept = LayerFacts(1, latent + _int(hf, "qk_rope_head_dim"), latent=latent)
        return (kept,) * _int(hf, "num_hidden_layers")
    if not recurrent_layers.has_attention(hf):
        return ()
    shapes = head_shapes(hf)
    if hf.get("is_encoder_decoder"):
        own = LayerFacts(*shapes[0])
        return (own, replace(own, cross=True)) * len(shapes)
    windows = conventions_of(hf).window_per_layer(hf, len(shapes))
    layers = tuple(LayerFacts(*shape, window) for shape, window in zip(shapes, windows))
    layers = tuple(layers[i] for i in recurrent_layers.attention_numbers(hf, len(layers)))
    layers = layers[len(hf.get(conventions_of(hf).uncached_layers) or ()) :]
    return layers[: len(layers) - int(hf.get("num_kv_shared_layers") or 0)]


def head_shapes(hf: Json) -> list[tuple[int, int]]:
    """Return (KV heads, head size) of each layer, those included that read another's cache."""
    heads = _heads(hf)
    head_dim = int(hf.get("head_dim") or hf.get("d_kv") or _int(hf, *HIDDEN_KEYS) // heads)
    kv_heads = _kv_heads(hf, heads)
    own = ("num_decoder_layers", "decoder_layers") if hf.get("is_encoder_decoder") else ()
    count = _int(hf, *own, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    shapes = [(kv_heads, head_dim)] * count
    if stated := hf.get("per_layer_config"):
        for i, layer in stated.items():
            found = layer.get("num_key_value_heads") or kv_heads, layer.get("head_dim") or head_dim
            shapes[int(i)] = (int(found[0]), int(found[1]))
    elif size := hf.get("global_head_dim"):
        few = hf.get("num_global_key_value_heads") if hf.get("attention_k_eq_v") else None
        windows = conventions_of(hf).window_per_layer(hf, count)
        full = (int(few or kv_heads), int(size))
        shapes = [full if w is None else shape for shape, w in zip(shapes, windows)]
    return shapes


def _kv_heads(hf: Json, heads: int) -> int:
    if hf.get("new_decoder_architecture"):  # of Falcon: multi_query is about the older ones
        return int(hf.get("num_kv_heads") or heads)
    return int(hf.get("num_key_value_heads") or (1 if hf.get("multi_query") else heads))


def context_length(hf: Json, tokenizer_length: object = None) -> int | None:
    """Smallest length in the files, rope scaling included. None if they have none."""
    lengths = [int(hf[key]) for key in LENGTH_KEYS if isinstance(hf.get(key), int)]
    length = min(lengths) if lengths else None
    if length is not None:
        length = _scaled(hf, length)
        if conventions_of(hf).positions_after_padding:
            padding = hf.get("pad_token_id")
            length -= (1 if padding is None else int(padding)) + 1
    if isinstance(tokenizer_length, int) and 0 < tokenizer_length < MAX_TOKENIZER_LENGTH:
        length = tokenizer_length if length is None else min(length, tokenizer_length)
    return length


def _scaled(hf: Json, length: int) -> int:
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in UNSCALED_ROPE or not conventions_of(hf).scaling_extends:
        return length
    if kind == "yarn":
        length = int(rope.get("original_max_position_embeddings") or length)
    return int(length * float(rope.get("factor") or 1))


def estimate_weights(hf: Json, layers: Sequence[LayerFacts]) -> WeightFacts:
    """Estimate elements of a dense (or mixture) decoder of these sizes, without tensor headers."""
    hidden, vocab, mlp = _int(hf, *HIDDEN_KEYS), _int(hf, "vocab_size"), _mlp(hf)
    family, has_encoder = conventions_of(hf), bool(hf.get("is_encoder_decoder"))
    if groups := hf.get("num_hidden_groups"):  # which all layers share
        layers = layers[: int(groups) * int(hf.get("inner_group_num") or 1)]
    size = _int(hf, *conventions_of(hf).embedding_keys, *HIDDEN_KEYS)
    matrices = vocab * size * (1 if has_tied_embeddings(hf) else 2)
    if family.positions_kind == "learned":
        positions = _int(hf, "max_position_embeddings", "n_positions", "max_target_positions") + 2
        matrices += size * positions * (2 if has_encoder else 1)
    tables = matrices
    experts, _ = _experts(hf)
    each, shared = int(hf.get("moe_intermediate_size") or mlp), int(hf.get("n_shared_experts") or 0)
    gated = int(hf.get("shared_expert_intermediate_size") or 0)  # a shared expert with a gate
    width = int(hf.get("moe_shared_expert_intermediate_size") or each * shared) + gated
    beside = int(hf.get("shared_intermediate_size") or 0)  # of an MLP in all layers
    latent_size = int(hf.get("moe_latent_size") or 0)  # of what experts read
    plain = family.mlp_kind == "plain" and "gated" not in str(hf.get("feed_forward_proj"))
    fan = (2 if plain else 3) * hidden
    count = recurrent_layers.count_mlps(hf, sum(not layer.cross for layer in layers))
    sparse = recurrent_layers.count_experts(hf, _sparse_layers(hf, count)) if experts else 0
    dense = count if beside or hf.get("enable_moe_block") else count - sparse  # beside experts
    chosen = fan // hidden * (latent_size or hidden) * each * experts
    bank = chosen + fan * width + (experts + bool(gated) + 2 * latent_size) * hidden
    wide = int(hf.get("intermediate_size_mlp") or beside or mlp)
    matrices += dense * fan * wide + sparse * bank
    if has_encoder:
        inner = fan * int(hf.get("encoder_ffn_dim") or mlp)
        inner += _attention_weights(hf, hidden, layers[0])
        matrices += _int(hf, "encoder_layers", "num_layers") * inner
    matrices += sum(_attention_weights(hf, hidden, layer) for layer in layers)
    matrices += recurrent_layers.recurrent_weights(hf, _heads(hf))
    if hf.get("num_kv_shared_layers"):
        matrices += _shared_layer_weights(hf, hidden, fan * mlp, len(layers))
        matrices += int(hf["num_kv_shared_layers"]) * bank if experts else 0
    if width := int(hf.get("hidden_size_per_layer_input") or 0):
        count = _int(hf, "num_hidden_layers")
        table = count * width * _int(hf, "vocab_size_per_layer_input")
        matrices, tables = matrices + table + 3 * count * width * hidden, tables + table
    latent = sum(_absorbed_weights(hf, one) for one in layers if one.latent)
    inner = sparse * chosen
    rest = matrices - tables - inner - sparse * experts * hidden - latent
    sizes = {"layers.mlp": rest, "layers.mlp.experts": inner}
    found = tuple(MatrixFacts(name, n // hidden, hidden) for name, n in sizes.items() if n)
    head = MatrixFacts("lm_head", vocab, size)
    return WeightFacts(
        matrices, hidden * (4 * len(layers) + 1), found, head, has_tied_embeddings(hf)
    )


def _absorbed_weights(hf: Json, layer: LayerFacts) -> int:
    """Elements of what makes keys and values of a latent, which is never quantized."""
    sizes = _int(hf, "qk_nope_head_dim") + _int(hf, "v_head_dim")
    return layer.latent * _heads(hf) * sizes


def _shared_layer_weights(hf: Json, hidden: int, mlp: int, first: int) -> int:
    """Elements of the layers from `first` on, which have no keys and values of their own."""
    wide = 2 if hf.get("use_double_wide_mlp") else 1
    sizes = [size for _, size in head_shapes(hf)[first:]]
    return sum(2 * _heads(hf) * size * hidden + wide * mlp for size in sizes)


def _sparse_layers(hf: Json, count: int) -> int:
    """How many layers have experts."""
    if stated := hf.get("moe_layers"):
        return len(stated)
    first = int(hf.get("first_k_dense_replace") or hf.get("num_dense_layers") or 0)
    every = int(hf.get("decoder_sparse_step") or hf.get("interleave_moe_layer_step") or 1)
    dense = hf.get("mlp_only_layers") or ()
    return sum(i not in dense and (i + 1) % every == 0 for i in range(first, count))


def _attention_weights(hf: Json, hidden: int, layer: LayerFacts) -> int:
    """Elements of one layer's projections."""
    heads = _heads(hf)
    if not layer.latent:
        alike = hf.get("attention_k_eq_v") and layer.window is None  # keys are values too
        return hidden * layer.head_dim * (2 * heads + (1 if alike else 2) * layer.kv_heads)
    plain, value, rank = _int(hf, "qk_nope_head_dim"), _int(hf, "v_head_dim"), hf.get("q_lora_rank")
    queries = heads * (plain + layer.head_dim - layer.latent)
    query = rank * (hidden + queries) if rank else hidden * queries
    keys_values = hidden * layer.head_dim + layer.latent * heads * (plain + value)
    return int(query) + keys_values + hidden * heads * value


def count_weights_in_headers(
    headers: Mapping[str, Header], hf: Json, *, head: bool = True
) -> WeightFacts:
    """Count the weights that are loaded, from tensor headers.

    Left out are a tied output head, towers without a media encoder here, and layers after the last,
    which predict further tokens. head: whether the output head is loaded.
    """
    tied, spare = has_tied_embeddings(hf), spare_layers(hf)
    wrapped = "wrapper_type" in hf

    def is_loaded(name: str) -> bool:
        return not (
            (tied and name.endswith("lm_head.weight"))
            or (wrapped and is_tower_tensor(name))
            or (not head and name.startswith(OUTPUT_HEADS))
            or any(layer in name for layer in (*spare, "mtp_layers.", "mtp."))
        )

    loaded = ((name, one) for name, one in headers.items() if is_loaded(name))
    found = count_tensors(loaded, tied=tied and head)
    if media_family(hf) is None:
        return found
    return replace(found, media=count_media(encoder_tensors(headers)))


def has_tied_embeddings(hf: Json) -> bool:
    """Whether the embedding and the LM head share one matrix."""
    hf = fill_defaults(hf)
    stated = hf.get("tie_word_embeddings")
    return conventions_of(hf).tied if stated is None else bool(stated)


def _int(hf: Json, *keys: str) -> int:
    for key in keys:
        if isinstance(hf.get(key), int):
            return int(hf[key])
    kind = hf.get("model_type", "unknown")
    raise ConfigError(f"config.json of model_type {kind!r} has no {' or '.join(keys)}")


def _heads(hf: Json) -> int:
    if isinstance(hf.get("decoder_attention_heads"), int):
        return int(hf["decoder_attention_heads"])
    return _int(hf, "num_attention_heads", "n_head", "num_heads", "n_heads")


def _mlp(hf: Json) -> int:
    keys = (
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "ffn_hidden_size",
        "d_ff",
        "decoder_ffn_dim",
        "hidden_dim",
    )
    found = next((hf[key] for key in keys if hf.get(key)), None)
    found = found or hf.get("expansion_ratio", 4) * _int(hf, *HIDDEN_KEYS)
    return recurrent_layers.mlp_width(hf, max(found) if isinstance(found, list) else int(found))


def _dtype(given: object) -> str | None:
    name = str(given).removeprefix("torch.") if given else None
    return {"half": "float16", "float": "float32"}.get(name, name) if name else None


def _ids(*given: object) -> tuple[int, ...]:
    """Return all ids in ints, lists and Nones, each once."""
    out: dict[int, None] = {}
    for one in given:
        for token in one if isinstance(one, (list, tuple)) else (one,):
            if isinstance(token, int):
                out[token] = None
    return tuple(out)
