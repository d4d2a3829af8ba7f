"""The memory of an adapter is filled from its files alone, whatever it held, by any threads."""

import os

import pytest
import torch

from quire.weights.adapters import packed, tensor_files
from quire.weights.adapters.adapter import tensors_of
from quire.weights.adapters.read import read_adapter
from tests.cpu.weights.adapters.test_broken import SIZE, modules_of, write

STEM = "base_model.model.model.layers"
RANKS = {"q_proj": 3, "k_proj": 5, "o_proj": 4}
CONFIG = {"r": 4, "rank_pattern": RANKS}


@pytest.fixture(scope="module")
def llama():
    return modules_of("llama")


def some(llama, dtype=torch.float16):
    """Tensors of several modules of ranks whose bytes fill no whole lines."""
    made = {}
    for layer in (0, 1):
        outputs = llama.layers[f"layers.{layer}.self_attn.qkv_proj"].outputs
        for name, rows in (("q_proj", outputs[0]), ("k_proj", outputs[1]), ("o_proj", SIZE)):
            stem, rank = f"{STEM}.{layer}.self_attn.{name}.lora", RANKS[name]
            made[f"{stem}_A.weight"] = torch.randn(rank, SIZE).to(dtype)
            made[f"{stem}_B.weight"] = torch.randn(rows, rank).to(dtype)
    return made


def dirty(size):
    return torch.full((size,), 0xFF, dtype=torch.uint8)


def equal(one, other):
    assert {k: set(v) for k, v in one.deltas.items()} == {
        k: set(v) for k, v in other.deltas.items()
    }
    for layer, parts in one.deltas.items():
        for part, delta in parts.items():
            for name, tensor in tensors_of(delta):
                assert torch.equal(tensor, getattr(other.deltas[layer][part], name)), (layer, name)


@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.bfloat16])
def test_what_memory_held_before_is_nowhere(tmp_path, llama, monkeypatch, stored):
    files = some(llama, stored)
    folder = write(tmp_path, CONFIG, files)
    plain = read_adapter(folder, llama, torch.float16)
    assert plain.packed is None
    monkeypatch.setattr(packed, "READERS", 1)
    made = [read_adapter(folder, llama, torch.float16, allocate=one) for one in (dirty, dirty)]
    for one in made:
        equal(one, plain)
        assert one.digest == plain.digest
        assert one.packed.layout == made[0].packed.layout
    storage = made[0].packed.buffer.untyped_storage().data_ptr()
    for parts in made[0].deltas.values():
        for delta in parts.values():
            assert {t.untyped_storage().data_ptr() for _, t in tensors_of(delta)} == {storage}
    q = made[0].deltas["layers.1.self_attn.qkv_proj"][0]
    want = files[f"{STEM}.1.self_attn.q_proj.lora_B.weight"]
    wanted = (want if stored == torch.float16 else want.float()) * (8 / 3)
    assert torch.equal(q.b, wanted.to(torch.float16).t())


def test_chunks_change_no_tensor(tmp_path, llama, monkeypatch):
    folder = write(tmp_path, CONFIG, some(llama))
    whole = read_adapter(folder, llama, torch.float16, allocate=dirty)
    monkeypatch.setattr("quire.weights.adapters.fill.CHUNK", 600)
    cut = read_adapter(folder, llama, torch.float16, allocate=dirty)
    equal(cut, whole)
    assert cut.packed.layout == whole.packed.layout
    assert cut.digest == read_adapter(folder, llama, torch.float16).digest


def test_a_file_is_read_in_few_calls_each_of_which_may_end_early(tmp_path, llama, monkeypatch):
    folder = write(tmp_path, CONFIG, some(llama))
    want, counts, preadv = read_adapter(folder, llama, torch.float16), [], os.preadv

    def few(file, rooms, at):
        counts.append(len(rooms))
        return preadv(file, [rooms[0][:100]], at)

    def counted(file, rooms, at):
        counts.append(len(rooms))
        return preadv(file, rooms, at)

    monkeypatch.setattr(tensor_files.os, "preadv", counted)
    equal(read_adapter(folder, llama, torch.float16), want)
    assert counts == [12]
    monkeypatch.setattr(tensor_files.os, "preadv", few)
    equal(read_adapter(folder, llama, torch.float16), want)
    monkeypatch.setattr(tensor_files, "MAX_BUFFERS", 5)
    monkeypatch.setattr(tensor_files.os, "preadv", counted)
    counts.clear()
    equal(read_adapter(folder, llama, torch.float16), want)
    assert counts == [5, 5, 2]


def test_experts_without_an_adapter_are_zero_in_memory_that_was_not(tmp_path):
    modules = modules_of("qwen3_moe")
    shape = modules.layers["layers.0.mlp.experts"]
    files = {}
    for expert, rank in ((1, 4), (2, 2)):
        stem = f"{STEM}.0.mlp.experts.{expert}.down_proj.lora"
        files[f"{stem}_A.weight"] = torch.randn(rank, shape.inputs_of(2))
        files[f"{stem}_B.weight"] = torch.randn(shape.outputs[2], rank)
    config = {"rank_pattern": {"experts.2.down_proj": 2}}
    folder = write(tmp_path, config, files)
    delta = read_adapter(folder, modules, torch.float32, allocate=dirty).deltas
    found = delta["layers.0.mlp.experts"][2]
    for expert in range(shape.experts):
        rank = {1: 4, 2: 2}.get(expert, 0)
        for tensor in (found.a, found.b):
            assert not tensor[expert, rank:].any()
            assert tensor[expert, :rank].all()


def test_what_is_not_finite_is_named_wherever_it_is(tmp_path, llama):
    for i, name in enumerate(some(llama)):
        files = some(llama)
        files[name][-1, -1] = float("nan")
        folder = write(tmp_path / str(i), CONFIG, files)
        with pytest.raises(Exception, match="NaN") as caught:
            read_adapter(folder, llama, torch.float16, allocate=dirty)
        assert name in str(caught.value)
    files = some(llama, torch.float32)
    name = f"{STEM}.1.self_attn.o_proj.lora_B.weight"
    files[name][3, 0] = 60000
    folder = write(tmp_path / "large", CONFIG, files)
    with pytest.raises(Exception, match=r"NaN or infinite in torch\.float16") as caught:
        read_adapter(folder, llama, torch.float16)
    assert name in str(caught.value)
