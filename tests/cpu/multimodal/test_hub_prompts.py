"""Tokens and tiles of models whose code is on the hub alone, against tables of their descriptions."""

import numpy as np
import pytest

from quire.media.processors.h2ovl_chat import two_grids
from tests.cpu.multimodal.hub_prompts import HubPrompts, array

INTERN = {
    "vision_config": {"image_size": 56, "patch_size": 14},
    "force_image_size": 56,
    "downsample_ratio": 0.5,
    "max_dynamic_patch": 6,
    "use_thumbnail": True,
    "dynamic_image_size": True,
}
ROWS = 4
"""Of a tile of these sizes."""
IMG = ["<img>", "</img>", "<IMG_CONTEXT>"]


def tiles_text(tiles):
    return f"<img>{'<IMG_CONTEXT>' * ROWS * tiles}</img>"


@pytest.mark.parametrize("model_type", ["internvl_chat", "skywork_chat", "h2ovl_chat"])
def test_the_tokens_of_tiles_stand_between_marks(model_type, tmp_path):
    prompts = HubPrompts(tmp_path, INTERN | {"model_type": model_type}, IMG)
    items = prompts.items((50, 50), (56, 170))
    ids, runs = prompts.place("a<image>\nb <image><image_>", items)
    text = f"a{tiles_text(1)}\nb {tiles_text(4)}<image_>"
    assert ids == prompts.encode(text)
    rows = [i for i, one in enumerate(ids) if one == prompts.token("<IMG_CONTEXT>")]
    assert [i for [(at, n)] in runs for i in range(at, at + n)] == rows


def test_options_of_a_request_have_the_names_of_the_config(tmp_path):
    prompts = HubPrompts(tmp_path, INTERN | {"model_type": "internvl_chat"}, IMG)
    assert [one.sizes["tiles"] for one in prompts.items((56, 170))] == [4]
    assert [one.sizes["tiles"] for one in prompts.items((56, 170), max_dynamic_patch=2)] == [3]
    assert [one.sizes["tiles"] for one in prompts.items((56, 170), dynamic_image_size=False)] == [1]
    without = HubPrompts(
        tmp_path, INTERN | {"model_type": "internvl_chat", "use_thumbnail": False}, IMG
    )
    assert [one.sizes["tiles"] for one in without.items((56, 170))] == [3]


def test_names_of_tiles_are_text_and_join_the_text_beside_them(tmp_path):
    prompts = HubPrompts(tmp_path, INTERN | {"model_type": "NVLM_D"}, ["<|vision_pad|>"])
    items = prompts.items((50, 50), (56, 120))
    ids, runs = prompts.place(">a<image>\n<image>|>", items)
    pads = "<|vision_pad|>" * ROWS
    one = f"<Image><tile_global_thumbnail>{pads}</Image>"
    three = f"<Image><tile_1>{pads}<tile_2>{pads}<tile_global_thumbnail>{pads}</Image>"
    assert ids == prompts.encode(f">a{one}\n{three}|>")
    rows = [i for i, one in enumerate(ids) if one == prompts.token("<|vision_pad|>")]
    assert [i for own in runs for at, n in own for i in range(at, at + n)] == rows


@pytest.mark.parametrize(
    ("size", "grids"),
    [
        ((50, 50), [(2, 2), (1, 1)]),  # as large as one tile
        ((120, 120), [(1, 1), (2, 2)]),  # 3 x 3 would be too many
        ((56, 112), [(2, 3), (1, 2)]),  # the nearest ratio of those with two rows or more
        ((56, 400), [(1, 1), (1, 6)]),  # 4 or 5 columns of two rows would be too many
    ],
)
def test_an_image_has_tiles_of_two_grids(size, grids):
    assert list(two_grids(*size, (56, 56), 6)) == grids


def test_an_image_that_is_alone_is_tiled_twice(tmp_path):
    config = INTERN | {"model_type": "h2ovl_chat", "use_msac": True}
    prompts = HubPrompts(tmp_path, config, IMG)
    (alone,) = prompts.items((56, 112))
    assert alone.sizes["tiles"] == 6 + 2 + 1
    pixels = array(alone, "pixels")
    first, second = prompts.items((56, 112), (50, 50))
    assert (first.sizes["tiles"], second.sizes["tiles"]) == (3, 1)
    assert np.array_equal(pixels[6:], array(first, "pixels"))
    (off,) = prompts.items((56, 112), use_msac=False)
    assert off.sizes == first.sizes
    (square,) = prompts.items((120, 120))
    assert square.sizes["tiles"] == 4 + 1


DEEPSEEK = {
    "model_type": "deepseek_vl_v2",
    "vision_config": {"image_size": 56, "patch_size": 14},
    "candidate_resolutions": [[56, 56], [56, 112], [112, 56], [112, 112]],  # width, height
}


def test_deepseek_tiles_two_images_and_no_more(tmp_path):
    prompts = HubPrompts(tmp_path, DEEPSEEK, ["<image>"])
    wide, tall = prompts.items((56, 100), (100, 40))
    assert [len(array(one, "pixels")) for one in (wide, tall)] == [3, 3]
    lines = 2 * 3 + 1  # of the whole image, and the separator
    assert [one.sizes["rows"] for one in (wide, tall)] == [lines + 2 * 5, lines + 4 * 3]
    assert array(wide, "order").tolist() == [
        *(0, 1, 12, 2, 3, 12), 13, *(4, 5, 8, 9, 12, 6, 7, 10, 11, 12),
    ]  # fmt: skip
    ids, runs = prompts.place("a<image>\n<image>b", [wide, tall])
    rows = wide.sizes["rows"], tall.sizes["rows"]
    assert runs == [[(1, rows[0])], [(2 + rows[0], rows[1])]]
    assert ids.count(prompts.token("<image>")) == sum(rows)
    three = prompts.items((56, 100), (100, 40), (56, 56))
    assert {len(array(one, "pixels")) for one in three} == {2}
    tail = HubPrompts(tmp_path, DEEPSEEK | {"global_view_pos": "tail"}, ["<image>"])
    (wide,) = tail.items((56, 100))
    assert array(wide, "order").tolist()[-7:] == [13, 0, 1, 12, 2, 3, 12]


def test_deepseek_pads_with_the_mean_color(tmp_path):
    prompts = HubPrompts(tmp_path, DEEPSEEK, ["<image>"])
    (wide,) = prompts.items((20, 100))
    whole, left, right = array(wide, "pixels")
    assert (whole[:20] == 127).all()
    assert (whole[24:32] != 127).any()
    assert (left[:16] == 127).all()
    assert (right[-16:] == 127).all()


def test_kimi_shrinks_to_a_number_of_patches_and_pads_right_and_below(tmp_path):
    config = {"model_type": "kimi_vl", "vision_config": {"patch_size": 14}}
    special = ["<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
    prompts = HubPrompts(tmp_path, config, special)
    small, large = prompts.items((30, 60), (280, 420), in_token_limit=150)
    assert (small.sizes["grid"], large.sizes["grid"]) == ((2, 3), (5, 8))  # 14.1 * 14, 21.2 * 14
    pixels = array(small, "pixels")
    assert pixels.shape == (1, 56, 84, 3)
    assert not pixels[:, 30:].any()
    assert not pixels[:, :, 60:].any()
    assert pixels[:, 29, 59].any()
    form = prompts.processor.placeholder("image", 1)
    ids, runs = prompts.place(f"a{form}b{form}", [small, large])
    pads = ["<|media_pad|>" * n for n in (6, 40)]
    assert ids == prompts.encode(
        "".join(a + form.replace("<|media_pad|>", b) for a, b in zip("ab", pads, strict=True))
    )
    assert [own[0][1] for own in runs] == [6, 40]


MOLMO = ["<|endoftext|>", "<im_start>", "<im_end>", "<im_patch>", "<im_col>"]


def test_molmo_puts_the_whole_image_and_the_lines_of_its_crops_before_the_text(tmp_path):
    prompts = HubPrompts(tmp_path, {"model_type": "molmo"}, MOLMO)
    wide, small = prompts.items((500, 1000), (336, 336))
    assert (wide.sizes["grid"], small.sizes["grid"]) == ((2, 4), (1, 1))
    ids, runs = prompts.place(" User: a Assistant:", [wide, small])
    lines = [(12, 12), (20, 36), (12, 12), (12, 12)]
    views = ["<im_start>" + ("<im_patch>" * x + "<im_col>") * y + "<im_end>" for y, x in lines]
    assert ids == prompts.encode("<|endoftext|>" + "".join(views) + " User: a Assistant:")
    patches = [i for i, one in enumerate(ids) if one == prompts.token("<im_patch>")]
    assert [i for own in runs for at, n in own for i in range(at, at + n)] == patches
    assert [sum(n for _, n in own) for own in runs] == [144 + 720, 288]
    assert sorted(array(small, "order")) == list(range(288))
    order = array(wide, "order")[144:].reshape(20, 36) - 144
    crop, square = order // 144, order % 144
    assert crop[0].tolist() == [0] * 10 + [1] * 8 + [2] * 8 + [3] * 10
    assert crop[:, 0].tolist() == [0] * 10 + [4] * 10
    assert square[0, 9:12].tolist() == [9, 2, 3]  # of a crop behind another, two are left out
    assert square[9:12, 0].tolist() == [9 * 12, 2 * 12, 3 * 12]


def test_molmo_marks_what_is_beyond_the_image(tmp_path):
    """The marks of each crop are those of the one behind it."""
    prompts = HubPrompts(tmp_path, {"model_type": "molmo"}, MOLMO)
    (item,) = prompts.items((300, 700), max_crops=2)
    assert item.sizes["grid"] == (1, 2)  # 336 x 560: 240 lines of the image, 48 above
    first, second, last = array(item, "pads").reshape(3, 24, 24)
    assert (last == 2).all()
    for own in (first, second):
        assert (own == own[:, :1]).all()
        assert own[:, 0].tolist() == [1] * 3 + [2] + [0] * 16 + [2] + [1] * 3
    whole, left, right = array(item, "pixels")
    assert not left[:48].any()
    assert left[48:288].any(axis=(1, 2)).all()
    assert np.array_equal(left[:, 224:], right[:, :112])
    assert not whole[:96].any()
    assert whole[96 : 96 + 144].any(axis=(1, 2)).all()
