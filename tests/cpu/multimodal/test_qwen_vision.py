"""The vision towers of Qwen's families give the rows that transformers' models give."""

import functools

import pytest
import torch

from quire.config.facts import read_hf_config
from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.models.base import EncoderInput
from quire.models.build import build_model, read_model_config
from quire.models.multimodal._resize import resized, resized_by_products
from tests.cpu.multimodal.qwen_models import FAMILIES, patches_of, pixels_of, saved, scale_shift

SIZES = [(1, 4, 6), (1, 10, 22), (3, 8, 6), (1, 2, 2), (4, 18, 10)]
"""Frames and patches of the items of one call: images of odd sizes, and videos."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    @functools.cache
    def build(family):
        folder = tmp_path_factory.mktemp(family)
        theirs = saved(family, folder)
        model_type, config = read_model_config(read_hf_config(folder))
        model = build_model(model_type, config, folder=folder, dtype=torch.float32, progress=False)
        return theirs, model.media_encoder

    return build


def inputs_of(family, sizes=SIZES):
    patch = FAMILIES[family][1].get("patch_size", 14)
    pixels = [pixels_of(f, h * patch, w * patch, i) for i, (f, h, w) in enumerate(sizes)]
    items = [
        EncoderInput(
            "video" if len(one) > 1 else "image",
            {
                "pixels": torch.from_numpy(one),
                "cells": torch.zeros([side // patch // 2 for side in one.shape[1:3]]),
                "scale_shift": torch.from_numpy(scale_shift()),
            },
        )
        for one in pixels
    ]
    patches, grids = zip(*(patches_of(one, patch) for one in pixels), strict=True)
    return items, torch.cat(patches), torch.tensor(grids)


@torch.inference_mode()
def expected(theirs, patches, grids):
    found = theirs.model.get_video_features(patches, grids)
    rows = list(found.pooler_output)
    levels = getattr(found, "deepstack_features", None) or []
    return [torch.cat((one, *(level[i] for level in levels)), 1) for i, one in enumerate(rows)]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_rows_of_packed_items_are_those_of_transformers(family, built):
    theirs, encoder = built(family)
    items, patches, grids = inputs_of(family)
    got, want = encoder.encode(items), expected(theirs, patches, grids)
    assert [one.shape for one in got] == [(one.shape[0], encoder.width) for one in want]
    for mine, other in zip(got, want, strict=True):
        assert (mine - other).abs().max().item() < 1e-4
        assert other.abs().max().item() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_rows_are_the_same_in_slices(family, built):
    _, encoder = built(family)
    items, _, _ = inputs_of(family)
    slices, want = encoder.encode_in_slices(items), encoder.encode(items)
    for _ in range(encoder.slices):
        next(slices)
        lazy_fusion.flush()  # others run between two slices
        encoder.encode(items[:1])
    with pytest.raises(StopIteration) as ended:
        next(slices)
    assert all(torch.equal(*pair) for pair in zip(ended.value.value, want, strict=True))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@torch.inference_mode()
def test_an_item_alone_has_the_rows_that_it_has_beside_others(family, built):
    _, encoder = built(family)
    items, _, _ = inputs_of(family)
    for item, want in zip(items, encoder.encode(items), strict=True):
        assert (encoder.encode([item])[0] - want).abs().max().item() < 1e-5


@torch.inference_mode()
def test_windows_hide_distant_patches_but_in_layers_that_see_the_frame(built):
    theirs, encoder = built("qwen2_5_vl")
    items, patches, grids = inputs_of("qwen2_5_vl", [(1, 20, 26)])
    (want,) = expected(theirs, patches, grids)
    assert (encoder.encode(items)[0] - want).abs().max().item() < 1e-4
    whole, encoder.whole = encoder.whole, frozenset(range(4))
    assert (encoder.encode(items)[0] - want).abs().max().item() > 1e-2
    encoder.whole = whole


@pytest.mark.parametrize("size", [(84, 56), (28, 28), (56, 140)])
def test_pixels_are_resized_on_the_device_as_torchvision_resizes_them(size):
    from torchvision.transforms.v2 import functional

    pixels = torch.from_numpy(pixels_of(2, 60, 90))
    want = functional.resize(
        pixels.permute(0, 3, 1, 2), size, functional.InterpolationMode.BICUBIC
    ).permute(0, 2, 3, 1)
    got = resized(pixels, *size)
    assert got.dtype == torch.uint8
    assert torch.equal(got, want)
    assert torch.equal(resized_by_products(pixels, *size), want.float())  # as a GPU does


def test_sums_that_float32_would_round_are_whole_numbers():
    chance = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (1, 1500, 1500, 3), dtype=torch.uint8, generator=chance)
    want = resized(pixels, 300, 300).float()
    assert torch.equal(resized_by_products(pixels, 300, 300), want)


def test_a_first_stage_has_all_layers_that_features_are_added_after(tmp_path):
    saved("qwen3_vl", tmp_path)
    model_type, config = read_model_config(read_hf_config(tmp_path))
    settings = {"load_format": "dummy", "dtype": torch.float32}
    with pytest.raises(ConfigError, match=r"after the first 2 layers, and .* stage has 1"):
        build_model(model_type, config, stage=range(1), **settings)
    build_model(model_type, config, stage=range(2), **settings)
    build_model(model_type, config, stage=range(1, 3), **settings)
