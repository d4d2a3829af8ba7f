"""Files of sentence-transformers: both formats, and every kind of bad one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.sentence_transformers import read_modules
from quire.errors import ConfigError

OLD = "sentence_transformers.models."
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
DENSE = {
    "in_features": 8,
    "out_features": 4,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}


def write(folder, modules, /, **files):
    """Write modules.json of (type, path, config) and other files; / is __ in their names."""
    listed = []
    for i, (kind, path, config) in enumerate(modules):
        kind = kind if "." in kind else OLD + kind
        listed.append({"idx": i, "name": str(i), "path": path, "type": kind})
        if config is not None:
            (folder / path).mkdir(parents=True, exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / f"{name}.json").write_text(text)
    return folder


T = ("Transformer", "", None)
P = ("Pooling", "1_Pooling", {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True})
D = ("Dense", "2_Dense", DENSE)
N = ("Normalize", "3_Normalize", None)


def test_a_folder_without_modules(tmp_path):
    assert read_modules(tmp_path) is None


def test_both_formats_mean_the_same(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(), new.mkdir()
    flags = {
        "word_embedding_dimension": 8,
        "pooling_mode_cls_token": False,
        "pooling_mode_lasttoken": True,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_weightedmean_tokens": False,
        "include_prompt": False,
    }
    write(
        old,
        [T, ("Pooling", "1_Pooling", flags), D, N],
        sentence_bert_config={"max_seq_length": 128, "do_lower_case": True},
        config_sentence_transformers={
            "__version__": {"sentence_transformers": "2.7.0"},
            "prompts": {"query": "q: "},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
            "truncate_dim": 2,
        },
    )
    modes = {
        "embedding_dimension": 8,
        "pooling_mode": ["mean", "lasttoken"],
        "include_prompt": False,
    }
    names = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    write(
        new,
        [
            (NEW["Transformer"], "", None),
            (NEW["Pooling"], "1_Pooling", modes),
            (NEW["Dense"], "2_Dense", DENSE | names),
            (NEW["Normalize"], "3_Normalize", names),
        ],
        sentence_bert_config={
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward"}},
            "module_output_name": "token_embeddings",
            "max_seq_length": 128,
            "do_lower_case": True,
        },
        config_sentence_transformers={
            "model_type": "SentenceTransformer",
            "prompts": {"query": "q: "},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
            "truncate_dim": 2,
        },
    )
    found = read_modules(old)
    assert found == read_modules(new)
    assert found.methods == ("mean", "last")
    assert not found.include_prompt
    assert (found.dense[0].folder, found.dense[0].activation) == ("2_Dense", "tanh")
    assert (found.normalize, found.max_seq_length, found.do_lower_case) == (True, 128, True)
    assert (found.prompts, found.default_prompt) == ({"query": "q: "}, "query")
    assert (found.similarity, found.truncate_dim) == ("dot", 2)


def test_no_mode_is_the_mean_and_names_of_files_vary(tmp_path):
    write(
        tmp_path,
        [T, ("Pooling", "1_Pooling", {"word_embedding_dimension": 8})],
        **{"sentence_xlm-roberta_config": {"max_seq_length": 64}},
    )
    found = read_modules(tmp_path)
    assert (found.methods, found.normalize, found.max_seq_length) == (("mean",), False, 64)


def test_other_kinds_of_models(tmp_path):
    def made(name, modules, **files):
        (tmp_path / name).mkdir()
        return read_modules(write(tmp_path / name, modules, **files))

    ce = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    found = made("ce", [T], config_sentence_transformers=ce)
    assert (found.kind, found.activation) == ("classify", "identity")
    score = {"true_token_id": 9, "false_token_id": 3, "module_input_name": "causal_logits"}
    found = made("score", [T, ("LogitScore", "1_LogitScore", score)])
    assert (found.kind, found.score_tokens) == ("classify", (3, 9))
    splade = {"pooling_strategy": "max", "activation_function": "relu"}
    mlm = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    found = made("splade", [(mlm, "", None), ("SpladePooling", "1", splade)])
    assert (found.kind, found.methods) == ("sparse", ("splade",))
    lengths = {"query_length": 32, "document_length": 180}
    dense = DENSE | {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    found = made(
        "pylate",
        [T, ("pylate.models.Dense.Dense", "1_Dense", dense)],
        config_sentence_transformers={"query_prefix": "[Q] ", **lengths},
    )
    assert (found.kind, found.normalize) == ("multi_vector", True)
    assert found.settings == {"query_prefix": "[Q] ", **lengths}
    found = made(
        "colbert",
        [T, ("Dense", "1", dense), ("MultiVectorMask", "2", {"skiplist_words": [","]})],
        sentence_bert_config=lengths,
    )
    assert (found.kind, found.normalize, found.transformer) == ("multi_vector", False, lengths)
    assert found.mask == {"skiplist_words": [","]}


CLIP = ("CLIPModel", "", None)
BAD = [
    (
        [CLIP, P],
        {},
        "module 0 is of type 'sentence_transformers.models.CLIPModel'; the first module",
    ),
    ([T, ("os.Pooling", "1", {})], {}, "module 1 is of type 'os.Pooling'; supported are Pooling"),
    ([T, ("my.code.Dense", "1", {})], {}, r"types are not imported"),
    ([T, P, ("WordWeights", "2", {})], {}, "WordWeights'; supported are"),
    ([T], {}, "there must be one Pooling module, and there are 0"),
    ([T, P, P], {}, "there are 2"),
    ([T, D, P], {}, "supported is the order Transformer, Pooling, Dense, Normalize"),
    ([T, P, N, D], {}, "supported is the order"),
    ([T, P, ("SpladePooling", "2", {})], {}, "a Pooling module is not supported in this model"),
    ([("Transformer", "0_BERT", None), P], {}, "move the files in that folder"),
    ([T, ("Pooling", "../1", None)], {}, "must be inside the folder"),
    ([T, ("Pooling", "/etc", None)], {}, "must be inside the folder"),
    ([T, ("Pooling", "1_Pooling", None)], {}, "1_Pooling/config.json is missing"),
    ([T, ("Pooling", "1", {"pooling_mode": "median"})], {}, "pooling_mode is 'median'; it must be"),
    ([T, ("Pooling", "1", {"pooling_mode": []})], {}, r"pooling_mode is \[\]; it must be cls"),
    ([T, ("Pooling", "1", {"pooling_mode": [3]})], {}, r"pooling_mode is \[3\]"),
    ([T, ("Pooling", "1", {"pooling_mode": 3})], {}, "must be a string or a list"),
    ([T, ("Pooling", "1", {"pooling_mode_cls_token": 1})], {}, "must be true or false"),
    ([T, ("Pooling", "1", {"pooling_mode_first": True})], {}, "pooling_mode_first is true; quire"),
    ([T, P, ("Dense", "2", DENSE | {"use_residual": True})], {}, "use_residual is true; quire"),
    ([T, P, ("Dense", "2", {"bias": True})], {}, "in_features and out_features must be there"),
    ([T, P, ("Dense", "2", DENSE | {"in_features": "8"})], {}, "must be an integer"),
    ([T, P, ("Dense", "2", DENSE | {"out_features": 0})], {}, "must be an integer >= 1"),
    (
        [T, P, ("Dense", "2", DENSE | {"activation_function": "os.system"})],
        {},
        "must be a class of torch.nn: Id",
    ),
    ([T, P, D, ("Dense", "3", DENSE)], {}, "in_features is 8; it must be 4, as the layer before"),
    ([T, ("SpladePooling", "1", {"pooling_strategy": "sum"})], {}, "pooling_strategy is 'sum'"),
    ([T, ("LogitScore", "1", {})], {}, "true_token_id must be there"),
    ([T, P], {"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length is 0"),
    ([T, P], {"sentence_bert_config": {"do_lower_case": "no"}}, "do_lower_case is 'no'"),
    ([T, P], {"sentence_bert_config": {"tokenizer_args": {"a": 1}}}, "tokenizer_args is"),
    ([T, P], {"sentence_bert_config": "{"}, "is not valid JSON"),
    ([T, P], {"config_sentence_transformers": {"prompts": {"a": 1}}}, "prompts.a is 1"),
    ([T, P], {"config_sentence_transformers": {"prompts": []}}, "prompts is .*must be an object"),
    ([T, P], {"config_sentence_transformers": {"default_prompt_name": "a"}}, "there are none"),
    ([T, P], {"config_sentence_transformers": {"similarity_fn_name": "l3"}}, "one of cosine, dot"),
    ([T, P], {"config_sentence_transformers": {"truncate_dim": -1}}, "truncate_dim is -1"),
    ([T, P], {"config_sentence_transformers": {"model_type": "Router"}}, "model_type is 'Router'"),
    ([T, P], {"modules": "{}"}, "must hold a list of modules"),
    ([T, P], {"modules": "[]"}, "must hold a list of modules"),
    ([T, P], {"modules": "[1]"}, "module 0 is 1; it must be an object"),
    ([T, P], {"modules": "]"}, "modules.json is not valid JSON"),
    ([T, P], {"modules": "[" * 100_000}, "modules.json is not valid JSON"),
]


@pytest.mark.parametrize(("modules", "files", "words"), BAD, ids=[words for *_, words in BAD])
def test_a_bad_folder_is_refused_with_file_value_and_what_is_allowed(
    tmp_path, modules, files, words
):
    with pytest.raises(ConfigError, match=words):
        read_modules(write(tmp_path, modules, **files))


def test_every_problem_is_listed(tmp_path):
    write(
        tmp_path,
        [T, ("Pooling", "1", {"pooling_mode": "median"}), ("Dense", "2", {}), N],
        sentence_bert_config={"max_seq_length": "128"},
        config_sentence_transformers={"truncate_dim": 0},
    )
    with pytest.raises(ConfigError) as caught:
        read_modules(tmp_path)
    text = str(caught.value)
    assert text.startswith("4 problems of ")
    for words in ("truncate_dim", "max_seq_length", "median", "in_features"):
        assert words in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
KEYS = st.sampled_from(
    [
        *("pooling_mode", "pooling_mode_cls_token", "include_prompt", "max_seq_length", "bias"),
        *("do_lower_case", "prompts", "default_prompt_name", "model_type", "truncate_dim"),
        *("in_features", "out_features", "activation_function", "similarity_fn_name", "type"),
    ]
)
FILE = st.dictionaries(KEYS, JSON, max_size=4)


@given(st.data())
def test_any_content_gives_modules_or_a_config_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("st")
    kinds = data.draw(st.lists(st.sampled_from(["Pooling", "Dense", "Normalize"]), max_size=3))
    modules = [T, *((kind, f"{i}_{kind}", data.draw(FILE)) for i, kind in enumerate(kinds))]
    files = {
        name: data.draw(FILE)
        for name in ("sentence_bert_config", "config_sentence_transformers")
        if data.draw(st.booleans())
    }
    write(folder, modules, **files)
    try:
        found = read_modules(folder)
    except ConfigError:
        return
    assert found.methods
