"""A media encoder is a part of the model: loaded strictly, whole on each rank, in the first stage."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.facts import count_weights_in_headers, read_hf_config
from quire.distributed.mesh import Mesh
from quire.errors import WeightError
from quire.models.build import build_model, read_model_config
from quire.weights.files import read_headers
from tests.cpu.models.harness import Together
from tests.cpu.multimodal.families import FAMILIES, Pair, image, made


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return made("llava", tmp_path_factory.mktemp("llava"))


def built(pair, folder=None, language_model_only=False, **more):
    hf = read_hf_config(folder or pair.folder)
    found = read_model_config(hf, language_model_only=language_model_only)
    return build_model(
        *found, folder=folder or pair.folder, dtype=torch.float32, progress=False, **more
    )


def test_the_weights_of_towers_are_counted(pair):
    headers = read_headers(pair.folder, "auto")
    found = count_weights_in_headers(headers, read_hf_config(pair.folder))
    towers = [one for name, one in headers.items() if not name.startswith("language_model.")]
    assert found.media == sum(math.prod(one.shape) for one in towers)
    assert found.bytes(4, ranks=2) - found.media * 4 == (found.matrices // 2 + found.vectors) * 4


def test_the_text_half_alone_has_no_encoder(pair):
    assert built(pair, language_model_only=True).media_encoder is None


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("vision_tower.", "37 missing in the checkpoint: vision_model.emb"),
        (
            "projector.linear_1.bias",
            "1 missing in the checkpoint: multi_modal_projector.linear_1.bias",
        ),
    ],
)
def test_missing_tower_tensors_are_named(pair, tmp_path, lost, named):
    tensors = load_file(pair.folder / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if lost not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((pair.folder / "config.json").read_text())
    with pytest.raises(WeightError, match=named):
        built(pair, tmp_path)


def test_ranks_have_the_whole_encoder_and_later_stages_none(pair):
    own = Together(2).of(1)
    mesh = Mesh(tp=2, rank=1)
    rank = built(pair, mesh=mesh, comm=own)
    items = pair.process([image(70, 30)])
    wanted = pair.rows(items)
    pair.ours = rank, pair.ours[1]
    assert torch.equal(pair.rows(items)[0], wanted[0])
    assert built(pair, stage=range(1)).media_encoder is not None
    assert built(pair, stage=range(1, 2)).media_encoder is None


def test_dummy_weights_encode(pair):
    hf = read_hf_config(pair.folder)
    model = build_model(*read_model_config(hf), load_format="dummy", dtype=torch.bfloat16)
    pair.ours = model, pair.ours[1]
    (rows,) = pair.rows(pair.process([image(70, 30)]))
    assert rows.shape == (16, 64)
    assert rows.isfinite().all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [one for one in FAMILIES if one != "llava"])
def test_any_encoder_works_in_bfloat16_on_each_rank(name, tmp_path):
    config, processor = FAMILIES[name]()
    config.save_pretrained(tmp_path)
    pair = Pair(None, processor, tmp_path)
    found = read_model_config(read_hf_config(tmp_path))
    mesh, own = Mesh(tp=2, rank=1), Together(2).of(1)
    more = {"load_format": "dummy", "dtype": torch.bfloat16, "progress": False}
    items = pair.process([image(70, 30), image(30, 112)])
    rows = []
    for place in ({}, {"mesh": mesh, "comm": own}):
        pair.ours = build_model(*found, **more, **place), found[1]
        rows.append(pair.rows(items))
    for item, one, other in zip(items, *rows, strict=True):
        assert one.shape == (pair.own_processor.expand(item, 1).rows, found[1].hidden)
        assert one.dtype == torch.bfloat16
        assert one.isfinite().all()
        assert torch.equal(one, other)
