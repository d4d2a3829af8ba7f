"""Models from GGUF files alone: configuration, names and changed tensors of each architecture."""

import json
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.errors import QuireError, WeightError
from quire.models.build import build_model, read_model_config
from quire.weights.gguf.container import read_gguf
from quire.weights.gguf.folder import folder_of
from tests import tiers
from tests.cpu.gguf_files.writer import write_gguf
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import peer, prompt_of

VARIANTS = (
    *("llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"),
    *("phi3", "gpt2", "deepseek_v2", "deepseek_v3", "gpt_oss"),
    *("llama_llama3", "llama_bias_tied_head_dim", "llama_linear", "phi3_longrope_long"),
    *("phi3_partial_tied", "deepseek_v2_lite"),
)
MIX = {
    "attn_v": "Q8_0",
    "attn_k": "Q5_1",
    "ffn_down": "Q4_1",
    "ffn_up_exps": "Q5_0",
    "output": "Q8_0",
}


def mix(name):
    """A type for each kind of tensor; gate and up of GPT-OSS share a tensor."""
    return MIX.get(name.split(".")[-2], "Q4_0")


def model_of(folder):
    kind, config = read_model_config(json.loads((folder / "config.json").read_text()))
    model = build_model(kind, config, folder=folder, dtype=torch.float32, progress=False)
    return model, config


def edit_config(folder):
    """What files of these architectures cannot state has its usual value."""
    hf = json.loads((folder / "config.json").read_text())
    if "query_pre_attn_scalar" in hf:
        hf["query_pre_attn_scalar"] = hf["head_dim"]
    if hf["model_type"] == "llama":
        hf["hidden_act"] = "silu"
    if hf["model_type"] == "deepseek_v2":
        for rope in (hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {}):
            if "mscale" in rope:
                rope["mscale"] = rope["mscale_all_dim"]
    (folder / "config.json").write_text(json.dumps(hf))


def logits_of(model, config, length=60):
    return Stepper(model, config).logits(prompt_of(length, config.vocab))


def same_config(got, want):
    """Equal in all that a model has; Llama-3's divisors are listed in the file."""
    if type(getattr(want.rope, "scaling", None)).__name__ == "Llama3RopeScaling":
        for length in (100, want.max_len):
            ours, theirs = (
                one.rope.scaling.frequencies(one.rope.theta, one.rope.dims, length)
                for one in (got, want)
            )
            assert torch.allclose(ours[0], theirs[0], rtol=1e-5)
            assert ours[1] == theirs[1]
        got = replace(got, rope=want.rope)
    assert replace(got, quantized=None, dtype=want.dtype) == want


@pytest.mark.sampled(3)
@pytest.mark.slow("transformers makes a model of each architecture")
@pytest.mark.parametrize("variant", VARIANTS)
def test_file_equals_the_source_folder(tmp_path, variant):
    peer(variant, tmp_path / "source")
    edit_config(tmp_path / "source")
    write_gguf(tmp_path / "model.gguf", tmp_path / "source", split_kv=variant == "deepseek_v3")
    folder = folder_of(tmp_path / "model.gguf", tmp_path / "cache")
    got, want = model_of(folder), model_of(tmp_path / "source")
    same_config(got[1], want[1])
    torch.testing.assert_close(logits_of(*got), logits_of(*want), rtol=1e-4, atol=1e-4)


def compare_blocks(tmp_path, variant, kinds, **settings):
    """A file's model, and the dense one of its values."""
    source = tmp_path / "source"
    peer(variant, source)
    edit_config(source)
    dense = write_gguf(tmp_path / "model.gguf", source, kinds, **settings)
    got = model_of(folder_of(tmp_path / "model.gguf", tmp_path / "cache"))
    assert got[1].quantized is not None
    for file in source.glob("*.safetensors"):
        file.unlink()
    save_file({k: v.float().contiguous() for k, v in dense.items()}, source / "model.safetensors")
    want = model_of(source)
    torch.testing.assert_close(logits_of(*got), logits_of(*want), rtol=2e-3, atol=2e-3)


@pytest.mark.slow("transformers makes a model of each architecture")
@pytest.mark.parametrize("variant", ["gpt_oss", "llama", *tiers.long(*VARIANTS[1:12])])
def test_blocks_equal_a_dense_model(tmp_path, variant):
    kinds = (
        mix
        if variant != "gpt_oss"
        else lambda name: MIX.get(name.split(".")[-2], "Q4_0").replace("Q5_0", "Q4_0")
    )
    compare_blocks(tmp_path, variant, kinds)


@pytest.mark.slow("transformers makes a model of each architecture")
@pytest.mark.parametrize(
    "variant", ["llama", "qwen2_moe", "gpt_oss", *tiers.long("mixtral", "deepseek_v3")]
)
def test_nvfp4_is_multiplied_by_its_scales(tmp_path, variant):
    split = variant == "deepseek_v3"
    compare_blocks(tmp_path, variant, lambda name: "NVFP4", split_kv=split)


def test_nvfp4_without_scales(tmp_path):
    compare_blocks(tmp_path, "llama", lambda name: "NVFP4", scales=False)


@pytest.mark.parametrize(
    ("kind", "scale", "message"),
    [
        ("NVFP4", np.ones(2, np.float32), r"ffn_up\.scale is F32 \[2\]; it must be F32 \[1\], one"),
        ("NVFP4", np.ones(1, np.float16), r"ffn_up\.scale is F16 \[1\]; it must be F32 \[1\]"),
        ("Q8_0", np.ones(1, np.float32), r"unexpected .*blk\.0\.ffn_up\.scale"),
    ],
)
def test_a_wrong_scale_is_named(tmp_path, kind, scale, message):
    peer("llama", tmp_path / "source")

    def edit(writer):
        writer.add_tensor("blk.0.ffn_up.scale", scale)

    write_gguf(tmp_path / "m.gguf", tmp_path / "source", lambda name: kind, edit=edit, scales=False)
    with pytest.raises(WeightError, match=message):
        model_of(folder_of(tmp_path / "m.gguf", tmp_path / "cache"))


MAX_PEAK = 64 << 20
"""Bytes that a damaged header may make Python allocate."""


@pytest.mark.parametrize("seed", range(tiers.amount(60, 4000)))
def test_damaged_headers_are_errors_or_another_model(seed, whole_file, tmp_path):
    """Bytes of the header are overwritten: at random, with ones, or with a huge length."""
    data, header = whole_file
    draw = random.Random(seed)
    damaged = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(4, header - 8)
        size = draw.choice((1, 1, 4, 8))
        fill = draw.choice((draw.randbytes(size), b"\xff" * size, bytes(size)))
        damaged[at : at + size] = fill
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged)
    tracemalloc.start()
    try:
        folder = folder_of(path, tmp_path / "cache")
        read_model_config(json.loads((folder / "config.json").read_text()))
    except QuireError as error:
        assert len(str(error)) < 1000  # noqa: PT017 - most are errors, some are none
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_PEAK


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    """(bytes of a file, of which so many are the header)."""
    folder = tmp_path_factory.mktemp("whole")
    peer("llama", folder / "source")
    write_gguf(folder / "m.gguf", folder / "source", mix)
    header = min(one.start for one in read_gguf(folder / "m.gguf").tensors.values())
    return (folder / "m.gguf").read_bytes(), header
