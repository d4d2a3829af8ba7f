"""Folders of pooling models that lack something: the start ends, and names file and cure."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.errors import ConfigError, WeightError
from tests.cpu.pooling.folders import encoder_folder, st_folder
from tests.cpu.tiny_models import write_model

DENSE = "2_Dense/model.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad") / "st"
    st_folder(folder, "bert", dense=[(8, torch.nn.Tanh())], normalize=True)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "st")


def change_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_dense(folder, **tensors):
    save_file(load_file(folder / DENSE) | tensors, folder / DENSE)


CHANGES = {
    "weights of a layer": (
        lambda f: (f / DENSE).unlink(),
        WeightError,
        r"2_Dense holds no weights",
    ),
    "folder of a layer": (
        lambda f: shutil.rmtree(f / "2_Dense"),
        ConfigError,
        r"2_Dense/config.json is missing; modules.json names its folder",
    ),
    "shape of a layer": (
        lambda f: change_dense(f, **{"linear.weight": torch.zeros(9, 64)}),
        WeightError,
        r"2_Dense: .*must be .*linear.weight \[8, \d+\].*got .*\[9, 64\]",
    ),
    "further tensor": (
        lambda f: change_dense(f, more=torch.zeros(3)),
        WeightError,
        r"2_Dense: .*must be .*, more",
    ),
    "width of a layer": (
        lambda f: change_json(f / "2_Dense/config.json", in_features=7),
        ConfigError,
        r"2_Dense/config.json: in_features is 7; the pooled states have \d+ numbers \(mean of",
    ),
    "unknown mode": (
        lambda f: change_json(f / "1_Pooling/config.json", pooling_mode="median"),
        ConfigError,
        r"1_Pooling/config.json: pooling_mode is 'median'; it must be cls, max, mean",
    ),
    "damaged file": (
        lambda f: (f / "1_Pooling/config.json").write_text("{"),
        ConfigError,
        r"1_Pooling/config.json is not valid JSON",
    ),
    "pointer of git-lfs": (
        lambda f: (f / DENSE).write_text("version https://git-lfs.github.com/spec/v1\n"),
        WeightError,
        r"git-lfs|git lfs",
    ),
}


@pytest.mark.slow("the first of them imports sentence_transformers")
@pytest.mark.parametrize("what", CHANGES)
def test_a_folder_that_lacks_something_ends_the_start(folder, what):
    change, kind, words = CHANGES[what]
    change(folder)
    with pytest.raises(kind, match=words):
        LLM(str(folder))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"runner": "generate"}, ConfigError, "attends in both directions, so it cannot generate"),
        ({"convert": "classify"}, WeightError, "classifier"),
        ({"pooler_config": {"pooling_type": "median"}}, ConfigError, "pooling_type must be CLS"),
        (
            {"default_prompt_name": "passage"},
            ConfigError,
            "default_prompt_name must be one of none",
        ),
        ({"hf_overrides": {"matryoshka_dimensions": [99]}}, ConfigError, "embeddings have 8"),
        ({"max_num_batched_tokens": 3}, ConfigError, "must be >= max_model_len"),
    ],
)
def test_an_option_that_a_folder_cannot_follow(good, options, kind, words):
    with pytest.raises(kind, match=words):
        LLM(str(good), **options)


def test_labels_that_do_not_fit_the_head(tmp_path):
    encoder_folder(tmp_path, "bert", "classify")
    with pytest.raises(WeightError, match=r"classifier.*\[5, \d+\].*\[3, \d+\]|\[3, \d+\].*\[5, "):
        LLM(str(tmp_path), hf_overrides={"num_labels": 3})


def test_files_of_pooling_do_not_matter_to_a_model_that_generates(tmp_path):
    write_model(tmp_path, "qwen2")
    unknown = [{"type": "my_code.Transformer", "path": ""}]
    (tmp_path / "modules.json").write_text(json.dumps(unknown))
    with pytest.raises(ConfigError, match=r"my_code.Transformer.*runner=generate"):
        LLM(str(tmp_path))
    llm = LLM(str(tmp_path), runner="generate")
    assert llm.llm_engine.config.generates
