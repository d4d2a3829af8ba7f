"""Scripts as their authors wrote them for vLLM run on quire, unchanged.

seeds/*.py are code blocks of public tutorials; the hub names in them resolve to tiny random models
in a hub cache of this test's own. `/models` stands for the folder an author kept models in, and
where a tutorial wrote `...` for a name there is one.
"""

import importlib
import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import as_vllm
from tests.cpu.lora_folders import write_adapter
from tests.cpu.multimodal.families import image
from tests.cpu.multimodal.folders import write_llava, write_qwen2_vl
from tests.cpu.pooling.folders import encoder_folder
from tests.cpu.tiny_models import SHAPES, TEMPLATE, write_hub, write_model

SEEDS = sorted((pathlib.Path(__file__).parent / "seeds").glob("*.py"))
POOLING = [path for path in SEEDS if path.stem.startswith("pooling_")]
IMAGES = [path for path in SEEDS if path.stem.startswith("image_")]
ANSWERED = [path for path in SEEDS if path not in (*POOLING, *IMAGES)]
HUB = {
    "facebook/opt-125m": "opt",
    "meta-llama/Llama-2-7b-hf": "llama",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": "qwen2",
}
LOCAL = {
    "Qwen/Qwen3-4B": "qwen3",
    "qwen/Qwen2___5-7B": "qwen2",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1___5B": "qwen2",
}
ENDINGS = {"eos_token_id": list(range(2, 400, 10))}  # so that random models come to an end
SILENT = "lora_sql"
"""A script that prints nothing of its outputs."""
PRINTED = {
    "pooling_reward": "Data: tensor([",
    "pooling_embed": "(size=32)",
    "pooling_classify": "(size=2)",
    "pooling_score": "Score: 0.",
    "pooling_encode": "outputs=PoolingOutput(data=tensor([",
}


def write_embedder(folder):
    """As intfloat/e5-mistral-7b-instruct: the last token of a decoder without an output head."""
    from transformers import AutoConfig, AutoModel

    write_model(folder, "llama")
    config = AutoConfig.for_model("mistral", **SHAPES["llama"], vocab_size=400)
    torch.manual_seed(1)
    AutoModel.from_config(config, dtype=torch.float32).save_pretrained(folder)
    modules = ["models.Transformer", "models.Pooling", "models.Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{module}"}
        for i, (module, path) in enumerate(zip(modules, paths))
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def write_classifier(folder):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    write_model(folder, "qwen2")
    config = AutoConfig.from_pretrained(folder, num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def write_reranker(folder):
    encoder_folder(folder, "xlm_roberta", "classify", num_labels=1)


def write_reward_model(folder):
    """As Qwen/Qwen2.5-Math-RM-72B, whose class is the repository's own."""
    write_model(folder, "qwen2")
    tensors = load_file(folder / "model.safetensors")
    size = SHAPES["qwen2"]["hidden_size"]
    tensors.pop("lm_head.weight", None)
    for i, outputs in ((0, size), (2, 1)):
        tensors[f"score.{i}.weight"] = torch.randn(outputs, size) * size**-0.5
        tensors[f"score.{i}.bias"] = torch.randn(outputs)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen2ForRewardModel"]
    (folder / "config.json").write_text(json.dumps(config))


def write_sql_adapter(folder):
    base = write_model(folder.parent / "base", "llama", max_position_embeddings=8192)
    write_adapter(base, folder, targets=["q_proj", "v_proj"], r=8)


ADAPTERS = {"yard1/llama-2-7b-sql-lora-test": write_sql_adapter}
POOLERS = {
    "Qwen/Qwen2.5-Math-RM-72B": write_reward_model,
    "intfloat/e5-mistral-7b-instruct": write_embedder,
    "jason9693/Qwen2.5-1.5B-apeach": write_classifier,
    "BAAI/bge-reranker-v2-m3": write_reranker,
}


READERS = {
    "llava-hf/llava-1.5-7b-hf": write_llava,
    "Qwen/Qwen2-VL-2B-Instruct": write_qwen2_vl,
}
"""Models that read images."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """hub/: a hub cache. models/: an author's folder. work/: where the scripts run."""
    root = tmp_path_factory.mktemp("seeds")
    long = {"generation": ENDINGS, "max_position_embeddings": 8192}
    write_hub(root / "hub", HUB | POOLERS | ADAPTERS | READERS, **long)
    for name, kind in LOCAL.items():
        write_model(root / "models" / name, kind, **long)
    (root / "work").mkdir()
    (root / "work" / "<path_to_template>").write_text(TEMPLATE)
    image(40, 60).save(root / "work" / "one.png")
    image(80, 50).save(root / "work" / "two.jpg")
    return root


@pytest.fixture
def hub(place, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(place / "work")
    as_vllm.install()
    yield place
    as_vllm.uninstall()


def written(place, path):
    """The script, with the author's folder put where it is here."""
    script = place / "work" / path.name
    script.write_text(path.read_text().replace('"/models/', f'"{place}/models/'))
    return str(script)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", ANSWERED, ids=lambda p: p.stem)
def test_a_script_runs_unchanged(path, hub, capsys):
    names = runpy.run_path(written(hub, path), run_name="__main__")
    said = capsys.readouterr()
    assert "Processed prompts: 100%" in said.err or path.stem == "beam_search_opt"
    for output in names.get("outputs", names.get("output")):
        assert output.finished
        assert output.outputs[0].finish_reason in ("stop", "length")
    printed = said.out.count("Generated text: ") + said.out.count("Answer: ")
    assert printed or "RequestOutput(request_id=0" in said.out or path.stem == SILENT
    if path.stem == SILENT:
        base = names["llm"].generate(names["prompts"], names["sampling_params"])
        assert [o.outputs[0].text for o in base] != [o.outputs[0].text for o in names["outputs"]]


@pytest.mark.slow("the first of them imports transformers")
@pytest.mark.parametrize("path", POOLING, ids=lambda p: p.stem)
def test_a_script_of_a_pooling_model_runs_unchanged(path, hub, capsys):
    names = runpy.run_path(written(hub, path), run_name="__main__")
    captured = capsys.readouterr()
    assert "Processed prompts: 100%" in captured.err
    assert PRINTED[path.stem] in captured.out
    outputs = names["output"]
    assert all(one.finished for one in (outputs if isinstance(outputs, list) else [outputs]))


@pytest.mark.slow("the first of them imports transformers")
@pytest.mark.parametrize("path", IMAGES, ids=lambda p: p.stem)
def test_a_script_with_images_runs_unchanged(path, hub, capsys):
    names = runpy.run_path(written(hub, path), run_name="__main__")
    printed = capsys.readouterr().out
    for output in names["outputs"]:
        assert output.outputs[0].finish_reason in ("stop", "length")
        assert output.outputs[0].text in printed
        assert len(output.prompt_token_ids) > len(
            names["llm"].get_tokenizer().encode(output.prompt)
        )


@pytest.mark.usefixtures("forked")
def test_the_same_from_outside(place):
    """python -m quire.as_vllm SCRIPT, with the environment that users set."""
    root = pathlib.Path(__file__).resolve().parents[2]
    home = place / "home"
    if not home.exists():
        shutil.copytree(place / "hub", home / "hub", symlinks=True)
    variables = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)}
    seed = next(path for path in SEEDS if path.stem == "batched_opt")
    run = subprocess.run(
        [sys.executable, "-m", "quire.as_vllm", written(place, seed)],
        env=variables, check=False, capture_output=True, text=True, cwd=place / "work",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Prompt: ") == 4


def test_every_name_of_the_alias_exists():
    for places in as_vllm.PLACES.values():
        for place, names in places.items():
            for name in names.split():
                assert hasattr(importlib.import_module(place), name.rpartition("=")[2]), (
                    place,
                    name,
                )
