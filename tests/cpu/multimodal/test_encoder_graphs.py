"""Graphs of encoders: items padded to a size have the rows that they have without graphs.

Graphs are fakes that launch their kernels again, on the CPU.
"""

import numpy as np
import pytest
import torch

from quire.config.facts import read_hf_config
from quire.media.image_ops import from_tensor
from quire.models.base import EncoderInput
from quire.models.build import MEDIA_ENCODERS, build_model, read_model_config
from quire.models.multimodal._qwen_vision import Grid, VisionTower
from quire.runner.media.encoder_graphs import EncoderGraphs
from quire.runner.media.media_rows import attach_media_rows, find_media_rows
from tests.cpu.multimodal import families, qwen_models
from tests.cpu.multimodal.test_qwen_vision import FAMILIES, SIZES, built, inputs_of  # noqa: F401


class Graphs:
    """Of all sizes up to `most`."""

    def __init__(self, of, most):
        self.of, self.most, self.ran = of, most, []

    def __contains__(self, key):
        return key <= self.most

    def run(self, key):
        self.ran.append(key)
        self.of.launch(key)


def graphs_of(encoder, most=4096):
    """Graphs as a worker captures them: the largest first, before there are items."""
    found = EncoderGraphs(encoder, torch.float32, torch.device("cpu"))
    graphs = Graphs(found, most)
    found.bind(graphs)
    for size in [one for one in found.sizes if one <= most][::-1]:
        found.prepare(size)
        found.launch(size)
    return found, graphs


@pytest.mark.sampled(2)
@pytest.mark.slow("makes models of transformers")
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_rows_from_graphs_are_those_of_kernels(family, built, monkeypatch):  # noqa: F811
    _, encoder = built(family)
    calls = [[size] for size in SIZES] + [SIZES, [(1, 16, 16)], [(1, 2, 260)], [(2, 22, 6)]]
    items = [inputs_of(family, sizes)[0] for sizes in calls]
    want = [encoder.encode(one) for one in items]
    found, graphs = graphs_of(encoder, 768)
    monkeypatch.setattr(encoder, "graphs", found)
    for given, rows, sizes in zip(items * 2, want * 2, calls * 2, strict=True):
        made = [one.clone() for one in encoder.encode(given)]
        for mine, other in zip(made, rows, strict=True):
            assert mine.shape == other.shape
            assert (mine - other).abs().max().item() < 1e-5
        patches = sum(-(-f // 2) * h * w for f, h, w in sizes)
        assert graphs.ran[-1] >= patches
    assert len(graphs.ran) == 2 * len(calls)
    assert len(set(graphs.ran)) > 2


@torch.inference_mode()
def test_what_no_graph_holds_runs_kernel_by_kernel(built, monkeypatch):  # noqa: F811
    _, encoder = built("qwen2_5_vl")
    found, graphs = graphs_of(encoder, 512)
    monkeypatch.setattr(encoder, "graphs", found)
    many = [(1, 2, 2)] * 100  # each has segments of its own
    for sizes, held in [([(1, 20, 26)], False), (many, False), ([(1, 20, 24)], True)]:
        items, _, _ = inputs_of("qwen2_5_vl", sizes)
        before = len(graphs.ran)
        got = [one.clone() for one in encoder.encode(items)]
        assert (len(graphs.ran) > before) == held
        monkeypatch.setattr(encoder, "graphs", None)
        want = encoder.encode(items)
        monkeypatch.setattr(encoder, "graphs", found)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))


@torch.inference_mode()
def test_memory_returns_with_the_next_graphs(built):  # noqa: F811
    _, encoder = built("qwen2_vl")
    found, _ = graphs_of(encoder, 256)
    found.release()
    assert not len(found._patches)
    assert found._rows is None
    found.allocate()
    found.prepare(256)
    found.launch(256)
    assert len(found._rows) == 64


@pytest.mark.slow("makes models of transformers")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", ["llava", "gemma3", "idefics3", "internvl", "llava_next"])
@torch.inference_mode()
def test_towers_of_images_of_one_size_have_graphs(family, tmp_path, monkeypatch):
    pair = families.made(family, tmp_path)
    model_type, config = read_model_config(read_hf_config(tmp_path))
    encoder = build_model(
        model_type, config, folder=tmp_path, dtype=torch.float32, progress=False
    ).media_encoder
    calls = [[(60, 80)], [(60, 80), (200, 61)], [(300, 40)]]
    items = [
        [
            EncoderInput(
                "image", {t.name: torch.from_numpy(from_tensor(t).copy()) for t in one.tensors}
            )
            for one in pair.process([families.image(*size, i) for i, size in enumerate(sizes)])
        ]
        for sizes in calls
    ]
    want = [encoder.encode(one) for one in items]
    found, graphs = graphs_of(encoder)
    monkeypatch.setattr(encoder, "graphs", found)
    for given, rows in zip(items * 2, want * 2, strict=True):
        for mine, other in zip(encoder.encode(given), rows, strict=True):
            assert mine.shape == other.shape
            assert (mine - other).abs().max().item() < 1e-5
    assert len(graphs.ran) == 2 * len(calls)


VISION = {
    "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "num_attention_heads": 2, "depth": 2,
    "num_hidden_layers": 2, "intermediate_size": 44, "out_hidden_size": 64, "patch_size": 14,
    "image_size": 70, "num_position_embeddings": 36, "deepstack_visual_indexes": [0],
    "init_pos_emb_height": 6,
}  # fmt: skip
TOWERS = [*FAMILIES, "kimi_vl"]


@pytest.mark.parametrize("family", TOWERS)
def test_padding_alone_is_within_the_tables_of_positions(family):
    """As graphs are captured: of each size, before there are items."""
    hf = {"vision_config": VISION, "text_config": {"hidden_size": 64}}
    encoder = MEDIA_ENCODERS.load(family).Encoder.from_hf(hf)
    encoder._rope.set_table({}, torch.device("cpu"))
    assert len(encoder.graph_sizes()) > 9
    for size in encoder.graph_sizes():
        _, arrays = encoder.graph_inputs(size)
        angles = encoder.angles(torch.from_numpy(arrays["positions"]))  # an error, if out of range
        assert len(angles.table) == size
        if "places" in arrays:
            assert (arrays["places"] >= 0).all()
            assert (arrays["places"] < len(encoder.pos_embed.weight)).all()
        assert (np.diff(arrays["frames"]) >= 0).all()
        assert (arrays["frames"][0], arrays["frames"][-1]) == (0, size)


def test_all_towers_that_are_padded_are_among_those():
    encoders = {name: MEDIA_ENCODERS.load(name).Encoder for name in MEDIA_ENCODERS.names()}
    assert {name for name, one in encoders.items() if issubclass(one, VisionTower)} == {*TOWERS}


def test_segments_behind_the_last_are_empty(built):  # noqa: F811
    """A GPU finds the segment of a tile by search: starts never decrease."""
    _, encoder = built("qwen2_5_vl")
    for grids in ([], [Grid(1, 10, 22)], [Grid(2, 4, 6), Grid(1, 18, 10)]):
        arrays = encoder._padded(grids, 512)
        for name in ("frames", "windows"):
            assert (np.diff(arrays[name]) >= 0).all()
            assert (arrays[name][0], arrays[name][-1]) == (0, 512)


@pytest.mark.slow("makes models of transformers")
@pytest.mark.parametrize(("name", "axes"), [("llama4", 1), ("qwen2_vl", 3)])
def test_tokens_have_the_axes_of_the_decoder_and_not_of_its_encoder(name, axes, tmp_path):
    """The encoder of Llama 4 rotates by rows and columns, its decoder by one position."""
    save = qwen_models.saved if name in qwen_models.FAMILIES else families.made
    save(name, tmp_path)
    model_type, config = read_model_config(read_hf_config(tmp_path))
    model = build_model(model_type, config, folder=tmp_path, dtype=torch.float32, progress=False)
    attach_media_rows(model, 8, torch.float32, torch.device("cpu"))
    assert find_media_rows(model).rotary_axes == axes
