"""Requests of pooling models: texts, pairs, lengths and parameters, with small real tokenizers."""

import logging

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors

from quire.config.engine_config import LateInteractionSection, PoolingSection
from quire.core.pooling_params import PoolingParams
from quire.core.types import Pooling
from quire.errors import RequestError, TooLong, Unsupported
from quire.text.pooling_input import PoolingInputProcessor
from quire.text.pooling_plan import PoolingInputOptions
from quire.text.tokenizing.backends import TokenizersBackend
from quire.text.tokenizing.tokenizer import Tokenizer
from tests.pure.text import made

TEXT = "[PAD] [UNK] [CLS] [SEP] [MASK] [Q] [D] a b c d e f g h query : document . ,"
WORDS = TEXT.split()
IDS = {word: i for i, word in enumerate(WORDS)}
CLS, SEP, MASK = IDS["[CLS]"], IDS["[SEP]"], IDS["[MASK]"]
TEMPLATES = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "roberta": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
    "eos": ("$A [SEP]", "$A [SEP] $B [SEP]"),
}


def tokenizer(kind="bert", **config):
    tok = FastTokenizer(models.WordLevel(IDS, unk_token="[UNK]"))
    tok.normalizer = normalizers.Lowercase()
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.add_special_tokens([word for word in WORDS if word.startswith("[")])
    if kind != "none":
        single, pair = TEMPLATES[kind]
        special = [("[CLS]", CLS), ("[SEP]", SEP)]
        tok.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=special
        )
    named = {"mask_token": "[MASK]", "cls_token": "[CLS]"}
    return Tokenizer(TokenizersBackend(tok), named=named, config=config)


def section(**more):
    given = {"tasks": ("embed",), "methods": ("mean",), "size": 8, "token_types": 2} | more
    return PoolingSection(**given)


def processor(kind="bert", *, limit=12, tok=None, generates=False, template=None, **more):
    return PoolingInputProcessor(
        tok or tokenizer(kind),
        section(**more),
        max_model_len=limit,
        vocab_size=len(WORDS),
        generates=generates,
        chat_template=template,
    )


def process(one, *args, **settings):
    return list(one.iter_prompts(*args, **settings))


def words(text):
    return tuple(IDS[word] for word in text.split())


def prompts_of(inputs):
    return [request.prompt for one in inputs for request in one.requests]


def options(**given):
    return PoolingInputOptions(**given)


# -- prompts ------------------------------------------------------------------------------------


def test_a_text_gets_the_special_tokens_of_its_tokenizer():
    (made,) = process(processor(), ["a B c"], name="x", common={"priority": 3})
    (request,) = made.requests
    assert request.prompt == words("[CLS] a b c [SEP]")
    assert (request.id, request.priority, made.num_tokens) == ("x.0", 3, 5)
    assert request.pooling == Pooling("embed")
    assert not request.read_prefix_cache  # a mean needs the state of every token
    assert request.token_types == b""


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma", "unigram", "word_piece"])
@pytest.mark.parametrize("text", ["Hello world", " two  spaces", "你好", "", "a b c " * 20])
def test_ids_are_those_of_the_tokenizer_alone(name, text):
    tok = made.face(name)
    one = PoolingInputProcessor(tok, section(), max_model_len=9999, vocab_size=9999)
    want = tok.encode(text)
    if not want:
        with pytest.raises(RequestError, match="empty"):
            process(one, [text])
        return
    assert prompts_of(process(one, [text, "x", text])) == [
        tuple(want), tuple(tok.encode("x")), tuple(want),
    ]  # fmt: skip


def test_an_empty_text_has_only_special_tokens():
    assert prompts_of(process(processor(), [""])) == [words("[CLS] [SEP]")]


def test_all_forms_of_a_prompt_mean_the_same():
    ids = words("[CLS] a [SEP]")
    given = ["a", {"prompt": "a"}, list(ids), {"prompt_token_ids": list(ids)}]
    assert prompts_of(process(processor(), given)) == [ids] * 4


def test_special_tokens_may_be_left_out():
    made = process(processor(), ["a b"], options=options(add_special_tokens=False))
    assert prompts_of(made) == [words("a b")]


def test_token_types_come_with_token_ids():
    given = {"prompt_token_ids": [7, 8, 9], "token_type_ids": [0, 1, 1]}
    (made,) = process(processor(), [given])
    assert made.requests[0].token_types == b"\0\1\1"
    with pytest.raises(RequestError, match=r"as many as prompt_token_ids \(3\), got 2"):
        process(processor(), [given | {"token_type_ids": [0, 1]}])
    with pytest.raises(RequestError, match=r"integers in \[0, 1\)"):
        process(processor(token_types=0), [given])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a b c d e f g h a b c", r"prompts\[1\]: .*maximum context length is 12 .* has 13 tokens"),
        ([99], r"prompts\[1\]: prompt_token_ids holds 99; .* \[0, 20\)"),
        ([], r"prompts\[1\]: the prompt is empty"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, r"prompts\[1\]: multi_modal_data: "),
        ("\ud800", r"prompts\[1\]: the text holds half a surrogate pair"),
        ({"prompt_embeds": [[1.0]]}, r"prompts\[1\]: prompt_embeds"),
    ],
)
def test_a_bad_item_is_named_by_its_index(prompt, message):
    with pytest.raises(RequestError, match=message):
        process(processor(), ["a", prompt, "b"])


def test_the_error_of_a_lone_prompt_has_no_index():
    with pytest.raises(TooLong, match=r"^This model's maximum .*truncate_prompt_tokens"):
        process(processor(), ["a " * 20])


@pytest.mark.parametrize(
    ("most", "side", "want"),
    [
        (4, "right", "[CLS] a b [SEP]"),
        (4, "left", "[CLS] g h [SEP]"),
        (4, None, "[CLS] a b [SEP]"),
        (-1, "right", "[CLS] a b c d e f g h [SEP]"),
        (2, "right", "[CLS] [SEP]"),
    ],
)
def test_a_text_is_cut_inside_of_its_special_tokens(most, side, want):
    made = process(
        processor(),
        ["a b c d e f g h"],
        PoolingParams(truncate_prompt_tokens=most),
        options=options(truncation_side=side),
    )
    assert prompts_of(made) == [words(want)]


def test_a_long_text_is_cut_to_the_limit_of_the_model():
    params = PoolingParams(truncate_prompt_tokens=-1)
    (ids,) = prompts_of(process(processor(), ["a " * 50], params))
    assert ids == (CLS, *[IDS["a"]] * 10, SEP)
    with pytest.raises(RequestError, match=r"is 13, more than max_model_len \(12\)"):
        process(processor(), ["a"], PoolingParams(truncate_prompt_tokens=13))


def test_a_tokenizer_with_more_tokens_than_its_model_is_no_crash():
    small = PoolingInputProcessor(tokenizer(), section(), max_model_len=12, vocab_size=10)
    with pytest.raises(RequestError, match="the tokenized text holds 12"):
        process(small, ["f"])


def test_without_a_tokenizer_ids_are_pooled():
    bare = PoolingInputProcessor(None, section(), max_model_len=12, vocab_size=20)
    assert prompts_of(process(bare, [[1, 2]])) == [(1, 2)]
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        process(bare, ["a"])


def test_salts_separate_cached_prefixes():
    made = process(
        processor(), ["a", {"prompt": "a", "cache_salt": "own"}], options=options(cache_salt="all")
    )
    one, two = (each.requests[0].salt for each in made)
    assert one != two
    assert b"" not in (one, two)


# -- prefixes -----------------------------------------------------------------------------------

PROMPTS = {"query": "query : ", "document": "document : "}


@pytest.mark.parametrize(
    ("default", "name", "want"),
    [
        (None, None, "[CLS] a [SEP]"),
        ("document", None, "[CLS] document : a [SEP]"),
        ("document", "query", "[CLS] query : a [SEP]"),
    ],
)
def test_the_prefix_of_a_prompt_name_is_written_before_texts(default, name, want):
    one = processor(prompts=PROMPTS, default_prompt=default)
    made = process(one, ["a", [7]], PoolingParams(prompt_name=name))
    assert prompts_of(made) == [words(want), (7,)]


def test_a_prefix_may_be_left_out():
    one = processor(prompts=PROMPTS, default_prompt="query")
    assert prompts_of(process(one, ["a"], options=options(use_prompts=False))) == [
        words("[CLS] a [SEP]")
    ]


def test_an_unknown_prompt_name_is_refused_with_the_known_ones():
    with pytest.raises(RequestError, match=r"'query', 'document'.*got 'x'"):
        process(processor(prompts=PROMPTS), ["a"], PoolingParams(prompt_name="x"))


def test_the_tokens_of_a_prefix_may_not_count():
    one = processor(prompts=PROMPTS, default_prompt="query", include_prompt=False)
    made = process(one, ["a", [7]])
    assert [each.requests[0].pooling.skip_tokens for each in made] == [3, 0]  # [CLS] query :


# -- parameters ---------------------------------------------------------------------------------


def plan_of(params, **more):
    (made,) = process(processor(**more), ["a"], params)
    return made.requests[0]


def test_defaults_are_those_of_the_model():
    assert not plan_of(None, normalize=False).pooling.use_activation
    labels = {"tasks": ("classify",), "size": 3, "use_activation": False}
    assert not plan_of(None, **labels).pooling.use_activation
    assert plan_of(PoolingParams(use_activation=True), **labels).pooling.use_activation
    assert plan_of(None, matryoshka=True, default_dimensions=4).pooling.dimensions == 4
    assert plan_of(None, matryoshka=True, default_dimensions=8).pooling.dimensions is None


@pytest.mark.parametrize(
    ("more", "given", "message"),
    [
        ({}, 4, "does not support Matryoshka.*is_matryoshka"),
        ({"matryoshka": True}, 9, r"in \[1, 8\], got 9"),
        ({"matryoshka": True, "matryoshka_dimensions": (2, 4)}, 3, "one of 2, 4, got 3"),
        ({"tasks": ("classify",)}, 4, "task classify cannot be cut"),
    ],
)
def test_dimensions_that_cannot_be_had_are_refused(more, given, message):
    with pytest.raises(RequestError, match=message):
        plan_of(PoolingParams(dimensions=given), **more)


def test_dimensions_are_kept():
    assert plan_of(PoolingParams(dimensions=4), matryoshka=True).pooling.dimensions == 4
    assert plan_of(PoolingParams(dimensions=8), matryoshka=True).pooling.dimensions is None


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("classify", "no task 'classify', it has embed.*--convert classify"),
        ("reward", "no task 'classify'.*--convert classify"),
        ("token_embed", "no task 'token_embed'.*pooler-config"),
    ],
)
def test_a_task_that_the_model_does_not_have_says_how_to_start_it(task, message):
    with pytest.raises(RequestError, match=message):
        plan_of(PoolingParams(task=task))


def test_old_names_of_tasks():
    both = {"tasks": ("token_classify", "classify"), "size": 2}
    assert plan_of(PoolingParams(task="encode"), **both).pooling.task == "token_classify"
    assert plan_of(PoolingParams(task="reward"), **both).pooling.task == "token_classify"
    assert plan_of(PoolingParams(task="score"), **both).pooling.task == "classify"


def test_a_last_token_may_be_read_from_the_cache():
    last = {"methods": ("last",)}
    assert plan_of(None, **last).read_prefix_cache
    assert not plan_of(PoolingParams(skip_reading_prefix_cache=True), **last).read_prefix_cache
    with pytest.raises(RequestError, match="needs the states of all tokens"):
        plan_of(PoolingParams(skip_reading_prefix_cache=False))


def test_step_tags_and_columns_belong_to_token_tasks():
    steps = {"tasks": ("token_classify",), "size": 2, "step_tag_id": 7, "returned_token_ids": (1,)}
    pooling = plan_of(None, **steps).pooling
    assert (pooling.step_tag_id, pooling.returned_token_ids) == (7, (1,))
    own = PoolingParams(step_tag_id=8, returned_token_ids=[0])
    pooling = plan_of(own, **steps).pooling
    assert (pooling.step_tag_id, pooling.returned_token_ids) == (8, (0,))
    with pytest.raises(RequestError, match="step_tag_id selects tokens"):
        plan_of(PoolingParams(step_tag_id=8))
    with pytest.raises(RequestError, match="belongs to token_classify"):
        plan_of(PoolingParams(returned_token_ids=[0]))
    with pytest.raises(RequestError, match=r"in \[0, 2\)"):
        plan_of(PoolingParams(returned_token_ids=[2]), **steps)


def test_params_may_be_one_for_each_prompt():
    one = processor(matryoshka=True)
    made = process(one, ["a", "b"], [PoolingParams(dimensions=2), PoolingParams()])
    assert [each.pooling.dimensions for each in made] == [2, None]
    with pytest.raises(RequestError, match=r"one per prompt \(2\); got 1"):
        process(one, ["a", "b"], [PoolingParams()])


# -- long inputs --------------------------------------------------------------------------------


def test_a_long_text_is_divided_if_the_model_allows_it():
    one = processor(limit=5, max_embed_len=9)
    (made,) = process(one, ["a b c d e f g"])
    assert prompts_of([made]) == [words("[CLS] a b c [SEP]"), words("[CLS] d e f [SEP]"),
                                  words("[CLS] g [SEP]")]  # fmt: skip
    assert [request.id for request in made.requests] == ["pool.0.0", "pool.0.1", "pool.0.2"]
    assert made.normalize
    assert not any(request.pooling.use_activation for request in made.requests)
    (made,) = process(one, [[7] * 9], PoolingParams(use_activation=False))
    assert prompts_of([made]) == [(7,) * 5, (7,) * 4]
    assert not made.normalize
    with pytest.raises(TooLong, match=r"length is 9 tokens.*has 10 tokens"):
        process(one, ["a b c d e f g h"])
    (made,) = process(one, ["a b c d"], PoolingParams(truncate_prompt_tokens=-1))
    assert prompts_of([made]) == [words("[CLS] a b c [SEP]")]


# -- pairs --------------------------------------------------------------------------------------

LABEL = {"tasks": ("classify",), "size": 1}


def pair(query, document, kind="bert", params=None, limit=12, given=None, **more):
    made = processor(kind, limit=limit, **LABEL | more).process_pairs(
        query, document, params, options=options(**given or {})
    )
    return [(each.requests[0].prompt, each.requests[0].token_types) for each in made.inputs]


@pytest.mark.parametrize(
    ("kind", "want", "types"),
    [
        ("bert", "[CLS] a b [SEP] c [SEP]", b"\0\0\0\0\1\1"),
        ("roberta", "[CLS] a b [SEP] [SEP] c [SEP]", b""),
        ("eos", "a b [SEP] c [SEP]", b""),
    ],
)
def test_a_pair_is_joined_as_the_tokenizer_does(kind, want, types):
    ids = words(want)
    assert ids == tuple(tokenizer(kind).backend.tokenizer.encode("a b", "c").ids)
    assert pair("a b", "c", kind) == [(ids, types)]
    assert pair("a b", "c", kind, token_types=0) == [(ids, b"")]


@pytest.mark.parametrize("most", range(5, 12))
@pytest.mark.parametrize("texts", [("a b c", "d e f g h"), ("a b c d e f", "g"), ("a b", "c d")])
def test_a_long_pair_is_cut_as_the_tokenizers_library_does(most, texts):
    peer = tokenizer().backend.tokenizer
    peer.enable_truncation(most, strategy="longest_first")
    want = peer.encode(*texts)
    params = PoolingParams(truncate_prompt_tokens=most)
    assert pair(*texts, params=params) == [(tuple(want.ids), bytes(want.type_ids))]


def test_a_limit_of_documents_leaves_the_query_whole():
    texts, limit = ("a b c d", "e f g h a"), {"max_tokens_per_doc": 4}
    assert pair(*texts, given=limit)[0][0] == words("[CLS] a b c d [SEP] e f g h [SEP]")
    assert pair(*texts, given=limit, limit=9)[0][0] == words("[CLS] a b c d [SEP] e f [SEP]")
    assert pair(*texts, given={"max_tokens_per_query": 1})[0][0] == words(
        "[CLS] a [SEP] e f g h a [SEP]"
    )
    with pytest.raises(TooLong, match="the query has 4 tokens, the document 4, and 3 are added"):
        pair(*texts, given=limit, limit=7)
    with pytest.raises(RequestError, match=r"max_tokens_per_doc .* \[0, 12\).*got 12"):
        pair(*texts, given={"max_tokens_per_doc": 12})


def test_a_pair_that_is_too_long_names_its_document():
    one = processor(**LABEL)
    with pytest.raises(TooLong, match=r"data_2\[1\]: .*length is 12 .*document 11.*max_tokens_per"):
        one.process_pairs("a", ["b", "c " * 11])


@pytest.mark.parametrize(
    ("queries", "documents", "want"),
    [("a", "b", 1), ("a", ["b", "c", "b"], 3), (["a"], ["b", "c"], 2), (["a", "b"], ["c", "d"], 2)],
)
def test_one_query_or_as_many_as_documents(queries, documents, want):
    assert len(processor(**LABEL).process_pairs(queries, documents).places) == want


@pytest.mark.parametrize(
    ("queries", "documents", "message"),
    [
        (["a", "b"], ["c"], "1:1, 1:N or N:N; got 2 queries and 1 documents"),
        (["a", "b"], ["c"] * 3, "1:1, 1:N or N:N"),
        ([], ["c"], "At least one text element must be given; data_1"),
        ("a", [], "At least one text element must be given; data_2"),
        ("a", 5, "data_2 must be a text"),
        ("a", ["b", 5], r"data_2\[1\] must be a text"),
        (
            "a",
            [{"content": [{"type": "image_url"}]}],
            r"data_2\[0\].content\[0\]: this model reads text only",
        ),
    ],
)
def test_bad_pairs_are_refused(queries, documents, message):
    with pytest.raises(RequestError, match=message):
        processor(**LABEL).process_pairs(queries, documents)


def test_texts_may_be_parts():
    content = {"content": [{"type": "text", "text": "b "}, {"type": "text", "text": "c"}]}
    assert pair("a", content) == pair("a", "b c") == pair({"text": "a"}, [{"content": "b c"}])


def test_pairs_of_one_query_follow_one_another():
    made = processor(**LABEL).process_pairs(["a", "b", "a"], ["c", "d", "e"])
    seconds = [each.requests[0].prompt[1] for each in made.inputs]
    assert seconds == [*words("a a b")]
    assert made.places == [(0,), (2,), (1,)]
    shown = [made.inputs[place].requests[0].prompt[3] for (place,) in made.places]
    assert shown == [*words("c d e")]


def test_texts_of_a_bi_encoder_are_encoded_once():
    one = processor(prompts=PROMPTS, methods=("last",))
    made = one.process_pairs(["a", "a"], ["b", "a"])
    assert made.kind == "bi_encoder"
    assert prompts_of(made.inputs) == [
        words("[CLS] query : a [SEP]"),
        words("[CLS] document : b [SEP]"),
        words("[CLS] document : a [SEP]"),
    ]
    assert made.places == [(0, 1), (0, 2)]
    assert len({request.id for each in made.inputs for request in each.requests}) == 3


def test_models_that_do_not_score_say_so():
    with pytest.raises(RequestError, match=r"num_labels == 1\. This model has 3 labels"):
        processor(tasks=("classify",), size=3).process_pairs("a", "b")
    with pytest.raises(RequestError, match=r"generates text.*--convert classify"):
        processor(generates=True).process_pairs("a", "b")


# -- templates ----------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'query' %}query : {{ m.content }} {% elif m['role'] "
    "== 'document' %}document : {{ m.content }} {% endif %}{% endfor %}{{ instruction or '' }} h"
)


def test_a_template_of_roles_writes_scores(caplog):
    with caplog.at_level(logging.INFO):
        ((ids, _),) = pair("a", "b", template=CHAT, limit=20, given={"instruction": "c"})
    assert ids == words("query : a document : b c h")  # no special tokens but its own
    assert "chat template writes query and document" in caplog.text


def test_a_template_may_come_with_a_call():
    ((ids, _),) = pair("a", "b", given={"chat_template": CHAT})
    assert ids == words("query : a document : b h")
    with pytest.raises(RequestError, match="roles 'query' and 'document'"):
        pair("a", "b", given={"chat_template": "{{ messages }}"})
    with pytest.raises(RequestError, match=r"chat_template: scores of this model \(bi_encoder\)"):
        processor().process_pairs("a", "b", options=options(chat_template=CHAT))


def test_a_template_stays_whole_when_documents_are_cut():
    params = PoolingParams(truncate_prompt_tokens=8)
    ((ids, _),) = pair("a", "b c d e f", params=params, template=CHAT)
    assert ids == words("query : a document : b c h")
    ((ids, _),) = pair("a b c", "b c d", template=CHAT, given={"max_tokens_per_doc": 1})
    assert ids == words("query : a b c document : b h")
    ((ids, _),) = pair("a b c", "b c d", template=CHAT, given={"max_tokens_per_query": 1})
    assert ids == words("query : a document : b c d h")
    with pytest.raises(TooLong, match="have 11 tokens without the document"):
        pair("a a a a a a", "b", params=params, template=CHAT)
    with pytest.raises(TooLong, match="query, document and template have 13 tokens"):
        pair("a a a a a", "b b b", template=CHAT)


def test_instructions_need_a_template():
    with pytest.raises(RequestError, match="instruction: the prompts of this model have none"):
        pair("a", "b", given={"instruction": "x"})


def test_texts_without_a_template_are_warned_about(caplog):
    ((ids, _),) = pair("a", "b", score_format="concatenated")
    assert ids == words("[CLS] [UNK] [SEP]")  # "ab"
    assert "without a template" in caplog.text
    caplog.clear()
    assert pair("a", "b", "none", token_types=0) == [(words("a b"), b"")]
    assert "nothing between query and document" in caplog.text


WRITTEN = {
    "qwen3_reranker": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        "answer the query\n<Query>: Q\n<Document>: D<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
        "</think>\n\n"
    ),
    "bge_reranker_gemma": (
        "A: Q\nB: D\nGiven a query A and a passage B, determine whether the passage contains an "
        "answer to the query by providing a prediction of either 'Yes' or 'No'."
    ),
    "mxbai_rerank_v2": (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nquery: Q\ndocument: D\nYou are a search relevance expert "
        "who evaluates how well documents match search queries. For each query-document pair, "
        "carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_rerankers_that_are_known_have_their_prompts(name, caplog):
    tok = made.face("byte_level")
    with caplog.at_level(logging.INFO):
        one = PoolingInputProcessor(
            tok, section(**LABEL, score_format=name), max_model_len=9999, vocab_size=9999
        )
    assert "prompts are written for" in caplog.text
    made_ = one.process_pairs("Q", ["D", "D"])
    assert tok.decode(made_.inputs[0].token_ids) == WRITTEN[name]
    if name != "bge_reranker_gemma":
        head, tail = WRITTEN[name].split("D")[0], WRITTEN[name][len(WRITTEN[name].split("D")[0]) :]
        written = one.process_pairs(head, tail)  # a script may have the template itself
        assert tok.decode(written.inputs[0].token_ids) == WRITTEN[name]
    instructed = one.process_pairs("Q", "D", options=options(instruction="Find it"))
    assert "Find it" in tok.decode(instructed.inputs[0].token_ids)


# -- late interaction ---------------------------------------------------------------------------


def colbert(limit=12, **more):
    late = {
        "query_prefix": "[Q]", "document_prefix": "[D] ", "query_length": 6, "max_query_length": 6,
        "document_length": 7, "skiplist": (".", ",", "nothing"),
    }  # fmt: skip
    return processor(
        limit=limit, tasks=("token_embed",), late_interaction=LateInteractionSection(**late | more)
    )


def test_a_query_is_marked_and_expanded():
    (one,) = process(colbert(), ["a ."], PoolingParams(prompt_name="query"))
    assert one.token_ids == [*words("[CLS] [Q] a . [SEP] [MASK]")]
    assert (one.num_tokens, one.kept_rows) == (5, None)
    assert one.pooling.unattended_tokens == 1
    (other,) = process(
        colbert(attends_to_expansion=True), ["a ."], PoolingParams(prompt_name="query")
    )
    assert (other.token_ids, other.pooling.unattended_tokens) == (one.token_ids, 0)
    (one,) = process(colbert(), ["a b c d e"], PoolingParams(prompt_name="query"))
    assert one.token_ids == [*words("[CLS] [Q] a b c [SEP]")]
    (one,) = process(
        colbert(max_query_length=None), ["a b c d e"], PoolingParams(prompt_name="query")
    )
    assert one.token_ids == [*words("[CLS] [Q] a b c d e [SEP]")]
    (one,) = process(
        colbert(query_length=None, max_query_length=None), ["a"], PoolingParams(prompt_name="query")
    )
    assert one.token_ids == [*words("[CLS] [Q] a [SEP]")]


def test_a_document_is_marked_and_cut_and_its_punctuation_does_not_count():
    (one,) = process(colbert(), ["a , b c . d e"])
    assert one.token_ids == [*words("[CLS] [D] a , b c [SEP]")]
    assert one.kept_rows == (0, 1, 2, 4, 5, 6)


def test_scores_of_late_interaction_have_both_roles():
    made = colbert().process_pairs("a", ["b", "c"])
    assert made.kind == "late_interaction"
    assert prompts_of(made.inputs) == [
        words("[CLS] [Q] a [SEP] [MASK] [MASK]"), words("[CLS] [D] b [SEP]"),
        words("[CLS] [D] c [SEP]"),
    ]  # fmt: skip
    assert made.places == [(0, 1), (0, 2)]


def test_other_inputs_are_refused_by_name():
    with pytest.raises(Unsupported, match="suffix"):
        process(processor(), [{"prompt": "a", "suffix": "b"}])
