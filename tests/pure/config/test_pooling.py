"""What a model does, and the section of pooling: options, then files, then the class."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.decisions import DecisionLog
from quire.config.engine_config import DenseSection
from quire.config.options import Options
from quire.config.pooling import choose_model_use, describe_pooling, resolve_pooling
from quire.config.pooling_facts import PoolingFacts
from quire.config.sentence_transformers import FolderModules
from quire.errors import ConfigError


def facts(architecture=None, modules=None, **hf):
    classes = {} if architecture is None else {"architectures": [architecture]}
    return PoolingFacts(hf={"model_type": "llama", **classes, **hf}, modules=modules)


def use(architecture=None, modules=None, name="", hf=None, **options):
    found = facts(architecture, modules, **(hf or {}))
    return choose_model_use(Options.from_flat(options).pooling, found, name)


def section(architecture=None, modules=None, hf=None, max_model_len=512, name="m", **options):
    return resolve_pooling(
        Options.from_flat(options).pooling,
        facts(architecture, modules, **(hf or {})),
        name=name,
        hidden=64,
        vocab=1000,
        max_model_len=max_model_len,
        why=DecisionLog([]),
    )


ENCODER = {"is_causal": False, "pooling": "avg"}


@pytest.mark.parametrize(
    ("architecture", "runner", "convert", "head"),
    [
        (None, "generate", "none", "lm"),
        ("LlamaForCausalLM", "generate", "none", "lm"),
        ("GPT2LMHeadModel", "generate", "none", "lm"),
        ("QwenChatModel", "generate", "none", "lm"),
        ("T5ForConditionalGeneration", "generate", "none", "lm"),
        ("Qwen2Model", "pooling", "embed", "none"),
        ("BertForMaskedLM", "pooling", "embed", "none"),
        ("BertSpladeSparseEmbeddingModel", "pooling", "embed", "lm"),
        ("Gemma3TextModel", "pooling", "embed", "none"),
        ("MyForTextEncoding", "pooling", "embed", "none"),
        ("JinaEmbeddingModel", "pooling", "embed", "none"),
        ("BertForSequenceClassification", "pooling", "classify", "classify"),
        ("BertForTokenClassification", "pooling", "classify", "token_classify"),
        ("Qwen2ForRewardModel", "pooling", "classify", "classify"),
        ("Qwen2ForProcessRewardModel", "pooling", "classify", "token_classify"),
        ("LlamaForRewardModeling", "pooling", "classify", "classify"),
    ],
)
def test_the_end_of_a_class_decides(architecture, runner, convert, head):
    found = use(architecture)
    assert (found.runner, found.convert, found.head) == (runner, convert, head)


@pytest.mark.parametrize(
    ("options", "architecture", "runner", "convert"),
    [
        ({"runner": "pooling"}, "LlamaForCausalLM", "pooling", "embed"),
        ({"runner": "pooling", "convert": "classify"}, "LlamaForCausalLM", "pooling", "classify"),
        ({"convert": "embed"}, "LlamaForCausalLM", "pooling", "embed"),
        ({"convert": "none"}, "LlamaForCausalLM", "generate", "none"),
        ({"convert": "none"}, "BertForSequenceClassification", "pooling", "classify"),
        ({"convert": "embed"}, "BertForSequenceClassification", "pooling", "embed"),
        ({"runner": "generate"}, "LlamaForCausalLM", "generate", "none"),
        ({"runner": "generate"}, "LlamaModel", "generate", "none"),
        ({"task": "auto"}, "LlamaForCausalLM", "generate", "none"),
        ({"task": "generate"}, "LlamaForCausalLM", "generate", "none"),
        ({"task": "embed"}, "LlamaForCausalLM", "pooling", "embed"),
        ({"task": "embedding"}, "LlamaForCausalLM", "pooling", "embed"),
        ({"task": "classify"}, "LlamaForCausalLM", "pooling", "classify"),
        ({"task": "score"}, "LlamaForCausalLM", "pooling", "classify"),
        ({"task": "score"}, "BertModel", "pooling", "embed"),
        ({"task": "score"}, "BertForSequenceClassification", "pooling", "classify"),
        ({"task": "reward"}, "LlamaForCausalLM", "pooling", "classify"),
        ({"task": "reward"}, "Qwen2ForRewardModel", "pooling", "classify"),
        ({"task": "embed"}, "BertForSequenceClassification", "pooling", "embed"),
    ],
)
def test_options_decide_before_the_class(options, architecture, runner, convert):
    found = use(architecture, **options)
    assert (found.runner, found.convert) == (runner, convert)


@pytest.mark.parametrize(
    ("options", "architecture", "words"),
    [
        ({"runner": "draft"}, "LlamaForCausalLM", "runner=draft is not supported"),
        ({"runner": "generate", "convert": "embed"}, "LlamaForCausalLM", "needs runner=pooling"),
        ({"runner": "pooling", "convert": "none"}, "LlamaForCausalLM", "needs convert=embed or"),
        ({"runner": "generate"}, "BertForSequenceClassification", "has a head that classifies"),
        ({"task": "embed", "runner": "pooling"}, "LlamaForCausalLM", "older form of runner"),
    ],
)
def test_options_that_the_class_cannot_follow(options, architecture, words):
    with pytest.raises(ConfigError, match=words):
        use(architecture, **options)


def test_a_model_that_attends_in_both_directions_does_not_generate():
    assert use("LlamaForCausalLM", hf=ENCODER).convert == "embed"
    assert use(None, hf=ENCODER).runner == "pooling"
    with pytest.raises(ConfigError, match="attends in both directions, so it cannot generate"):
        use("LlamaForCausalLM", hf=ENCODER, runner="generate")
    assert use("T5Model", hf={"is_encoder_decoder": True}).runner == "generate"


def test_the_class_of_a_wrapper_counts():
    hf = {"wrapper_architectures": ["Gemma3ForSequenceClassification"]}
    assert use("Gemma3TextModel", hf=hf).convert == "classify"


def test_files_of_sentence_transformers_decide_before_the_class():
    assert use("Qwen3ForCausalLM", FolderModules(methods=("last",))).convert == "embed"
    assert use("BertForSequenceClassification", FolderModules(kind="classify")).head == "classify"
    assert use("BertForMaskedLM", FolderModules(kind="sparse")).head == "lm"
    assert use("BertModel", FolderModules(methods=("cls",)), runner="generate").runner == "generate"


@pytest.mark.parametrize(
    ("hf", "tokens", "difference", "labels"),
    [
        ({"classifier_from_token": ["no", "yes"]}, ("no", "yes"), True, ("LABEL_0",)),
        ({"classifier_from_token": ["Yes"]}, ("Yes",), False, ("Yes",)),
        (
            {"classifier_from_token": ["a", "b", "c"], "method": "no_post_processing"},
            ("a", "b", "c"), False, ("a", "b", "c"),
        ),
        (
            {"classifier_from_token": ["0", "1"], "method": "from_2_way_softmax"},
            ("0", "1"), True, ("LABEL_0",),
        ),
    ],
)  # fmt: skip
def test_labels_made_of_tokens(hf, tokens, difference, labels):
    found = use("Qwen3ForSequenceClassification", hf=hf)
    assert (found.label_tokens, found.label_difference, found.labels) == (
        tokens,
        difference,
        labels,
    )


def test_tokens_that_cannot_become_one_label():
    hf = {"classifier_from_token": ["a"], "method": "from_2_way_softmax"}
    with pytest.raises(ConfigError, match="from_2_way_softmax with 2 tokens"):
        use("Qwen3ForSequenceClassification", hf=hf)
    with pytest.raises(ConfigError, match="classifier_from_token is 'no'; it must be a list"):
        use("Qwen3ForSequenceClassification", hf={"classifier_from_token": "no"})


def test_a_published_qwen3_reranker_needs_no_override():
    hf = {"model_type": "qwen3"}
    found = use("Qwen3ForCausalLM", name="Qwen/Qwen3-Reranker-0.6B", hf=hf, task="score")
    assert (found.label_tokens, found.label_difference) == (("no", "yes"), True)
    assert use("Qwen3ForCausalLM", name="Qwen/Qwen3-0.6B", hf=hf, task="score").label_tokens == ()
    scored = FolderModules(kind="classify", score_tokens=(3, 9))
    assert use("Qwen3ForCausalLM", scored, hf=hf).label_tokens == (3, 9)


def test_a_generating_model_embeds_by_its_last_token():
    generates, found = section("LlamaForCausalLM")
    assert generates
    assert (found.tasks, found.methods, found.normalize) == (("embed",), ("last",), True)
    assert found.size == 64
    assert section("T5ForConditionalGeneration", hf={"is_encoder_decoder": True}) == (True, None)


def test_files_state_what_the_class_does_not():
    files = FolderModules(
        methods=("mean", "max"),
        dense=(DenseSection(folder="2", inputs=128, outputs=32, bias=True, activation="tanh"),),
        prompts={"query": "q: ", "document": ""},
        default_prompt="query",
        similarity="dot",
        truncate_dim=16,
        include_prompt=False,
    )
    generates, found = section("BertModel", files)
    assert not generates
    assert (found.methods, found.size, found.tasks) == (("mean", "max"), 32, ("embed",))
    assert (found.normalize, found.similarity, found.default_prompt) == (False, "dot", "query")
    assert (found.default_dimensions, found.matryoshka, found.include_prompt) == (16, True, False)


def test_the_user_decides_before_the_files():
    files = FolderModules(methods=("cls",), prompts={"a": "A"}, default_prompt="a", normalize=True)
    config = {"pooling_type": "MEAN", "normalize": False}
    _, found = section("BertModel", files, pooler_config=config, default_prompt_name="none")
    assert (found.methods, found.normalize, found.default_prompt) == (("mean",), False, None)
    assert found.prompts == {"a": "A"}
    with pytest.raises(ConfigError, match="default_prompt_name must be one of none, a, got 'b'"):
        section("BertModel", files, default_prompt_name="b")


def test_a_decoder_that_was_made_an_encoder_states_its_pooling():
    _, found = section("LlamaBidirectionalModel", hf=ENCODER)
    assert found.methods == ("mean",)
    with pytest.raises(ConfigError, match="does not state how embeddings are pooled"):
        section("LlamaBidirectionalModel", hf={"is_causal": False})
    with pytest.raises(ConfigError, match="pooling is 'weird'; it must be one of avg, mean"):
        section("LlamaBidirectionalModel", hf={"is_causal": False, "pooling": "weird"})
    _, found = section("L", hf={"is_causal": False}, pooler_config='{"pooling_type": "last"}')
    assert found.methods == ("last",)


@pytest.mark.parametrize(
    ("hf", "modules", "labels", "activation"),
    [
        ({}, None, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, None, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "b", "0": "a"}}, None, ("a", "b"), "softmax"),
        ({"id2label": {"0": "a", "1": "b"}, "num_labels": 1}, None, ("LABEL_0",), "sigmoid"),
        ({"problem_type": "regression"}, None, ("LABEL_0", "LABEL_1"), "identity"),
        ({"problem_type": "multi_label_classification"}, None, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, None, ("LABEL_0",),
         "softmax"),
        ({}, FolderModules(kind="classify"), ("LABEL_0", "LABEL_1"), "identity"),
        ({"num_labels": 1}, FolderModules(kind="classify"), ("LABEL_0",), "sigmoid"),
        ({"num_labels": 1}, FolderModules(kind="classify", activation="identity"), ("LABEL_0",),
         "identity"),
        ({"num_labels": 1, "sentence_transformers":
          {"activation_fn": "torch.nn.modules.linear.Identity"}}, None, ("LABEL_0",), "identity"),
        ({"num_labels": 1, "problem_type": "regression", "sbert_ce_default_activation_function":
          "torch.nn.modules.activation.Sigmoid"}, None, ("LABEL_0",), "sigmoid"),
    ],
)  # fmt: skip
def test_labels_and_their_activation(hf, modules, labels, activation):
    _, found = section("BertForSequenceClassification", modules, hf=hf)
    assert (found.labels, found.size, found.activation) == (labels, len(labels), activation)
    assert found.tasks == ("classify", "token_classify")


def test_rewards_have_no_activation_and_steps_a_distribution():
    _, found = section("Qwen2ForRewardModel")
    assert (found.labels, found.activation, found.methods) == (("LABEL_0",), "identity", ("last",))
    _, found = section("Qwen2ForProcessRewardModel")
    assert (found.size, found.activation, found.tasks) == (2, "softmax", ("token_classify",))


def test_a_stated_state_for_the_classifier():
    _, found = section("XForSequenceClassification", hf=ENCODER | {"classifier_pooling": "mean"})
    assert found.methods == ("mean",)


def test_settings_of_tokens_and_logits():
    config = {
        "pooling_type": "STEP", "step_tag_id": 7, "returned_token_ids": [1],
        "logit_bias": 0.5, "logit_sigma": 2, "softmax": False,
    }  # fmt: skip
    _, found = section("LlamaForSequenceClassification", pooler_config=config)
    assert (found.tasks[0], found.step_tag_id, found.returned_token_ids) == (
        "token_classify",
        7,
        (1,),
    )
    assert (found.logit_mean, found.logit_sigma, found.use_activation) == (0.5, 2.0, False)
    _, found = section("LlamaModel", pooler_config={"task": "token_embed"})
    assert found.tasks == ("token_embed", "embed")


@pytest.mark.parametrize(
    ("architecture", "hf", "config", "words"),
    [
        (
            "LlamaModel",
            {},
            {"task": "classify"},
            "this model does embed, token_embed. For classify",
        ),
        ("LlamaForCausalLM", {}, {"task": "classify"}, "set runner=pooling and convert=classify"),
        ("LlamaModel", {}, {"dimensions": 8}, "is_matryoshka"),
        ("LlamaModel", {"matryoshka_dimensions": [8, 16]}, {"dimensions": 9}, "must be 8, 16"),
        ("LlamaModel", {"is_matryoshka": True}, {"dimensions": 65}, "must be 1 to 64, got 65"),
        ("LlamaModel", {"matryoshka_dimensions": [128]}, {}, "embeddings have 64 numbers"),
        ("LlamaModel", {"matryoshka_dimensions": "8"}, {}, "must be a list of integers"),
        ("LlamaModel", {"is_matryoshka": 1}, {}, "must be true or false"),
        ("LlamaModel", {"head_dtype": "bfloat16"}, {}, "must be float32 or model"),
        ("LlamaModel", {}, {"logit_mean": 1.0}, "for models that classify"),
        ("LlamaModel", {}, {"max_embed_len": 1024}, "need enable_chunked_processing"),
        ("LlamaModel", {}, {"enable_chunked_processing": True}, "needs max_embed_len"),
        ("BertSpladeSparseEmbeddingModel", {}, {"pooling_type": "CLS"}, "sparse model"),
        ("LlamaForSequenceClassification", {}, {"dimensions": 8}, "that classifies has none"),
        ("LlamaForSequenceClassification", {}, {"returned_token_ids": [2]}, "must be below 2"),
        ("LlamaForSequenceClassification", {"id2label": {"0": "a", "2": "b"}}, {}, "keys 0 to 1"),
        ("LlamaForSequenceClassification", {"id2label": ["a"]}, {}, "an object from index"),
        ("LlamaForSequenceClassification", {"num_labels": 0}, {}, "num_labels is 0"),
        ("LlamaForSequenceClassification", {"num_labels": 1 << 30}, {}, "num_labels is 10737"),
        ("LlamaForSequenceClassification", {"problem_type": "x"}, {}, "problem_type is 'x'"),
        (
            "LlamaForSequenceClassification",
            {"sentence_transformers": {"activation_fn": "os.system"}},
            {},
            "activation_fn is 'os.system'; it must be a class of torch.nn: Identity",
        ),
    ],
)
def test_what_cannot_be(architecture, hf, config, words):
    with pytest.raises(ConfigError, match=words):
        section(architecture, hf=hf, pooler_config=config)


def test_labels_mean_nothing_in_a_model_that_generates():
    generates, _ = section("LlamaForCausalLM", hf={"id2label": "x", "problem_type": "y"})
    assert generates


def test_what_a_model_does_is_one_sentence():
    assert "last hidden state of a text (64 numbers)" in describe_pooling(
        section("LlamaForCausalLM")[1], generates=True
    )
    files = FolderModules(methods=("mean",), prompts={"q": "x"}, default_prompt="q", normalize=True)
    assert describe_pooling(section("BertModel", files)[1]) == (
        "embed, token_embed; mean of tokens to 64 numbers; normalized; texts begin with the prompt 'q'"
    )
    assert describe_pooling(section("BertForSequenceClassification", hf={"num_labels": 1})[1]) == (
        "classify, token_classify; 1 label, sigmoid of logits"
    )


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
FIELDS = st.sampled_from(
    [
        *("num_labels", "id2label", "problem_type", "sentence_transformers", "method", "pooling"),
        *("classifier_from_token", "matryoshka_dimensions", "is_matryoshka", "head_dtype"),
        *("sbert_ce_default_activation_function", "task_instructions", "classifier_pooling"),
        *("is_causal", "type_vocab_size", "use_bidirectional_attention"),
    ]
)
CLASSES = [
    "LlamaForCausalLM",
    "LlamaModel",
    "LlamaForSequenceClassification",
    "XForTokenClassification",
]


@given(st.sampled_from(CLASSES), st.dictionaries(FIELDS, ANY, max_size=4))
def test_any_config_gives_a_section_or_a_config_error(architecture, hf):
    try:
        _, found = section(architecture, hf=hf)
    except ConfigError:
        return
    assert found.tasks
    assert found.size >= 1
    assert len(found.labels) in (0, found.size)


def test_inputs_that_are_divided():
    config = {"enable_chunked_processing": True, "max_embed_len": 3000}
    assert section("LlamaModel", pooler_config=config)[1].max_embed_len == 3000
