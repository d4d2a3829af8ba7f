"""Decoding: which pixels files of each kind give, and which files are refused."""

import io

import numpy as np
import pytest
from PIL import Image

from quire.errors import RequestError
from quire.media import decode
from quire.media.limits import MediaLimits
from quire.media.objects import read_media_data
from quire.media.processor import MediaProcessor, ProcessorFiles
from tests.media.files import encode, numbered_frames, png, png_with_size, video

LIMITS = MediaLimits(pixels=1 << 20)
RNG = np.random.default_rng(0)
PHOTO = Image.fromarray(RNG.integers(0, 256, (8, 12, 3), np.uint8))


@pytest.fixture(autouse=True)
def as_in_a_worker(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)


def read(data, limits=LIMITS):
    return decode.decode_image(data, limits, "messages[0].content[1]").pixels


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP", "JPEG"])
def test_reads_each_format(kind):
    data = encode(PHOTO, kind)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(read(data), expected)


def test_turns_upright_by_exif():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    assert np.array_equal(read(encode(PHOTO, "PNG", exif=exif)), np.rot90(np.asarray(PHOTO), -1))


def test_transparency_becomes_white():
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    assert read(encode(image)).tolist() == [[[255, 255, 255], [0, 0, 0]]]
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([9, 8, 7])
    assert read(encode(palette, transparency=0)).tolist() == [[[255, 255, 255]]]
    assert read(encode(palette)).tolist() == [[[9, 8, 7]]]


def test_other_modes_become_rgb():
    sixteen = Image.fromarray(np.array([[0, 32896, 65535]], np.uint16))
    assert read(encode(sixteen)).tolist() == [[[0] * 3, [128] * 3, [255] * 3]]
    assert read(encode(Image.new("L", (1, 1), 7))).tolist() == [[[7, 7, 7]]]
    cmyk = read(encode(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "TIFF"))
    assert cmyk.tolist() == [[[255, 0, 0]]]


def test_reads_the_first_frame_of_an_animation():
    frames = [Image.new("RGB", (3, 3), (i, 0, 0)) for i in (250, 10)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert read(data)[0, 0].tolist() == [250, 0, 0]


def many_scans():
    data = encode(PHOTO.convert("L"), "JPEG", progressive=True)
    last = data[data.rfind(b"\xff\xda") : -2]
    return data[:-2] + last * 100 + data[-2:]


REFUSED = {
    "scans": (many_scans(), "more than 100 scans"),
    "bomb": (png_with_size(60_000, 60_000), "60000 x 60000 pixels; at most"),
    "lying header": (png_with_size(100, 100), "cannot be decoded"),
    "truncated": (encode(PHOTO, "JPEG")[:-40], "cannot be decoded"),
    "truncated png": (png(300, 200)[:-30], "cannot be decoded"),
    "narrow": (png_with_size(1, 20_000), "one side may be at most 200"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no image"),
    "pdf": (b"%PDF-1.4", "is no image"),
    "empty": (b"", "is no image"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image"),
    "jpeg 2000": (encode(PHOTO, "JPEG2000"), "is no image"),
    "pages": (
        encode(PHOTO, "TIFF", save_all=True, append_images=[PHOTO]),
        "several pages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_the_place_and_the_reason(name):
    data, reason = REFUSED[name]
    with pytest.raises(RequestError, match=reason) as refused:
        read(data)
    assert str(refused.value).startswith("messages[0].content[1] ")


# -- video --------------------------------------------------------------------------------------

PROCESSOR = MediaProcessor(ProcessorFiles({}))


def read_video(data, limits=LIMITS, **options):
    return decode.decode_video(data, PROCESSOR, options, limits, "messages[0].content[0]")


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mpeg4")]
)
def test_gives_the_sampled_frames_and_the_times_of_the_source(kind, codec):
    data = video(numbered_frames(24), kind, codec)
    found = read_video(data, num_frames=6)
    assert found.info.frames_indices == (0, 4, 9, 13, 18, 23)
    assert (found.info.total_num_frames, found.info.fps) == (24, 10.0)
    assert found.info.duration == pytest.approx(2.4)
    brightness = found.frames.mean((1, 2, 3))
    assert np.abs(brightness - np.array(found.info.frames_indices) * 10).max() < 4


def test_samples_by_frames_per_second():
    data = video(numbered_frames(20))
    assert read_video(data, fps=2).info.frames_indices == (0, 6, 12, 19)
    assert len(read_video(data, num_frames=-1).frames) == 20


def test_a_video_whose_times_are_out_of_order_ends():
    """A seek to its last key frame leads back to the first."""
    data = bytearray(video(numbered_frames(20), gop=1))
    steps = data.find(b"stts") + 16
    data[steps : steps + 4] = bytes(4)
    with pytest.raises(RequestError, match="ends after 2 of the 20 frames"):
        read_video(bytes(data))


def test_refuses_videos_over_limits():
    data = video(numbered_frames(20))
    few = MediaLimits(frames=8)
    with pytest.raises(RequestError, match="at most 8 are decoded: ask for fewer"):
        read_video(data, few, num_frames=9)
    with pytest.raises(RequestError, match="at most 2 are decoded"):
        read_video(data, MediaLimits(frame_bytes=2 * 48 * 64 * 3), num_frames=3)
    with pytest.raises(RequestError, match=r"cannot be decoded|ends after|no frames"):
        read_video(data[: len(data) // 3])


@pytest.mark.parametrize("data", [b"", b"#EXTM3U\nhttp://127.0.0.1/x", b"RIFF0000WAVE", png()])
def test_opens_no_other_format_as_video(data):
    with pytest.raises(RequestError, match="is no video"):
        read_video(data)


# -- objects of Python --------------------------------------------------------------------------


def test_reads_images_of_pil_arrays_and_lists():
    pixels = np.asarray(PHOTO)
    given = [PHOTO, pixels, pixels.transpose(2, 0, 1), pixels / 255.0, PHOTO.convert("RGBA")]
    parts = read_media_data({"image": given})
    assert [one.where for one in parts] == [f"multi_modal_data.image[{i}]" for i in range(5)]
    for part in parts:
        assert np.array_equal(part.decoded.pixels, pixels)
    (alone,) = read_media_data({"image": PHOTO})
    assert np.array_equal(alone.decoded.pixels, pixels)


def test_reads_embeddings_by_their_axes():
    rows = np.ones((5, 8), np.float32)
    assert read_media_data({"image": rows})[0].embeds["embeds"].shape == (5, 8)
    assert len(read_media_data({"image": np.ones((2, 5, 8), np.float32)})) == 2
    (named,) = read_media_data({"image": {"image_embeds": rows, "image_grid_thw": [[1, 2, 2]]}})
    assert named.embeds["image_grid_thw"].tolist() == [[1, 2, 2]]


def test_reads_videos_with_metadata():
    frames = numbered_frames(4)
    plain, listed, described = read_media_data(
        {"video": [frames, [Image.fromarray(one) for one in frames],
                   (frames, {"fps": 4, "frames_indices": [0, 2, 4, 6], "total_num_frames": 8})]}
    )  # fmt: skip
    assert plain.decoded.info.frames_indices == (0, 1, 2, 3)
    assert np.array_equal(listed.decoded.frames, frames)
    assert (described.decoded.info.fps, described.decoded.info.duration) == (4.0, 2.0)


def test_reads_samples_with_and_without_a_rate():
    plain, rated = read_media_data({"audio": [np.zeros(9), (np.zeros(9, np.int16), 8000)]})
    assert (plain.decoded.sampling_rate, rated.decoded.sampling_rate) == (0, 8000)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"image": None, "picture": PHOTO}, "has 'picture'"),
        ({"image": [None]}, "has no uuid"),
        ({"image": "path.png"}, "got a str"),
        ({"image": np.zeros(4)}, "must have the shape"),
        ({"image": np.full((4, 4, 3), np.nan)}, "pixels of 0 to 1"),
        ({"image": np.full((4, 4, 3), 300)}, "pixels of 0 to 255"),
        ({"image": Image.new("RGB", (1, 20_000))}, "at most 200"),
        ({"image": {"a_embeds": [1.0], "b_embeds": [1.0]}}, "one entry of embeddings"),
        ({"image": {"a": ["x"]}}, r"image\[0\]\.a must be an array of numbers"),
        ({"video": (numbered_frames(2), {"frames_indices": [0]})}, "one entry for each frame"),
        ({"video": []}, "at least one frame"),
        ([PHOTO], "must be a dict"),
    ],
)
def test_refuses_objects_that_are_no_media(data, reason):
    if data == {"video": []}:
        data = {"video": [[Image.new("RGB", (2, 2)), Image.new("RGB", (3, 2))]]}
    with pytest.raises(RequestError, match=reason):
        read_media_data(data)


def test_arrays_by_name_are_read_without_those_that_are_empty():
    (item,) = read_media_data({"image": {"a": [1.0, 2.0], "b": None, "c": np.zeros((2, 0))}})
    assert item.arrays is not None
    assert {name: one.tolist() for name, one in item.arrays.items()} == {"a": [1.0, 2.0]}


def test_uuids_go_with_their_items():
    parts = read_media_data({"image": [PHOTO, None]}, {"image": ["a", "b"]})
    assert [one.uuid for one in parts] == ["a", "b"]
    assert [one.uuid for one in read_media_data(None, {"image": ["c"]})] == ["c"]
    with pytest.raises(RequestError, match="2 entries for 1 items"):
        read_media_data({"image": PHOTO}, {"image": ["a", "b"]})
