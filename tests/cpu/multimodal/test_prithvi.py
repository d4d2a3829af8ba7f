"""Prithvi-EO: states of satellite images, against a plain form of the description."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from quire import LLM
from quire.errors import ConfigError, RequestError, WeightError

SIZES = {
    "img_size": 24, "num_frames": 2, "patch_size": [1, 4, 4], "in_chans": 3, "embed_dim": 32,
    "depth": 2, "num_heads": 4, "mlp_ratio": 4, "decoder_embed_dim": 16, "decoder_depth": 1,
    "coords_encoding": ["time", "location"], "coords_scale_learn": True,
}  # fmt: skip
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "model_impl": "terratorch"}
TIME, PLACE = [[2021.0, 40.0], [2022.0, 300.0]], [47.5, -8.25]


def tensors_of(sizes):
    """Random tensors under the names of a checkpoint, with half of the other half."""
    torch.manual_seed(5)
    width, (t, p, q) = sizes["embed_dim"], sizes["patch_size"]
    made = {
        "encoder.patch_embed.proj.weight": torch.randn(width, sizes["in_chans"], t, p, q) / 7,
        "encoder.patch_embed.proj.bias": torch.randn(width) / 5,
        "encoder.cls_token": torch.randn(1, 1, width),
        "encoder.pos_embed": torch.zeros(1, 73, width),
        "encoder.norm.weight": 1 + torch.randn(width) / 5,
        "encoder.norm.bias": torch.randn(width) / 5,
        "encoder.temporal_embed_enc.scale": torch.tensor([0.7]),
        "encoder.location_embed_enc.scale": torch.tensor([0.4]),
        "decoder.mask_token": torch.zeros(1, 1, 16),
        "decoder.decoder_embed.weight": torch.zeros(16, width),
        "decoder.temporal_embed_dec.scale": torch.ones(1),
    }
    for i in range(sizes["depth"]):
        for name, rows, columns in (
            ("attn.qkv", 3 * width, width), ("attn.proj", width, width),
            ("mlp.fc1", 4 * width, width), ("mlp.fc2", width, 4 * width),
        ):  # fmt: skip
            made[f"encoder.blocks.{i}.{name}.weight"] = torch.randn(rows, columns) / columns**0.5
            made[f"encoder.blocks.{i}.{name}.bias"] = torch.randn(rows) / 5
        for name in ("norm1", "norm2"):
            made[f"encoder.blocks.{i}.{name}.weight"] = 1 + torch.randn(width) / 5
            made[f"encoder.blocks.{i}.{name}.bias"] = torch.randn(width) / 5
    return made


def wave(value, size):
    """One number as sines, then cosines."""
    angles = [value / 10000 ** (i / (size // 2)) for i in range(size // 2)]
    return [np.sin(one) for one in angles] + [np.cos(one) for one in angles]


def plain_form(tensors, sizes, pixels, time=None, place=None):
    """States [1 + patches, E] of pixels [C, T, H, W], patch by patch and head by head."""
    w = {name.removeprefix("encoder."): one for name, one in tensors.items()}
    width, heads, trained = sizes["embed_dim"], sizes["num_heads"], sizes["img_size"] // 4
    x = F.conv3d(
        pixels[None], w["patch_embed.proj.weight"], w["patch_embed.proj.bias"],
        stride=sizes["patch_size"],
    )[0]  # fmt: skip
    _, frames, rows, columns = x.shape
    table = torch.tensor(
        [
            [
                [wave(c, 12) + wave(r, 12) + wave(t, 8) for c in range(trained)]
                for r in range(trained)
            ]
            for t in range(frames)
        ]
    ).float()  # [T, rows, columns, E]
    table = F.interpolate(
        table.permute(0, 3, 1, 2), size=(rows, columns), mode="bicubic", align_corners=True
    ).permute(1, 0, 2, 3)
    x = x + table
    if time is not None:
        for i, (year, day) in enumerate(time):
            vector = torch.tensor(wave(year, width // 2) + wave(day, width // 2)).float()
            x[:, i] += 0.7 * vector[:, None, None]
    if place is not None:
        vector = torch.tensor(wave(place[0], width // 2) + wave(place[1], width // 2)).float()
        x += 0.4 * vector[:, None, None, None]
    x = torch.cat((w["cls_token"][0], x.flatten(1).T))
    for i in range(sizes["depth"]):
        b = {key.removeprefix(f"blocks.{i}."): v for key, v in w.items() if f"blocks.{i}." in key}
        y = F.layer_norm(x, (width,), b["norm1.weight"], b["norm1.bias"])
        q, k, v = F.linear(y, b["attn.qkv.weight"], b["attn.qkv.bias"]).chunk(3, -1)
        own = [
            (a @ c.T * (width // heads) ** -0.5).softmax(-1) @ d
            for a, c, d in zip(*(one.chunk(heads, -1) for one in (q, k, v)), strict=True)
        ]
        x = x + F.linear(torch.cat(own, -1), b["attn.proj.weight"], b["attn.proj.bias"])
        y = F.layer_norm(x, (width,), b["norm2.weight"], b["norm2.bias"])
        y = F.gelu(F.linear(y, b["mlp.fc1.weight"], b["mlp.fc1.bias"]))
        x = x + F.linear(y, b["mlp.fc2.weight"], b["mlp.fc2.bias"])
    return F.layer_norm(x, (width,), w["norm.weight"], w["norm.bias"])


def write(folder):
    """Save a model, and return its tensors."""
    config = {"architectures": ["PrithviGeoSpatialMAE"], "pretrained_cfg": SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    made = tensors_of(SIZES)
    save_file(made, folder / "model.safetensors")
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("prithvi")
    return made, write(made)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder[0]), **OPTIONS)


def pixels(side=24, frames=2, seed=0):
    return torch.randn(3, frames, side, side, generator=torch.Generator().manual_seed(seed))


def prompt(**tensors):
    return {"prompt_token_ids": [1], "multi_modal_data": tensors}


def difference(output, want):
    found = torch.as_tensor(output.outputs.data)
    assert found.shape == want.shape
    return (found - want).abs().max().item()


def test_states_are_those_of_the_description(llm, folder):
    one, two, large = pixels(), pixels(seed=1), pixels(32, seed=2)
    prompts = [
        prompt(
            pixel_values=one, location_coords=torch.tensor([PLACE]),
            temporal_coords=torch.tensor(TIME)[None],
        ),
        prompt(pixel_values=two[None], location_coords=torch.zeros(0)),
        {"prompt_token_ids": [1], "multi_modal_data": {"image": {"pixel_values": large.numpy()}}},
    ]  # fmt: skip
    found = llm.encode(prompts, pooling_task="plugin", use_tqdm=False)
    want = [
        plain_form(folder[1], SIZES, one, TIME, PLACE),
        plain_form(folder[1], SIZES, two),
        plain_form(folder[1], SIZES, large),
    ]
    assert [len(one) for one in want] == [73, 73, 129]
    assert max(map(difference, found, want)) < 2e-5
    (again,) = llm.encode(prompts[:1], use_tqdm=False)
    assert torch.equal(torch.as_tensor(again.outputs.data), torch.as_tensor(found[0].outputs.data))


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"pixel_values": pixels(frames=3)}, r"\[3 bands, 2 frames, .*got \[3, 3, 24, 24\]"),
        ({"pixel_values": pixels(26)}, "26 x 26 pixels; .* multiple of 4"),
        ({"pixel_values": pixels()[..., :20]}, "24 x 20 pixels"),
        ({"pixel_values": pixels() * float("nan")}, "pixel_values has numbers that are not finite"),
        (
            {"pixel_values": pixels(), "temporal_coords": torch.zeros(3, 2)},
            r"temporal_coords must have the shape \[2, 2\] or \[1, 2, 2\], got \[3, 2\]",
        ),
        ({"pixel_values": pixels(), "mask": pixels()}, "'mask'"),
        ({"pixel_values": torch.zeros(0)}, "has no pixel_values"),
        ({"image": np.zeros((24, 24, 3), np.uint8)}, "satellite images as tensors"),
        ({"pixel_values": pixels(1024)}, "maximum context length|max_model_len"),
    ],
)
def test_what_cannot_be_read_is_refused_with_numbers(llm, tensors, problem):
    with pytest.raises(RequestError, match=problem):
        llm.encode(prompt(**tensors), use_tqdm=False)


def test_prompts_are_tensors(llm):
    with pytest.raises(RequestError, match="must be empty"):
        llm.encode({**prompt(pixel_values=pixels()), "prompt_token_ids": [1, 1]}, use_tqdm=False)
    with pytest.raises(RequestError, match="needs multi_modal_data"):
        llm.encode([1], use_tqdm=False)


def test_a_folder_of_the_hub_is_read_and_frames_are_an_override(folder, tmp_path):
    config = {"architecture": "prithvi_eo_v2_300_tl", "pretrained_cfg": SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(folder[1], tmp_path / "Prithvi_EO_V2_300M_TL.pt")
    own = {"pretrained_cfg": {"num_frames": 1}}
    one = LLM(str(tmp_path), hf_overrides=own, **OPTIONS)
    image = pixels(frames=1)
    (found,) = one.encode(prompt(pixel_values=image[:, 0]), use_tqdm=False)
    assert difference(found, plain_form(folder[1], SIZES, image)) < 2e-5


def test_a_head_in_the_checkpoint_stops_the_start(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder[0] / "config.json").read_text())
    made = {f"model.{name}": one for name, one in folder[1].items() if "encoder." in name}
    save_file(made | {"model.head.weight": torch.zeros(2, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"model\.head\.weight"):
        LLM(str(tmp_path), **OPTIONS)


def test_a_named_encoder_is_read_and_a_decoder_is_refused(tmp_path):
    from quire.config.facts import read_hf_config

    args = {"backbone": "prithvi_eo_v2_300_tl", "backbone_bands": ["B", "G"]}
    config = {"architectures": ["PrithviGeoSpatialMAE"], "pretrained_cfg": {"model_args": args}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_hf_config(tmp_path)
    assert (found["hidden_size"], found["num_hidden_layers"]) == (1024, 24)
    grid = found["wrapper_config"]["pretrained_cfg"]
    assert (grid["in_chans"], grid["num_frames"]) == (2, 1)
    assert grid["coords_encoding"] == ["time", "location"]
    args["decoder"] = "UperNetDecoder"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="UperNetDecoder"):
        read_hf_config(tmp_path)
