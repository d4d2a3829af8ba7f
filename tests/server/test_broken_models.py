"""`quire serve` of a broken quantized model: one clear error and exit code 2, whatever is broken."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiers
from tests.cpu.quant.oracle import tiny, write_pair
from tests.cpu.quant.stored_formats import ALL, SIDES
from tests.server.running import SMALL, start

LAYER = "model.layers.0.mlp.down_proj"


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, change):
    path = folder / "config.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def without_scales(tensors):
    for name in [one for one in tensors if one.startswith(LAYER) and "scale" in one]:
        del tensors[name]


def groups_beyond(tensors):
    """Found only when the values are read, in the engine's process."""
    tensors[f"{LAYER}.g_idx"] += 1


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def noise(folder):
    (folder / "model.safetensors").write_bytes(torch.arange(256).byte().numpy().tobytes() * 40)


def gguf_of_huge_counts(folder):
    """As many tensors and settings as 64 bits can state."""
    (folder / "model.safetensors").rename(folder / "model.gguf")
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + b"\xff" * 16 + bytes(64))
    (folder / "config.json").unlink()


CASES = {
    "a missing scale": (
        "gptq",
        lambda folder: edit_tensors(folder, without_scales),
        "missing in the checkpoint",
    ),
    "groups beyond the scales": (
        "gptq in order of activations",
        lambda folder: edit_tensors(folder, groups_beyond),
        "down_proj: g_idx of",
    ),
    "a file cut short": ("hqq", cut_short, "is cut short"),
    "noise for a file": ("awq", noise, "model.safetensors"),
    "sizes that lie": (
        "awq",
        lambda folder: edit_config(folder, lambda hf: hf.update(intermediate_size=4096)),
        "of the wrong shape",
    ),
    "an unknown field": (
        "awq",
        lambda folder: edit_config(folder, lambda hf: hf["quantization_config"].update(magic=1)),
        "magic",
    ),
    "a method that nobody has": (
        "awq",
        lambda folder: edit_config(
            folder, lambda hf: hf["quantization_config"].update(quant_method="torchao")
        ),
        "which quire does not read",
    ),
    "a GGUF header of huge counts": ("awq", gguf_of_huge_counts, "the number of tensors is"),
}
EVERYDAY = ("groups beyond the scales", "a file cut short", "a GGUF header of huge counts")


def error_of(folder, *words):
    process = start(folder, *words, *SMALL, "--skip-tokenizer-init")
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 2, said
    assert "Traceback" not in said
    errors = [line for line in said.splitlines() if "error:" in line]
    assert len(errors) == 1, said
    return said


@pytest.mark.slow("starts the server")
@pytest.mark.parametrize("case", [*EVERYDAY, *tiers.long(*(CASES.keys() - EVERYDAY))])
def test_a_start_ends_with_one_error(case, tmp_path):
    name, damage, says = CASES[case]
    quantize, config = ALL[name]()
    pair = write_pair(tmp_path, tiny("llama", num_hidden_layers=1), quantize, config)
    damage(pair.folder)
    model = pair.folder
    if (model / "model.gguf").exists():
        model /= "model.gguf"
    assert says in error_of(model)


@pytest.mark.long("a start for each format")
@pytest.mark.parametrize("name", sorted(ALL.keys() - SIDES))
def test_each_format_with_a_tensor_that_is_too_short(name, tmp_path):
    quantize, config = ALL[name]()
    pair = write_pair(tmp_path, tiny("llama", num_hidden_layers=1), quantize, config)

    def shorten(tensors):
        largest = max(
            (one for one in tensors if one.startswith(LAYER)), key=lambda k: tensors[k].nbytes
        )
        tensors[largest] = tensors[largest][:-1].contiguous()

    edit_tensors(pair.folder, shorten)
    assert "down_proj" in error_of(pair.folder)
