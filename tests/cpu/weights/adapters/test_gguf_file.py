"""Adapters in GGUF files are those of the PEFT folders that they were made from."""

import json

import gguf
import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ConfigError, WeightError
from quire.weights.adapters.adapter import AdapterLimits
from quire.weights.adapters.read import read_adapter
from tests.cpu.weights.adapters.test_broken import modules_of

RANK, ALPHA = 4, 8.0
PREFIX = "base_model.model.model."


def write_gguf(path, tensors, arch="llama", kind="adapter", adapter="lora", alpha=ALPHA, **more):
    """A file as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(kind)
    writer.add_string("adapter.type", adapter)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, ids in more.items():
        writer.add_array(key.replace("__", "."), ids)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(folder, tensors):
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: one.contiguous() for name, one in tensors.items()},
              folder / "adapter_model.safetensors")  # fmt: skip
    return folder


def in_pairs(b, heads):
    """Rows (i, i + D / 2) of each head as rows (2i, 2i + 1)."""
    return b.reshape(heads, 2, -1, b.shape[1]).transpose(1, 2).reshape(b.shape)


def pair(inputs, outputs):
    return torch.randn(RANK, inputs), torch.randn(outputs, RANK)


def compare(tmp_path, modules, theirs, ours, **how):
    peft = read_adapter(write_folder(tmp_path / "peft", ours), modules, torch.float32)
    found = read_adapter(write_gguf(tmp_path / "a.gguf", theirs, **how), modules, torch.float32)
    assert found.digest == peft.digest
    assert found.rank == RANK


def test_linear_layers_and_embeddings(tmp_path):
    llama = modules_of("llama")  # 4 heads, 2 KV heads of 16
    layer = llama.layers["layers.0.self_attn.qkv_proj"]
    heads = [size // layer.head_dim for size in layer.outputs]
    theirs, ours = {}, {}
    for i, one in enumerate("qkv"):
        a, b = pair(64, layer.outputs[i])
        name = f"blk.0.attn_{one}.weight"
        theirs |= {f"{name}.lora_a": a}
        theirs |= {f"{name}.lora_b": b if one == "v" else in_pairs(b, heads[i])}
        module = f"{PREFIX}layers.0.self_attn.{one}_proj"
        ours |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    a, b = torch.randn(RANK, 199), torch.randn(64, RANK)
    theirs |= {"token_embd.weight.lora_a": a.t(), "token_embd.weight.lora_b": b}
    ours |= {f"{PREFIX}embed_tokens.lora_embedding_A": a}
    ours |= {f"{PREFIX}embed_tokens.lora_embedding_B": b}
    compare(tmp_path, llama, theirs, ours)


@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral"])
def test_experts(tmp_path, variant):
    moe = modules_of(variant)
    bank = moe.layers["layers.1.mlp.experts"]
    arch, path, leaves = {
        "qwen3_moe": ("qwen3moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        "mixtral": ("llama", "block_sparse_moe", ("w1", "w3", "w2")),
    }[variant]
    theirs, ours = {}, {}
    for part, (one, leaf) in enumerate(zip(("gate", "up", "down"), leaves, strict=True)):
        a = torch.randn(bank.experts, RANK, bank.inputs_of(part))
        b = torch.randn(bank.experts, bank.outputs[part], RANK)
        name = f"blk.1.ffn_{one}_exps.weight"
        theirs |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
        for expert in range(bank.experts):
            module = f"{PREFIX}layers.1.{path}.experts.{expert}.{leaf}"
            ours |= {f"{module}.lora_A.weight": a[expert], f"{module}.lora_B.weight": b[expert]}
    compare(tmp_path, moe, theirs, ours, arch=arch)


def tensors():
    return {
        "blk.0.attn_output.weight.lora_a": torch.ones(RANK, 64),
        "blk.0.attn_output.weight.lora_b": torch.ones(64, RANK),
    }


def test_no_alpha_means_no_scale(tmp_path):
    llama = modules_of("llama")
    for alpha, want in ((None, 1), (0.0, 1), (2.0, 0.5)):
        path = write_gguf(tmp_path / "a.gguf", tensors(), alpha=alpha)
        delta = read_adapter(path, llama, torch.float32).deltas["layers.0.self_attn.o_proj"][0]
        assert (delta.b == want).all()


@pytest.mark.parametrize(
    ("how", "changed", "problem"),
    [
        ({"kind": "model"}, {}, "general.type is 'model'; a LoRA adapter has 'adapter'"),
        ({"adapter": "dora"}, {}, "adapter.type is 'dora'"),
        ({"arch": "novel"}, {}, "general.architecture is 'novel'"),
        ({"alpha": float("nan")}, {}, "adapter.lora.alpha is nan"),
        ({"adapter__alora__invocation_tokens": [1]}, {}, "to act from some token on"),
        ({}, {"blk.0.attn_norm.weight": torch.ones(64)}, "no module 'blk.0.attn_norm'"),
        ({}, {"blk.9.attn_q.weight.lora_a": torch.ones(4, 64)}, "no module 'model.layers.9"),
        ({}, {"blk.0.attn_q.weight.lora_a": torch.ones(4, 64)}, "q_proj' has no lora_B"),
        ({}, {"blk.0.attn_output.weight.lora_a": torch.ones(5, 64)}, "rank 5; "),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, how, changed, problem):
    path = write_gguf(tmp_path / "a.gguf", tensors() | changed, **how)
    with pytest.raises(ConfigError, match=problem):
        read_adapter(path, modules_of("llama"), torch.float32)


def test_files_are_checked_first(tmp_path):
    llama, path = modules_of("llama"), tmp_path / "a.gguf"
    write_gguf(path, tensors())
    with pytest.raises(WeightError, match="bytes; adapters may have 80"):
        read_adapter(path, llama, torch.float32, AdapterLimits(max_bytes=10))
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(WeightError, match="cut short"):
        read_adapter(path, llama, torch.float32)
