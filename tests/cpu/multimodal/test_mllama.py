"""Images that cross attention reads: which tokens see which, and where their blocks come from."""

import pytest

from quire import RequestError, SamplingParams
from quire.models.mllama_text_model import ImageAttention
from quire.models.multimodal.mllama import Encoder
from tests import tiers
from tests.cpu.multimodal.families import image
from tests.cpu.multimodal.test_unusual import GREEDY, asked, check, llm_of
from tests.cpu.multimodal.unusual import mllama

SMALL, WIDE, TALL = image(56, 56), image(40, 120), image(200, 61)
WORDS = "w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return mllama(tmp_path_factory.mktemp("mllama"))


@pytest.fixture(scope="module")
def llm(pair):
    return llm_of(pair, block_size=4)


@pytest.fixture
def encoded(monkeypatch):
    """Tiles of each image that is encoded."""
    found, encode = [], Encoder._encode

    def counted(self, item):
        found.append(len(item.tensors["pixels"]))
        return encode(self, item)

    monkeypatch.setattr(Encoder, "_encode", counted)
    return found


def generate(pair, llm, *prompts, params=GREEDY):
    answers = llm.generate(asked(pair, prompts), params, use_tqdm=False)
    check(pair, prompts, answers)
    return answers


@pytest.mark.slow("an engine for each size of a chunk")
def test_a_chunk_may_end_at_every_token(pair):
    """Before the first image, between two, within a run of two, and behind them."""
    prompts = [(WORDS, [SMALL, WIDE, TALL]), ("w9 w8", [TALL]), (WORDS, [])]
    for budget in (2, 3, 7, 1, 4, 5, 6, 11)[: tiers.amount(3, 8)]:
        settings = {"max_num_seqs": min(budget, 3), "enable_prefix_caching": budget % 2 > 0}
        generate(pair, llm_of(pair, max_num_batched_tokens=budget, **settings), *prompts)


def test_text_before_another_image_is_found_again_and_each_image_encoded_once(pair, llm, encoded):
    head, tail = (" ".join(f"w{i}" for i in range(n, n + 10)) for n in (20, 30))

    def ask(images, cached):
        text = f"{head} {head} {'<|image|> ' * len(images)}{tail}"
        (answer,) = generate(pair, llm, (text, images))
        assert answer.num_cached_tokens == cached
        return list(answer.outputs[0].token_ids)

    one = ask([SMALL], 0)
    other = ask([TALL], 20)
    both = ask([SMALL, TALL], 20)
    assert len({*map(tuple, (one, other, both))}) == 3
    assert ask([SMALL], 28) == one
    assert encoded == [1, 4, 1, 4], "two neighbours are a source of their own"


def test_steps_with_text_alone_leave_out_the_layers_of_images(pair, llm, monkeypatch):
    ran, forward = [], ImageAttention.forward
    monkeypatch.setattr(
        ImageAttention, "forward", lambda own, *given: (ran.append(1), forward(own, *given))[1]
    )
    generate(pair, llm, ("w70 w71 w72", []))
    assert not any(ran)
    generate(pair, llm, ("w73 w74 w75", []), ("w76 w77", [SMALL]))
    assert any(ran)


def test_neighbours_and_separate_images_of_one_request_share_what_is_equal(pair, llm, encoded):
    images = [WIDE, SMALL, WIDE]
    generate(pair, llm, ("w60 w61 w62", images), ("w63 w64", [WIDE]))
    assert sorted(encoded) == [1, 3, 3], "the single ones are equal"


def test_preempted_sequences_find_their_images_or_encode_them_again(pair, encoded):
    llm = llm_of(pair, num_gpu_blocks_override=52, block_size=4, max_model_len=96)
    prompts = [(f"w{30 + i} w{31 + i}", [SMALL if i % 2 else WIDE]) for i in range(6)]
    long = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True)
    generate(pair, llm, *prompts, params=long)
    assert llm.llm_engine.engine.stats().preemptions > 0


def test_marks_of_images_have_no_prompt_logprobs_and_may_be_token_ids(pair, llm):
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1)
    data = {"prompt_token_ids": [150, 5, 199, 6, 7], "multi_modal_data": {"image": SMALL}}
    (answer,) = llm.generate([data], params, use_tqdm=False)
    assert [i for i, one in enumerate(answer.prompt_logprobs) if one is None] == [0, 2]
    (same,) = llm.generate(asked(pair, [("w3 w4 w5", [SMALL])]), params, use_tqdm=False)
    assert same.prompt_token_ids == [150, 3, 199, 4, 5]


def test_images_with_more_positions_than_those_of_a_prompt_are_refused(pair):
    llm = llm_of(pair, limit_mm_per_prompt={"image": 1})
    with pytest.raises(RequestError, match="At most 1 image"):
        llm.generate(asked(pair, [("w5", [SMALL] * 2)]), GREEDY, use_tqdm=False)
    usual = llm_of(pair, limit_mm_per_prompt={})
    with pytest.raises(RequestError, match=r"have 204 positions, .* at most 136: send fewer"):
        usual.generate(asked(pair, [("w5", [TALL] * 3)]), GREEDY, use_tqdm=False)
    generate(pair, usual, ("w5", [SMALL] * 8))


def test_a_prompt_with_images_is_pooled_as_it_is_read(pair):
    llm = llm_of(pair, runner="pooling", convert="embed", max_num_batched_tokens=5, max_num_seqs=2)
    prompts = [("w5 w6 w7 w8", images) for images in ([SMALL], [WIDE], [], [SMALL, WIDE])]
    found = [one.outputs.embedding for one in llm.embed(asked(pair, prompts), use_tqdm=False)]
    for (text, images), got in zip(prompts, found, strict=True):
        want = pair.states(text, images)[-1]
        assert got == pytest.approx((want / want.norm()).tolist(), abs=1e-4)


@pytest.mark.long("an engine of two processes")
def test_two_ranks_compute_what_one_does(pair, llm):
    prompts = [(WORDS, [SMALL, WIDE]), ("w9 w8", [TALL]), (WORDS, [])]
    answers = generate(pair, llm, *prompts)
    two = llm_of(pair, tensor_parallel_size=2, max_num_batched_tokens=9, max_num_seqs=3)
    engine, found = two.llm_engine.engine, {}
    for i, prompt in enumerate(asked(pair, prompts)):
        engine.add(llm.llm_engine.inputs.process(prompt, GREEDY, request_id=str(i)).request)
    while not engine.idle:
        for update in engine.step():
            assert update.error is None
            found.setdefault(update.request_id, []).extend(update.token_ids)
    engine.shutdown()
    assert found == {str(i): [*one.outputs[0].token_ids] for i, one in enumerate(answers)}
