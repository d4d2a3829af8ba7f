"""`LLM` with drafters that have weights: texts as without, memory counted, wrong folders refused."""

import pytest

from quire import LLM, SamplingParams
from quire.config.options import Options
from quire.engine.startup.model_setup import describe_model
from quire.env import read as read_env
from quire.errors import ConfigError, WeightError
from quire.models._weight_report import model_bytes
from tests.cpu.drafters.heads import TARGET, V, target_tensors, write
from tests.cpu.drafters.test_draft_model import SMALL
from tests.cpu.drafters.test_eagle3 import PLAIN, SPECULATORS, head_tensors

SETTINGS = {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu", "max_model_len": 256}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("llm")
    return {
        "target": write(made / "target", TARGET, target_tensors()),
        "draft_model": write(made / "small", SMALL, target_tensors(SMALL, seed=2)),
        "eagle3": write(made / "eagle3", PLAIN, head_tensors("midlayer.")),
        "speculators": write(
            made / "speculators", SPECULATORS, head_tensors("layers.0.", own_embedding=True)
        ),
    }


def texts(llm):
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8] * 9, [9], list(range(20, 60)))]
    params = [
        SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=24, temperature=0.8, seed=3, n=3, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, repetition_penalty=1.3),
    ]
    found = []
    for _ in range(2):  # the second time with prefix hits
        outs = llm.generate(prompts, params, use_tqdm=False)
        found.append([list(one.token_ids) for out in outs for one in out.outputs])
    return found


@pytest.fixture(scope="module")
def plain(folders):
    return texts(LLM(str(folders["target"]), **SETTINGS))


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "speculators"])
def test_texts_are_those_without_drafts(folders, plain, method):
    given = {"model": str(folders[method]), "num_speculative_tokens": 3}
    llm = LLM(str(folders["target"]), **SETTINGS, speculative_config=given)
    assert texts(llm) == plain


def describe(folders, **given):
    options = Options.from_flat(
        {"model": str(folders["target"]), **SETTINGS, "speculative_config": given}
    )
    return describe_model(options, read_env())


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_drafters_memory_is_that_of_its_weights(folders, method):
    from tests.cpu.drafters.heads import engine_with

    memory = describe(folders, model=str(folders[method])).drafter.memory
    engine = engine_with(folders["target"], method, folders[method])
    drafter = engine._executor.runner.worker._drafter
    model = drafter._model if method == "eagle3" else drafter._model._model
    tables = 8 * 4 * 200 if method == "draft_model" else 0  # of rotary angles, which it counts
    held = model_bytes(model)
    assert 0.9 * held <= memory.weights.bytes(4) + tables <= 1.1 * held
    assert len(memory.layers) == (2 if method == "draft_model" else 1)
    engine.shutdown()


def test_a_head_of_another_model_is_refused(folders, tmp_path):
    head = {
        **head_tensors("midlayer."),
        "midlayer.surprise.weight": head_tensors("x.")["fc.weight"],
    }
    del head["fc.weight"]
    given = {"model": str(write(tmp_path / "odd", PLAIN, head)), "num_speculative_tokens": 2}
    with pytest.raises(WeightError) as caught:
        LLM(str(folders["target"]), **SETTINGS, speculative_config=given)
    assert "missing in the checkpoint: fc.weight" in str(caught.value)
    assert "unexpected in the checkpoint: midlayer.surprise.weight" in str(caught.value)
    wrong = head_tensors("midlayer.")
    wrong["d2t"] += V
    given["model"] = str(write(tmp_path / "ids", PLAIN, wrong))
    with pytest.raises(WeightError, match="d2t: the head drafts tokens"):
        LLM(str(folders["target"]), **SETTINGS, speculative_config=given)
    ids = {**PLAIN, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 9]}}
    given["model"] = str(write(tmp_path / "layers", ids, head_tensors("midlayer.")))
    with pytest.raises(ConfigError, match="must hold numbers from 1 to 4"):
        LLM(str(folders["target"]), **SETTINGS, speculative_config=given)
