"""Prompts as embeddings: the vectors of a token prompt give the answer of that prompt."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, RequestError, SamplingParams, TooLong, Unsupported
from quire.core.params import BeamSearchParams
from quire.runner import model_input
from quire.runner.model_input import ModelInputBuilder
from quire.runner.parts.base import load_part_types
from tests.cpu.test_paths import seen
from tests.cpu.tiny_models import write_model

pytestmark = pytest.mark.sampled(2)

SIZES = {"dtype": "float32", "max_model_len": 128, "use_tqdm_on_load": False}
ON = SIZES | {"enable_prompt_embeds": True}
IDS = [70 + 7 * i % 200 for i in range(53)]
TEXT = "The capital of France is"
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
KINDS = {
    "llama": {},
    "qwen3": {},
    "opt": {"word_embed_proj_dim": 24},  # its embeddings are narrower than its layers
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(scope="module")
def peer(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, **ON)


def embed(peer, ids):
    with torch.no_grad():
        return peer.get_input_embeddings()(torch.tensor(ids))


def ids_of(output):
    return [list(one.token_ids) for one in output.outputs]


def answer(output):
    """All that must be as for the token prompt: not its ids."""
    shown = seen(output)
    del shown["prompt_token_ids"], shown["prompt"]
    return shown


def ask(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_vectors_of_a_prompt_give_its_answer(tmp_path, kind):
    folder = str(write_model(tmp_path / kind, kind, **KINDS[kind]))
    vectors = embed(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), IDS)
    llm = LLM(folder, **ON)
    ids, embeds = ask(llm, [IDS, {"prompt_embeds": vectors}])
    assert answer(embeds) == answer(ids)
    assert (embeds.prompt, embeds.prompt_token_ids) == (None, [0] * len(IDS))


def test_generation_agrees_with_transformers(llm, peer):
    torch.manual_seed(1)
    vectors = torch.randn(20, 32) * 0.3  # of no token
    with torch.no_grad():
        want = peer.generate(
            inputs_embeds=vectors[None], max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    assert ids_of(ask(llm, {"prompt_embeds": vectors})[0]) == want.tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3, "steps_in_flight": 2},
        {"enforce_eager": True},
        {"enable_prefix_caching": False, "num_gpu_blocks_override": 18},
        {"dtype": "bfloat16"},
    ],
)
def test_a_batch_mixed_with_token_prompts(folder, peer, settings):
    llm = LLM(folder, **ON | settings)
    prompts, params = [], []
    for i in range(3):
        own = [*IDS[i:], 90 + i]
        vectors = embed(peer, own)
        mask = [j % 5 < 3 for j in range(len(own))]
        spoilt = torch.where(torch.tensor(mask)[:, None], torch.nan, vectors)
        prompts += [
            own,
            {"prompt_embeds": vectors},
            {"prompt_embeds": spoilt, "prompt_token_ids": own, "prompt_is_token_ids": mask},
        ]
        params += [SamplingParams(temperature=0.8, seed=i, n=2, logprobs=1, max_tokens=25)] * 3
    outputs = ask(llm, prompts, params)
    for at in range(0, len(outputs), 3):
        assert answer(outputs[at + 1]) == answer(outputs[at])
        assert answer(outputs[at + 2]) == answer(outputs[at])
        assert outputs[at + 2].prompt_token_ids == outputs[at].prompt_token_ids
    if "num_gpu_blocks_override" in settings:
        assert llm.llm_engine.engine.stats().preemptions


def test_the_prefix_cache_tells_vectors_from_ids_and_from_other_vectors(folder, peer):
    llm = LLM(folder, **ON)
    vectors = embed(peer, IDS)
    zeros = [0] * len(IDS)

    def cached(prompt):
        return ask(llm, prompt)[0].num_cached_tokens

    assert [cached({"prompt_embeds": vectors}), cached({"prompt_embeds": vectors})] == [0, 48]
    assert [cached(zeros), cached(IDS), cached(IDS)] == [0, 0, 48]
    assert cached({"prompt_embeds": torch.cat([vectors, vectors])}) == 48
    changed = vectors.clone()
    changed[33, 5] += 1
    assert cached({"prompt_embeds": changed}) == 32
    salted = {"prompt_embeds": vectors, "cache_salt": "mine"}
    assert [cached(salted), cached(salted)] == [0, 48]
    mask = [True] * 16 + [False] * 37
    mixed = {"prompt_embeds": vectors, "prompt_token_ids": IDS, "prompt_is_token_ids": mask}
    assert cached(mixed) == 16, "the ids before the first vector are those of the token prompt"
    assert [cached(mixed), cached({"prompt_embeds": vectors})] == [48, 48]


def test_penalties_do_not_count_vectors(llm):
    vectors = torch.randn(9, 32)
    params = SamplingParams(temperature=0, logit_bias={0: 60.0}, repetition_penalty=50.0)
    assert ids_of(ask(llm, [0, 0], params)[0])[0][0] != 0, "a token of the prompt is penalised"
    first, second, *_ = ids_of(ask(llm, {"prompt_embeds": vectors}, params)[0])[0]
    assert first == 0
    assert second != 0, "a token of the output is penalised"


@pytest.mark.usefixtures("forked")
@pytest.mark.slow("an engine of two ranks")
def test_two_ranks_give_the_tokens_of_one(folder, peer, llm):
    two = LLM(folder, **ON, device="cpu", tensor_parallel_size=2, max_num_batched_tokens=24)
    prompts = [IDS, {"prompt_embeds": embed(peer, IDS)}, {"prompt_embeds": torch.ones(30, 32)}]
    want = [ids_of(one) for one in ask(llm, prompts)]
    assert [ids_of(one) for one in ask(two, prompts)] == want
    two.llm_engine.engine.shutdown()


def test_vectors_leave_the_process_in_chunks(llm, monkeypatch):
    builds, sent = ModelInputBuilder.build, []

    def build(self, plan):
        made = builds(self, plan)
        found = model_input.decode(model_input.encode(made), load_part_types())
        sent.append(found.parts.get("prompt_embeds"))
        return made

    monkeypatch.setattr(ModelInputBuilder, "build", build)
    llm.reset_prefix_cache()
    ask(llm, {"prompt_embeds": torch.ones(40, 32)}, SamplingParams(max_tokens=5))
    assert [sum(len(p.data) for p in one.pieces) for one in sent if one] == [40 * 32 * 4]
    assert sent[1:] == [None] * 4, "decode steps carry nothing"


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_dtype", ["float32", "bfloat16"])
def test_numbers_are_cast_as_torch_casts_them(folder, model_dtype, dtype):
    llm = LLM(folder, **ON | {"dtype": model_dtype})
    given = (torch.randn(5, 32, dtype=torch.float64) * 10.0 ** torch.arange(-2, 3)[:, None]).to(
        dtype
    )
    request = llm.llm_engine.inputs.process({"prompt_embeds": given}, request_id="a").request
    want = given.to(getattr(torch, model_dtype))
    (span,) = request.prompt_embeds
    assert span.data == want.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(1, 6, 32),
        torch.ones(6, 32, requires_grad=True),
        torch.ones(32).expand(6, 32),
        torch.ones(32, 6).T,
        np.ones((6, 32), np.float64),
    ],
)
def test_forms_of_a_tensor(llm, given):
    want = ids_of(ask(llm, {"prompt_embeds": torch.ones(6, 32)})[0])
    assert ids_of(ask(llm, {"prompt_embeds": given, "prompt": "shown"})[0]) == want


def test_truncation_keeps_an_end(llm, peer):
    params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=10)
    vectors = embed(peer, IDS * 3)
    ids, embeds = ask(llm, [IDS * 2, {"prompt_embeds": vectors}], params)
    assert (ids_of(embeds), len(embeds.prompt_token_ids)) == (ids_of(ids), 10)


ROW = torch.ones(1, 32)
REFUSED = {
    "a list": ([[1.0] * 32], r"tensor of shape \[tokens, 32\], got a list"),
    "sparse": (torch.ones(4, 32).to_sparse(), "layout sparse_coo"),
    "meta": (torch.ones(4, 32, device="meta"), "device meta"),
    "integers": (torch.ones(4, 32, dtype=torch.int64), "bfloat16.*got int64"),
    "complex": (torch.ones(4, 32, dtype=torch.complex64), "got complex64"),
    "one axis": (torch.ones(32), r"\[tokens, 32\].*got \[32\]"),
    "two prompts": (torch.ones(2, 4, 32), r"got \[2, 4, 32\]"),
    "another width": (torch.ones(4, 31), r"must have 32 numbers.*got 31 \(shape \[4, 31\]\)"),
    "no row": (torch.ones(0, 32), "has no rows"),
    "NaN": (torch.where(torch.arange(32) == 9, torch.nan, ROW), r"has nan at \[0, 9\]"),
    "infinity": (-torch.inf * ROW, r"has -inf at \[0, 0\]: all numbers must be finite"),
    "beyond float32": (1e300 * ROW.double(), "has inf at"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_the_numbers(llm, name):
    given, problem = REFUSED[name]
    with pytest.raises(RequestError, match=problem):
        ask(llm, [TEXT, {"prompt_embeds": given}])


@pytest.mark.filterwarnings("ignore")  # torch deprecates both
def test_nested_and_quantized_tensors_are_refused(llm):
    nested = torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)])
    for given in (nested, torch.quantize_per_tensor(ROW, 0.1, 0, torch.qint8)):
        with pytest.raises(RequestError, match=r"layout nested|got qint8"):
            ask(llm, {"prompt_embeds": given})


def test_lengths_combinations_and_dtypes_have_their_limits(folder, llm):
    row = {"prompt_embeds": ROW}
    for prompt, params, kind, problem in (
        ({"prompt_embeds": ROW.expand(128, 32)}, GREEDY, TooLong, "128 tokens.*has 128 tokens"),
        (row, SamplingParams(prompt_logprobs=1), RequestError, "prompt_logprobs"),
        (row | {"suffix": "x"}, GREEDY, RequestError, "suffix"),
        (row | {"prompt_token_ids": [1, 2]}, GREEDY, RequestError, "1 rows .*got 2 and 0"),
        (row | {"prompt_is_token_ids": [True]}, GREEDY, RequestError, "prompt_is_token_ids"),
        (
            row | {"prompt_token_ids": [5000], "prompt_is_token_ids": [False]},
            GREEDY,
            RequestError,
            "holds 5000",
        ),
    ):
        with pytest.raises(kind, match=problem):
            ask(llm, prompt, params)
    with pytest.raises(RequestError, match="--enable-prompt-embeds"):
        ask(LLM(folder, **SIZES), row)
    with pytest.raises(Unsupported, match="prompt_embeds"):
        llm.beam_search([row], BeamSearchParams(beam_width=2, max_tokens=2))
    half = LLM(folder, **ON | {"dtype": "float16"})
    with pytest.raises(RequestError, match=r"has 1000000.0 at \[0, 0\].*float16"):
        ask(half, {"prompt_embeds": ROW * 1e6})
    assert ids_of(ask(llm, [TEXT])[0])
