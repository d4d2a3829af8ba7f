"""Every sampling feature gives the same answer on every path through an engine on the GPU.

The features and paths of tests/cpu/test_paths.py. Tokens and text must be the same; logprobs may
differ in the last digits, because a matrix product of one row is not summed like one of many.
"""

import pytest

from quire import LLM
from tests.cpu.test_paths import (
    BASE,
    FEATURES,
    PATHS,
    PLAIN,
    assert_clean,
    by_priority,
    grammars_at_once,  # noqa: F401 - a fixture
    params_of,
    prompt_of,
)
from tests.cpu.tiny_models import write_model

GPU = {"device": "cuda", "num_gpu_blocks_override": 600, "dtype": "float32"}
CHOSEN = (
    "in a batch",
    "in small chunks",
    "eager",
    "by priority",
    "preempted, with a prefix cache",
    "overlapped, in small chunks",
    "overlapped, preempted",
    "preempted, with a host tier",
    "overlapped, with a host tier",
    "three steps in flight",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def said(output):
    """What must be the same to the letter, and the numbers that may be a little off."""
    words, numbers = [], []
    for one in output.outputs:
        words.append((one.text, list(one.token_ids), one.finish_reason, one.stop_reason))
        for entry in one.logprobs or []:
            words.append([(i, p.rank) for i, p in (entry or {}).items() if len(entry) < 9])
            numbers += [p.logprob for i, p in sorted((entry or {}).items()) if p.logprob > -30]
    for entry in output.prompt_logprobs or []:
        words.append([(i, p.rank) for i, p in (entry or {}).items() if len(entry) < 9])
        numbers += [p.logprob for i, p in sorted((entry or {}).items()) if p.logprob > -30]
    return words, numbers


def together(llm):
    names = list(FEATURES)
    given = {"priority": [i % 3 for i in range(len(names))]} if by_priority(llm) else {}
    prompts, params = [prompt_of(n) for n in names], [params_of(n) for n in names]
    outputs = llm.generate(prompts, params, use_tqdm=False, **given)
    return dict(zip(names, outputs, strict=True))


@pytest.fixture(scope="module")
def plain(folder):
    llm = LLM(str(folder), **PLAIN | GPU | {"steps_in_flight": 1})
    return {
        name: said(llm.generate([prompt_of(name)], params_of(name), use_tqdm=False)[0])
        for name in FEATURES
    }


def assert_same(outputs, plain):
    wrong = {}
    for name, output in outputs.items():
        words, numbers = said(output)
        if words != plain[name][0] or numbers != pytest.approx(plain[name][1], abs=1e-3):
            wrong[name] = (words, plain[name][0])
    assert not wrong, f"{sorted(wrong)}: {str(wrong)[:1500]}"


@pytest.mark.parametrize("path", CHOSEN)
def test_a_feature_gives_the_same_answer(folder, plain, path):
    llm = LLM(str(folder), **BASE | GPU | PATHS[path])
    assert_same(together(llm), plain)
    assert_same(together(llm), plain)  # by prefix hits and captured graphs
    assert_clean(llm)


def test_a_greedy_answer_is_the_cpu_s(folder, plain):
    llm = LLM(str(folder), dtype="float32", device="cpu", **PLAIN)
    greedy = [name for name in FEATURES if params_of(name).temperature == 0]
    outputs = {
        name: llm.generate([prompt_of(name)], params_of(name), use_tqdm=False)[0] for name in greedy
    }
    assert_same(outputs, plain)
