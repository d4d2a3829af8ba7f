"""Pooling: decides what a model does, and how hidden states become vectors or scores.

choose_model_use   runner and conversion, by option, by the files of sentence-transformers, by class
resolve_pooling    the section: what the user sets, else what the files state, else the class
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.config.decisions import DecisionLog
from quire.config.engine_config import DenseSection, PoolingSection, PoolingTask, ScoreFormat
from quire.config.late_interaction import resolve_late_interaction
from quire.config.options import PoolingOptions
from quire.config.pooler_config import SEQUENCE_TYPES, PoolerConfig, PoolingMethod
from quire.config.pooling_facts import (
    COLBERT_LAYER,
    LABEL_METHODS,
    SPARSE_LAYER,
    PoolingFacts,
)
from quire.config.sentence_transformers import MODULES_FILE
from quire.errors import ConfigError

HeadKind = Literal["lm", "none", "classify", "token_classify"]
"""What follows the last norm: logits of tokens; nothing; logits of labels for pooled states [n, E]
-> [n, labels]; the same for the state of each token."""
Runner = Literal["generate", "pooling"]
Conversion = Literal["none", "embed", "classify"]

SUFFIXES: tuple[tuple[str, Runner, Conversion], ...] = (
    ("ForCausalLM", "generate", "none"),
    ("ForConditionalGeneration", "generate", "none"),
    ("ChatModel", "generate", "none"),
    ("ChatGLMModel", "generate", "none"),
    ("LMHeadModel", "generate", "none"),
    ("OmniModel", "generate", "none"),
    ("ForTextEncoding", "pooling", "embed"),
    ("EmbeddingModel", "pooling", "embed"),
    ("ForMaskedLM", "pooling", "embed"),
    ("ForSequenceClassification", "pooling", "classify"),
    ("ForTokenClassification", "pooling", "classify"),
    ("ForAudioClassification", "pooling", "classify"),
    ("ForImageClassification", "pooling", "classify"),
    ("ForVideoClassification", "pooling", "classify"),
    ("ClassificationModel", "pooling", "classify"),
    ("ForRewardModeling", "pooling", "classify"),
    ("RewardModel", "pooling", "classify"),
    ("Model", "pooling", "embed"),
)
"""End of a class's name -> what it is for."""
REWARD_LABELS = {"ProcessRewardModel": 2, "RewardModel": 1, "ForRewardModeling": 1}
"""End of a reward model's class -> its labels, if config.json states none."""
TASK_CONVERSIONS: dict[str, Conversion] = {
    "embed": "embed",
    "embedding": "embed",
    "classify": "classify",
    "score": "classify",
    "reward": "classify",
}
"""`task` of older releases -> how a model that generates is converted for it."""


@dataclass(frozen=True, slots=True)
class RerankerFamily:
    """Rerankers that are decoders: logits of tokens are labels. name: a pattern of their names."""

    name: str
    model_type: str  # its beginning
    tokens: tuple[str, ...]
    score_format: ScoreFormat


RERANKERS = (
    RerankerFamily("qwen3[-_]reranker", "qwen3", ("no", "yes"), "qwen3_reranker"),
    RerankerFamily("bge[-_]reranker[-_]v2[-_]gemma", "gemma", ("Yes",), "bge_reranker_gemma"),
    RerankerFamily("mxbai[-_]rerank[-_]\\w+[-_]v2", "qwen2", ("0", "1"), "mxbai_rerank_v2"),
)
NO_PROMPT = ("", "none")
SPARSE_CLASS = "SpladeSparseEmbeddingModel"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """What a model is used for."""

    runner: Runner
    convert: Conversion  # what replaces the output head
    head: HeadKind
    labels: tuple[str, ...] = ()
    label_tokens: tuple[str | int, ...] = ()  # labels are made of the output head's rows for these
    label_difference: bool = False  # one label: the second token's logit minus the first's
    reason: str

    @property
    def has_logits(self) -> bool:
        """Whether the output head is loaded."""
        return self.head == "lm"


def choose_model_use(options: PoolingOptions, facts: PoolingFacts, name: str = "") -> ModelUse:
    """Choose by option, else by files, else by class. Raises ConfigError. name: of the model."""
    runner, convert, reason = _by_files(facts)
    usual = convert
    if options.task not in (None, "auto"):
        if options.runner != "auto" or options.convert != "auto":
            raise ConfigError(
                f"task={options.task!r} is the older form of runner and convert: give one of them"
            )
        runner = "generate" if options.task == "generate" else "pooling"
        reason = "task"
        if runner == "pooling" and (convert == "none" or options.task in ("embed", "classify")):
            convert = TASK_CONVERSIONS[str(options.task)]
    if options.runner == "draft":
        raise ConfigError("runner=draft is not supported; allowed: auto, generate, pooling")
    if options.runner != "auto":
        runner, reason = options.runner, "runner"
    if options.convert != "auto":
        convert, reason = options.convert, "convert"
        if options.runner == "auto" and convert != "none":
            runner = "pooling"
    if runner == "generate":
        _require_generating(options, facts, usual)
        return ModelUse(runner="generate", convert="none", head="lm", reason=reason)
    if convert == "none" and usual == "none" and options.convert == "none":
        raise ConfigError(
            f"convert=none: {_class_of(facts)} generates text, so runner=pooling needs "
            "convert=embed or convert=classify"
        )
    convert = convert if convert != "none" else usual if usual != "none" else "embed"
    if convert == "embed":
        sparse = facts.modules is not None and facts.modules.kind == "sparse"
        head: HeadKind = "lm" if sparse or _class_of(facts).endswith(SPARSE_CLASS) else "none"
        return ModelUse(runner="pooling", convert=convert, head=head, reason=reason)
    return replace(_classifying(facts, name), reason=reason)


def _classifying(facts: PoolingFacts, name: str) -> ModelUse:
    """A model with a head that classifies."""
    made = ModelUse(runner="pooling", convert="classify", head="classify", reason="")
    tokens: tuple[str | int, ...] = facts.label_tokens()
    method = facts.hf.get("method")
    if facts.modules is not None and facts.modules.score_tokens:
        tokens = facts.modules.score_tokens
        method = LABEL_METHODS[0] if len(tokens) == 2 else LABEL_METHODS[1]
    elif not tokens and _class_of(facts).endswith("ForCausalLM"):
        family = _reranker_family(facts, name)  # as published: with an output head, and no other
        tokens = family.tokens if family is not None else ()
    if tokens:
        method = method or LABEL_METHODS[0 if len(tokens) == 2 else 1]
        if method not in LABEL_METHODS or (method == LABEL_METHODS[0] and len(tokens) != 2):
            raise ConfigError(
                f"hf_overrides: method is {method!r:.40} with {len(tokens)} classifier_from_token; "
                f"allowed are {LABEL_METHODS[0]} with 2 tokens and {LABEL_METHODS[1]}"
            )
        difference = method == LABEL_METHODS[0]
        labels = facts.labels(1)[:1] if difference else tuple(map(str, tokens))
        return replace(made, labels=labels, label_tokens=tokens, label_difference=difference)
    kind = _class_of(facts)
    usual = next((n for end, n in REWARD_LABELS.items() if kind.endswith(end)), 2)
    by_token = kind.endswith(("ForTokenClassification", "ForProcessRewardModel"))
    return replace(
        made, labels=facts.labels(usual), head="token_classify" if by_token else "classify"
    )


def _reranker_family(
    facts: PoolingFacts, name: str, tokens: tuple[str | int, ...] = ()
) -> RerankerFamily | None:
    """Return the family of a reranker that is a decoder, by its name or the tokens of its labels.

    A model of which only the tokens are known by id has the family of its type.
    """
    model_type = str(facts.hf.get("model_type"))
    scores = facts.modules is not None and bool(facts.modules.score_tokens)
    for one in RERANKERS:
        if not model_type.startswith(one.model_type):
            continue
        if re.search(one.name, name, re.IGNORECASE) or tokens == one.tokens or scores:
            return one
    return None


def _class_of(facts: PoolingFacts) -> str:
    return next(iter(facts.architectures), "") or f"a {facts.hf.get('model_type')} model"


def _by_files(facts: PoolingFacts) -> tuple[Runner, Conversion, str]:
    """Return runner, conversion and the reason, without options."""
    if facts.modules is not None:
        return "pooling", "classify" if facts.modules.kind == "classify" else "embed", MODULES_FILE
    for one in facts.architectures:
        for suffix, runner, convert in SUFFIXES:
            if not one.endswith(suffix):
                continue
            if runner == "generate" and facts.bidirectional:
                return "pooling", "embed", f"{one} attends in both directions"
            if runner == "pooling" and facts.hf.get("is_encoder_decoder"):
                return "generate", "none", "an encoder-decoder"
            return runner, convert, f"the class {one}"
    if facts.bidirectional:
        return "pooling", "embed", "it attends in both directions"
    return "generate", "none", "the default"


def _require_generating(options: PoolingOptions, facts: PoolingFacts, usual: Conversion) -> None:
    """Raise ConfigError if a model cannot generate."""
    if facts.bidirectional:
        raise ConfigError(
            f"runner=generate: {_class_of(facts)} attends in both directions, so it cannot "
            "generate; leave it out, or give runner=pooling"
        )
    if usual == "classify":
        raise ConfigError(
            f"runner=generate: {_class_of(facts)} has a head that classifies in place of one that "
            "generates; leave it out, or give runner=pooling"
        )
    if options.convert not in ("auto", "none"):
        raise ConfigError(f"convert={options.convert} needs runner=pooling, got runner=generate")


def resolve_pooling(
    options: PoolingOptions,
    facts: PoolingFacts,
    *,
    name: str,
    hidden: int,
    vocab: int,
    max_model_len: int,
    why: DecisionLog,
) -> tuple[bool, PoolingSection | None]:
    """Return whether the model generates, and the section; None: it answers no pooling requests.

    Raises ConfigError. hidden: numbers of a hidden state. vocab: of a logit row.
    """
    use = choose_model_use(options, facts, name)
    generates = use.runner == "generate"
    why.record("generates", generates, use.reason)
    wanted = PoolerConfig.parse(options.pooler_config or {})
    if generates and facts.hf.get("is_encoder_decoder"):
        if options.pooler_config:
            raise ConfigError("pooler_config: an encoder-decoder model answers no pooling requests")
        return True, None
    if use.convert == "classify":
        section = _label_section(use, facts, wanted, name)
    else:
        section = _embedding_section(use, facts, wanted, hidden, vocab)
    section = _with_task(section, wanted, generates=generates)
    section = _with_texts(section, options, facts, generates=generates)
    if wanted.step_tag_id is not None or wanted.returned_token_ids is not None:
        if not {"token_embed", "token_classify"} & set(section.tasks):
            raise ConfigError(
                "pooler_config: step_tag_id and returned_token_ids are for token tasks; this model "
                f"does {', '.join(section.tasks)}"
            )
        section = replace(
            section,
            step_tag_id=wanted.step_tag_id,
            returned_token_ids=wanted.returned_token_ids or (),
        )
    section = replace(section, max_embed_len=_max_embed_len(wanted, max_model_len))
    if section.score_format != "pair":
        why.record("pooling.score_format", section.score_format, "the family of the reranker")
    why.record("pooling.tasks", section.tasks, f"convert={use.convert}: {use.reason}")
    if "embed" in section.tasks:
        why.record("pooling.methods", section.methods, _method_reason(facts, wanted))
    return generates, section


def describe_pooling(section: PoolingSection, *, generates: bool = False) -> str:
    """Describe in a sentence what a model does with hidden states."""
    if generates:
        return (
            f"embeddings are the last hidden state of a text ({section.size} numbers), of a model "
            "trained to generate; give --runner pooling to one that was trained to embed"
        )
    parts = [", ".join(section.tasks)]
    if "embed" in section.tasks:
        parts.append(f"{' + '.join(section.methods)} of tokens to {section.size} numbers")
    if section.labels:
        one = "1 label" if section.size == 1 else f"{section.size} labels"
        parts.append(f"{one}, {section.activation} of logits")
    elif section.normalize:
        parts.append("normalized")
    if section.default_prompt:
        parts.append(f"texts begin with the prompt {section.default_prompt!r}")
    return "; ".join(parts)


def _method_reason(facts: PoolingFacts, wanted: PoolerConfig) -> str:
    if wanted.seq_pooling_type is not None:
        return "pooler_config"
    return MODULES_FILE if facts.modules is not None else "the class"


def _embedding_section(
    use: ModelUse, facts: PoolingFacts, wanted: PoolerConfig, hidden: int, vocab: int
) -> PoolingSection:
    files = facts.modules if use.runner == "pooling" else None
    sparse = use.head == "lm" and use.runner == "pooling"
    methods = _methods(facts, wanted, sparse=sparse, generates=use.runner == "generate")
    hidden = facts.embedding_size(hidden)
    size = vocab if sparse else len(methods) * hidden
    dense = files.dense if files is not None else ()
    if dense and dense[0].inputs != size:
        raise ConfigError(
            f"{dense[0].folder}/config.json: in_features is {dense[0].inputs}; the pooled states "
            f"have {size} numbers ({' + '.join(methods)} of {hidden})"
        )
    size = dense[-1].outputs if dense else size
    normalize = not sparse if files is None else files.normalize
    normalize = normalize and not facts.states_are_results
    cut, sizes = facts.matryoshka()
    truncated = None if files is None else files.truncate_dim
    padded_length, pad_token = facts.padding()
    section = PoolingSection(
        tasks=_embedding_tasks(facts, sparse, len(methods), files.kind if files else "embed"),
        methods=methods,
        size=size,
        dense=dense,
        normalize=normalize if wanted.use_activation is None else wanted.use_activation,
        matryoshka=cut or truncated is not None,
        matryoshka_dimensions=sizes,
        default_dimensions=_default_dimensions(wanted, truncated, cut, sizes, size),
        head_dtype=facts.head_dtype(),
        include_prompt=files is None or files.include_prompt,
        token_types=facts.token_types(),
        similarity="cosine" if files is None else files.similarity,
        late_interaction=None
        if files is None
        else resolve_late_interaction(files, bidirectional=facts.bidirectional),
        end_token=facts.end_token(),
        padded_length=padded_length,
        pad_token=pad_token,
    )
    if use.runner == "pooling" and facts.token_layers:
        section = _with_token_layers(section, facts.token_layers, hidden)
    if wanted.logit_mean is not None or wanted.logit_sigma is not None:
        raise ConfigError(
            "pooler_config: logit_mean and logit_sigma are for models that classify; this one does "
            f"{', '.join(section.tasks)}"
        )
    return section


def _with_token_layers(
    section: PoolingSection, layers: Sequence[str], hidden: int
) -> PoolingSection:
    """Add the layers of BGE-M3, and the tasks that they are for."""
    if COLBERT_LAYER in layers:
        dense = DenseSection(
            folder=COLBERT_LAYER, inputs=hidden, outputs=hidden, bias=True, activation="identity"
        )
        section = replace(section, token_dense=dense)
    if SPARSE_LAYER in layers:
        weight = DenseSection(
            folder=SPARSE_LAYER, inputs=hidden, outputs=1, bias=True, activation="relu"
        )
        tasks: tuple[PoolingTask, ...] = (*section.tasks, "token_classify")
        section = replace(section, token_weight=weight, tasks=tasks)
    return section


def _embedding_tasks(
    facts: PoolingFacts, sparse: bool, methods: int, kind: str
) -> tuple[PoolingTask, ...]:
    if facts.states_are_results or (kind == "multi_vector" and not facts.projects):
        return ("token_embed",)
    return ("embed",) if facts.projects or sparse or methods > 1 else ("embed", "token_embed")


def _methods(
    facts: PoolingFacts, wanted: PoolerConfig, *, sparse: bool, generates: bool
) -> tuple[PoolingMethod, ...]:
    if wanted.seq_pooling_type is not None:
        if sparse:
            raise ConfigError(
                f"pooler_config: seq_pooling_type is {wanted.seq_pooling_type}; this sparse model "
                "pools the logits of tokens in its own way: leave it out"
            )
        return (SEQUENCE_TYPES[wanted.seq_pooling_type],)
    if sparse:
        return ("splade",)
    if facts.modules is not None and facts.modules.methods and not generates:
        return facts.modules.methods
    method = "last" if generates else facts.embedding_method()
    if method is None:
        raise ConfigError(
            f"config.json of {_class_of(facts)} does not state how embeddings are pooled: give "
            '--pooler-config {"pooling_type": "MEAN"}, or CLS or LAST, as the model was trained'
        )
    return (method,)


def _default_dimensions(
    wanted: PoolerConfig, truncated: int | None, cut: bool, sizes: tuple[int, ...], size: int
) -> int | None:
    if any(one > size for one in sizes):
        raise ConfigError(
            f"config.json: matryoshka_dimensions is {list(sizes)}; embeddings have {size} numbers"
        )
    if wanted.dimensions is None:
        if truncated is not None and truncated > size:
            raise ConfigError(f"truncate_dim is {truncated}; embeddings have {size} numbers")
        return truncated
    if not cut and truncated is None:
        raise ConfigError(
            f"pooler_config: dimensions is {wanted.dimensions}, and the model does not support "
            'Matryoshka embeddings; if it does, set hf_overrides={"is_matryoshka": true}'
        )
    if wanted.dimensions > size or (sizes and wanted.dimensions not in sizes):
        allowed = ", ".join(map(str, sizes)) if sizes else f"1 to {size}"
        raise ConfigError(f"pooler_config: dimensions must be {allowed}, got {wanted.dimensions}")
    return wanted.dimensions


def _label_section(
    use: ModelUse, facts: PoolingFacts, wanted: PoolerConfig, name: str
) -> PoolingSection:
    method = facts.classifier_method()
    if wanted.seq_pooling_type is not None:
        method = SEQUENCE_TYPES[wanted.seq_pooling_type]
    if wanted.dimensions is not None:
        raise ConfigError(
            f"pooler_config: dimensions is {wanted.dimensions}; a model that classifies has none"
        )
    bad = [i for i in wanted.returned_token_ids or () if i >= len(use.labels)]
    if bad:
        raise ConfigError(
            f"pooler_config: returned_token_ids must be below {len(use.labels)}, the number of "
            f"labels, got {bad[0]}"
        )
    tasks: tuple[PoolingTask, ...] = ("classify", "token_classify")
    return PoolingSection(
        tasks=("token_classify",) if use.head == "token_classify" else tasks,
        methods=(method,),
        size=len(use.labels),
        activation=_label_activation(use, facts),
        use_activation=wanted.use_activation is not False,
        logit_mean=wanted.logit_mean or 0.0,
        logit_sigma=1.0 if wanted.logit_sigma is None else wanted.logit_sigma,
        labels=use.labels,
        head_dtype=facts.head_dtype(),
        token_types=facts.token_types(),
        score_format=_score_format(use, facts, name),
    )


def _label_activation(use: ModelUse, facts: PoolingFacts) -> str:
    """As stated; else one label is a probability, and several are a distribution."""
    if (stated := facts.activation()) is not None:
        return stated
    kind = _class_of(facts)
    if kind.endswith("RewardModel") and not kind.endswith("ProcessRewardModel"):
        return "identity"
    if len(use.labels) == 1:
        return "sigmoid"
    cross_encoder = facts.modules is not None and facts.modules.kind == "classify"
    return "identity" if cross_encoder else "softmax"


def _score_format(use: ModelUse, facts: PoolingFacts, name: str) -> ScoreFormat:
    """Return how pairs of texts become prompts."""
    family = _reranker_family(facts, name, use.label_tokens)
    if family is not None:
        return family.score_format
    return "concatenated" if use.label_tokens else "pair"


def _with_task(section: PoolingSection, wanted: PoolerConfig, *, generates: bool) -> PoolingSection:
    """Put the default task first."""
    tasks = ("embed",) if generates else section.tasks
    task = wanted.task
    if task is None and wanted.pooling_type in ("ALL", "STEP"):
        task = next((one for one in tasks if one.startswith("token_")), None)
    if task is None:
        return replace(section, tasks=tasks)
    if task not in tasks:
        cure = "convert=embed" if task in ("embed", "token_embed") else "convert=classify"
        more = "runner=pooling and " if generates else ""
        raise ConfigError(
            f"pooler_config: task is {task}; this model does {', '.join(tasks)}. For {task}, set "
            f"{more}{cure}, if it has the weights for that"
        )
    rest = tuple(one for one in tasks if one != task)
    first = next(one for one in tasks if one == task)
    return replace(section, tasks=(first, *rest))


def _with_texts(
    section: PoolingSection, options: PoolingOptions, facts: PoolingFacts, *, generates: bool
) -> PoolingSection:
    """Add what happens to texts before they are tokenized."""
    files = None if generates else facts.modules
    prompts = {**facts.task_instructions(), **(files.prompts if files is not None else {})}
    default = None if files is None else files.default_prompt
    if options.default_prompt_name is not None:
        default = options.default_prompt_name
        if default.lower() in NO_PROMPT:
            default = None
        elif default not in prompts:
            allowed = ", ".join(["none", *prompts])
            raise ConfigError(f"default_prompt_name must be one of {allowed}, got {default!r}")
    lower_case = files is not None and files.do_lower_case
    return replace(section, prompts=prompts, default_prompt=default, lower_case=lower_case)


def _max_embed_len(wanted: PoolerConfig, max_model_len: int) -> int | None:
    """Return the longest input; None: as long as a sequence."""
    if wanted.enable_chunked_processing and wanted.max_embed_len is None:
        raise ConfigError(
            "pooler_config: enable_chunked_processing needs max_embed_len, the tokens of the "
            "longest input"
        )
    longest = max_model_len if wanted.max_embed_len is None else wanted.max_embed_len
    if longest > max_model_len and not wanted.enable_chunked_processing:
        raise ConfigError(
            f"pooler_config: max_embed_len is {longest}; inputs longer than "
            f"max_model_len ({max_model_len}) need enable_chunked_processing"
        )
    return wanted.max_embed_len
