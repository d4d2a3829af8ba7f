"""Engine-wide logits processors reach the sampler, check requests at the edge, and fail alone."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.sampling.processors import AdapterLogitsProcessor


class Only(AdapterLogitsProcessor):
    """extra_args={"only": token}: the only allowed token; a negative one raises in the step."""

    @classmethod
    def validate_params(cls, params):
        only = (params.extra_args or {}).get("only", 0)
        if not isinstance(only, int):
            raise ValueError(f"only must be a token id, got {only!r}")

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        only = (params.extra_args or {}).get("only")
        return None if only is None else lambda ids, logits: keep(only, logits)


def keep(only, logits):
    if only < 0:
        raise RuntimeError("no such token")
    mask = torch.full_like(logits, -torch.inf)
    mask[only] = logits[only]
    return mask


@pytest.fixture(scope="module")
def llm():
    return LLM("embedded", logits_processors=[Only], max_model_len=256, use_tqdm_on_load=False)


def params(**more):
    return SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, **more)


def test_one_request_s_argument_changes_its_row_alone(llm):
    plain, forced = llm.generate(
        ["Hello", "Hello"], [params(), params(extra_args={"only": 77})], use_tqdm=False
    )
    assert list(forced.outputs[0].token_ids) == [77] * 4
    assert list(plain.outputs[0].token_ids) != [77] * 4


def test_bad_arguments_are_refused_before_anything_runs(llm):
    with pytest.raises(RequestError, match="only must be a token id"):
        llm.generate(
            ["Hello", "Hello"], [params(), params(extra_args={"only": "x"})], use_tqdm=False
        )


def test_a_processor_that_raises_ends_its_request_alone(llm):
    good, bad = llm.generate(
        ["Hello", "Hello"], [params(), params(extra_args={"only": -1})], use_tqdm=False
    )
    assert bad.outputs[0].finish_reason == "error"
    assert good.outputs[0].finish_reason == "length"


def test_a_class_that_is_no_processor_is_refused():
    with pytest.raises(ValueError, match="not a logits processor"):
        LLM("embedded", logits_processors=[dict], use_tqdm_on_load=False)


def test_chosen_ids_are_scored(llm):
    output = llm.generate(["Hello"], params(logprob_token_ids=[5, 9]), use_tqdm=False)[0].outputs[0]
    for step, token in zip(output.logprobs, output.token_ids):
        assert set(step) == {token, 5, 9}
        assert all(step[i].logprob <= step[token].logprob for i in (5, 9))
