"""Engine config: all settings of the engine after resolution. Frozen; no value is "auto".

Made only by resolve.py. Components get their section or plain values, never the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.config.encoder_facts import SpeechFacts
from quire.config.media import MediaSection
from quire.config.memory.kv_format import KV_FORMATS
from quire.config.memory.kv_layout import KVCacheGroup, LayerFacts
from quire.config.memory.state_layout import StateFacts
from quire.config.options import LogprobsMode
from quire.config.pooler_config import PoolingMethod as PoolingMethod
from quire.config.pooler_config import PoolingTask as PoolingTask


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice and its reason."""

    field: str
    value: object
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    name: str
    model_type: str
    tokenizer: str
    tokenizer_mode: str
    skip_tokenizer_init: bool
    trust_remote_code: bool
    dtype: str  # "bfloat16" | "float16" | "float32"
    seed: int
    vocab: int
    revision: str | None
    tokenizer_revision: str | None
    served_names: tuple[str, ...]
    chat_template: str | None
    max_logprobs: int  # -1: no cap
    logprobs_mode: LogprobsMode
    logits_processors: tuple[Any, ...]
    disable_sliding_window: bool
    quantization: str | None = None  # a method of quire.quant; None: unquantized weights
    weight_bits: float = 16.0  # per weight, scales included, of all weights: as planned
    prompt_embeds_width: int | None = None  # numbers of a prompt embedding; None: refused


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSection:
    block_size: int
    num_blocks: int
    num_host_blocks: int  # of the host tier; 0: there is none
    prefix_caching: bool
    dtype: str  # a name in quire.config.memory.kv_format.KV_FORMATS
    layers: tuple[LayerFacts, ...]
    groups: tuple[KVCacheGroup, ...]
    block_bytes: int
    states: tuple[StateFacts, ...] = ()  # of each recurrent layer
    kinds: tuple[str, ...] = ()  # of all layers; (): they have attention
    state_checkpoints: int = 0
    draft_states: int = 0  # recurrent states after drafts
    state_checkpoint_tokens: int = 1024  # between two of a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSection:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    chunked_prefill: bool
    max_num_partial_prefills: int  # 0: no cap
    max_long_partial_prefills: int  # 0: no cap
    long_prefill_token_threshold: int  # 0: off
    inter_token_target_s: float  # 0: none
    max_num_queued_reqs: int | None = None  # None: no cap
    max_num_queued_tokens: int | None = None  # None: no cap
    policy: Literal["fcfs", "priority"]
    steps_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSection:
    format: str
    download_dir: str | None
    hf_token: str | bool | None
    progress: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSection:
    kind: str
    attention_backend: str  # a name, or "auto": attention/select.py chooses and gives the reason
    threads: int
    enforce_eager: bool = False
    captured_tokens: int  # of the largest step with prompts that is a CUDA graph
    capability: tuple[int, int] = (0, 0)  # of a CUDA device


ExpertPlacement = Literal["linear", "round_robin"]
"""Which experts each rank has: neighbours, or every n-th."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBalanceSection:
    """Moves experts between ranks, so that ranks compute about the same number of tokens."""

    redundant: int = 0  # copies of experts in each layer, beside the first of each
    interval: int = 3000  # steps after which experts are moved
    window: int = 1000  # last steps whose tokens count
    logs: bool = False  # write how even the load was


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    tensor: int  # ranks over which each layer is sharded
    context: int = 1  # of these, over which the tokens of every sequence are spread
    stage_layers: tuple[int, ...] = ()  # layers of each pipeline stage; (): one has all
    data: int = 1  # ranks with requests of their own, which share experts
    expert_placement: ExpertPlacement | None = None  # None: ranks have slices of every expert
    expert_balance: ExpertBalanceSection | None = None  # None: experts stay where they are
    engines: int = 1  # of this model on this host
    nodes: int = 1  # machines over which the ranks of an engine are spread, in order
    backend: Literal["mp", "uni", "external_launcher"] = "uni"
    step_limit_s: float = 10.0  # seconds that any step of several ranks may take
    custom_all_reduce: bool = True  # GPUs add what they read of each other's memory, if they can
    sends_tokens: bool = True  # the last stage to the first, so a step need not wait for the host

    @property
    def stages(self) -> int:
        """Pipeline stages, each with its own layers."""
        return max(1, len(self.stage_layers))

    @property
    def ranks(self) -> int:
        """Processes of an engine, each with one device."""
        return self.tensor * self.stages * self.data

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the machine that has most of them."""
        return -(-self.ranks // self.nodes)

    @property
    def sampling_ranks(self) -> list[range]:
        """Of each data-parallel rank, the ranks that sample. The result of the first one counts."""
        each = self.tensor * self.stages
        return [range(end - self.tensor, end) for end in range(each, self.ranks + 1, each)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSection:
    """Defaults of a request that names no sampling parameters."""

    defaults: Mapping[str, Any]  # fields of SamplingParams
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSection:
    """Of a model with cross attention: sizes of sources, and tokens that the config files of an
    encoder-decoder model force."""

    max_len: int  # positions of the sources of one request
    max_batched_tokens: int  # positions of the sources of one step
    speech: SpeechFacts | None  # None: sources are token ids or images
    start_id: int | None  # the decoder's first token; None: sources are images of its prompts
    forced_first: int | None
    forced_last: tuple[int, ...]
    banned: tuple[int, ...]
    banned_first: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaEncoderSection:
    """What makes rows of media items."""

    modalities: tuple[str, ...]
    step_rows: int  # in one step; an item with more is encoded alone
    cache_rows: int  # on the device
    row_bytes: int
    bidirectional: bool
    slices: int = 1  # that the encoder can divide its work into, at most


@dataclass(frozen=True, slots=True)
class StartupAdapter:
    """An adapter that is loaded at the start."""

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSection:
    """LoRA adapters that requests may name."""

    max_adapters: int  # distinct ones in a step; slots of the device
    max_rank: int
    max_host: int  # copies in host memory
    target_modules: tuple[str, ...] | None  # last components of names; None: all
    experts: bool  # whether slots have room for adapters of experts
    max_replaced_tokens: (
        int  # rows of a vocabulary that an adapter may have in place of the model's
    )
    modules: tuple[StartupAdapter, ...] = ()  # loaded at the start
    media: tuple[str, ...] = ()  # names of those that prompts with media of this kind have


Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSection:
    """A linear layer behind the pooling, in a folder or a file of its own in the model's folder."""

    folder: str  # "2_Dense", "colbert_linear.pt"; "": the model's own checkpoint has it
    inputs: int
    outputs: int
    bias: bool
    activation: str  # a name in quire.pooling: "identity", "tanh", ...


ScoreFormat = Literal[
    "pair", "concatenated", "qwen3_reranker", "bge_reranker_gemma", "mxbai_rerank_v2"
]
"""How a query and a document become one prompt: as the tokenizer joins two texts; as one text
without a separator; by a template of quire.text.score_prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateInteractionSection:
    """Of a ColBERT model: how queries and documents become tokens, and which of them count."""

    query_prefix: str = ""  # marker behind the first special token: "[unused0]", "[Q] "
    document_prefix: str = ""
    query_length: int | None = None  # tokens to which queries are expanded; None: they are not
    max_query_length: int | None = None  # to which they are cut; None: as long as the model
    document_length: int | None = None  # to which documents are cut
    expansion_token: str | None = None  # of that; None: the tokenizer's mask token, or EOS
    attends_to_expansion: bool = False  # other tokens attend to those
    skiplist: tuple[str, ...] = ()  # tokens of documents that do not count, as punctuation


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSection:
    """Of a model that pools: what its files and the user say of vectors and scores."""

    tasks: tuple[PoolingTask, ...]  # that requests may name; the first is the default
    methods: tuple[PoolingMethod, ...]  # sequence tasks; results of several are concatenated
    size: int  # numbers of a whole embedding, or labels of a classification
    dense: tuple[DenseSection, ...] = ()  # in order, before dimensions are cut
    token_dense: DenseSection | None = None  # in their place in token_embed
    token_weight: DenseSection | None = None  # token_classify: one number for each token
    normalize: bool = True  # embeddings have an L2 norm of 1, unless a request says otherwise
    activation: str = "identity"  # of logits of labels: "softmax", "sigmoid", "identity", ...
    use_activation: bool = True  # logits of labels get it, unless a request says otherwise
    logit_mean: float = 0.0  # the activation gets (logit - mean) / sigma
    logit_sigma: float = 1.0
    labels: tuple[str, ...] = ()  # by index
    matryoshka: bool = False  # requests may set dimensions
    matryoshka_dimensions: tuple[int, ...] = ()  # which; (): any up to size
    default_dimensions: int | None = None  # None: all
    head_dtype: Literal["float32", "model"] = "float32"  # of everything behind the pooling
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] = ()
    include_prompt: bool = True  # False: means leave out the tokens of a prompt's prefix
    prompts: Mapping[str, str] = field(default_factory=dict)  # name -> prefix of texts
    default_prompt: str | None = None  # its name
    lower_case: bool = False  # texts are made lower case before they are tokenized
    similarity: Similarity = "cosine"  # by which its files compare two embeddings
    max_embed_len: int | None = None  # longer than max_model_len: such inputs are divided
    token_types: int = 0  # segments that the model distinguishes (BERT: 2); 0: it reads none
    score_format: ScoreFormat = "pair"  # of prompts of a model that classifies pairs
    late_interaction: LateInteractionSection | None = None  # None: no ColBERT model
    end_token: int | Literal["highest"] | None = None  # prompts end behind the first of these
    padded_length: int | None = None  # of texts; their states depend on the padding
    pad_token: int = 0  # of a tokenizer that names none

    def reads_whole_prompt(self, task: PoolingTask) -> bool:
        """Whether a result needs the states of all tokens, which a cached prefix does not have."""
        return task in ("token_embed", "token_classify") or self.methods != ("last",)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredSection:
    """Constraints of structured output, and limits of their compilation."""

    backend: str = "auto"
    disable_any_whitespace: bool = False  # JSON without any space between its tokens
    disable_additional_properties: bool = False  # objects have only the schema's properties
    enable_in_reasoning: bool = False  # the reasoning is constrained too
    compile_seconds: float = 10.0  # of CPU time, for one grammar
    compile_memory: int = 1 << 30  # bytes, for one grammar
    cache_memory: int = 1 << 26  # bytes of grammars that no request uses
    cache_size: int = 512  # such grammars


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySection:
    wait_s: float = 30.0  # how long a new request waits for an engine that is being restarted


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSection:
    canary_s: float = 0.0  # idle seconds before a canary, and between two; 0: none
    recorder: bool = False  # record the last steps
    recorder_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveSection:
    log_stats: bool
    log_level: str | None
    profile: str | None = None  # folder for a trace of some steps
    profile_skip: int = 0
    profile_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSection:
    """How the drafts of speculative decoding are made, and how many at most."""

    method: str = "none"  # a drafter; none: drafts come from the predictions of requests alone
    max_drafts: int = 8  # of a row
    max_len: int | None = None  # tokens of a sequence with drafts; None: as long as the model
    lookup_min: int = 5  # ngram: tokens of the shortest and the longest match
    lookup_max: int = 5
    suffix_depth: int = 24  # suffix: tokens of a match and its drafts
    suffix_requests: int = 10_000  # past outputs that are kept; 0: none
    suffix_factor: float = 1.0  # drafts for each token of a match, at most
    suffix_min_probability: float = 0.1  # of a draft, by the counts of the tree
    draft_model: str | None = None  # folder of the drafter's weights; None: it has none of its own
    synthetic_rates: tuple[float, ...] | None = None  # benchmarks: acceptance by position
    adaptive: bool = True  # numbers of drafts are chosen from measured acceptance and step times


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: ModelSection
    cache: CacheSection
    scheduler: SchedulerSection
    load: LoadSection
    device: DeviceSection
    parallel: ParallelSection
    sampling: SamplingSection
    observe: ObserveSection
    structured: StructuredSection = StructuredSection()
    recovery: RecoverySection = RecoverySection()
    health: HealthSection = HealthSection()
    adapters: AdapterSection | None = None  # None: requests with adapters are refused
    encoder: EncoderSection | None = None  # None: a decoder alone
    media_encoder: MediaEncoderSection | None = None  # None: it reads text only
    media: MediaSection | None = None  # how the media of requests are read; None: they have none
    generates: bool = True  # False: it serves pooling requests alone
    pooling: PoolingSection | None = None  # None: no pooling requests
    speculation: SpeculationSection = SpeculationSection()

    @property
    def reads_media(self) -> bool:
        """Whether prompts may have images, video or audio."""
        reads_images = self.encoder is not None and self.encoder.start_id is None
        return reads_images or self.media_encoder is not None

    @property
    def aligns_sources(self) -> bool:
        """Whether tokens can be aligned with the recording that they are read from."""
        speech = None if self.encoder is None else self.encoder.speech
        whole = self.parallel.tensor * self.parallel.stages == 1
        return speech is not None and whole and KV_FORMATS[self.cache.dtype].itemsize > 1
