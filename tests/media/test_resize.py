"""Resizing by the native library: PIL's pixels to the bit, and without the library PIL's own."""

import logging
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from quire import env
from quire.media import image_ops
from quire.media.items import MediaSource
from quire.media.native import library
from quire.platform import native_build
from tests import tiers
from tests.media.conftest import SIDE
from tests.media.files import png

ROUNDS = tiers.amount(60, 2000)
SIZES = [  # height, width -> height, width
    *[(1, 1, 1, 2), (1, 1, 7, 5), (1, 300, 40, 1), (300, 1, 1, 40), (2, 3, 200, 100)],
    *[(1, 60_000, 3, 7), (60_000, 1, 7, 3), (3, 5, 3, 9_000), (5, 3, 9_000, 3)],
    *[(31, 47, 31, 16), (31, 47, 16, 47), (16, 16, 48, 48), (17, 33, 15, 49)],
    # PIL takes rows first where they shrink by more than twice as much as columns do.
    *[(100, 40, 20, 1), (100, 40, 21, 1), (100, 41, 22, 1), (100, 40, 99, 80), (90, 50, 50, 30)],
]


@pytest.fixture
def native():
    """This process resizes with the library."""
    path = library.find_library()
    if not path:
        pytest.skip("no native library here")
    library.load_library(path)
    yield library
    library.load_library("")


def by_pil(pixels, height, width, resample):
    return np.asarray(Image.fromarray(pixels).resize((width, height), resample))


def pictures(rng, height, width):
    """Noise, and black and white: sums that leave 0 to 255."""
    noise = rng.integers(0, 256, (height, width, 3), np.uint8)
    return noise, np.where(noise > 127, np.uint8(255), np.uint8(0))


def check(rng, sizes, resample):
    for pixels in pictures(rng, *sizes[:2]):
        found = library.resize(pixels, *sizes[2:], resample)
        assert np.array_equal(found, by_pil(pixels, *sizes[2:], resample)), (sizes, resample)


@pytest.mark.parametrize("resample", library.FILTERS)
@pytest.mark.usefixtures("native")
def test_sizes_of_all_kinds_have_the_pixels_of_pil(resample):
    rng = np.random.default_rng(resample)
    for sizes in SIZES:
        check(rng, sizes, resample)
    for _ in range(ROUNDS):
        check(rng, [int(size) for size in np.exp(rng.uniform(0, 5.5, 4))], resample)


@pytest.mark.long("compiles three times")
@pytest.mark.parametrize(
    "isa", ["avx2", "sse2", pytest.param("portable", id="no instruction set of x86")]
)
@pytest.mark.usefixtures("native")
def test_lesser_instruction_sets_have_the_pixels_of_pil(isa):
    extra = ("-O1", "-U__AVX2__", "-U__SSE2__") if isa == "portable" else ("-O1",)
    target = "native" if isa == "portable" else isa
    try:
        built = native_build.RESIZE.find_or_build(env.read().cache_dir, target, extra)
    except native_build.NativeBuildError as e:
        pytest.skip(str(e))
    library.load_library(str(built))
    for resample in library.FILTERS:
        test_sizes_of_all_kinds_have_the_pixels_of_pil(resample)


def test_views_of_other_arrays_are_read_as_they_are(native):
    rng = np.random.default_rng(0)
    whole, wide = rng.integers(0, 256, (90, 70, 3), np.uint8), np.zeros((9, 8, 4), np.uint8)
    views = [
        *(whole[5:60, 10:50], whole[::2], whole[:, ::3], whole[::-1], whole[:, ::-1]),
        *(whole[..., ::-1], whole.swapaxes(0, 1), np.asfortranarray(whole), wide[..., :3]),
        *(np.broadcast_to(whole[:1], (30, 70, 3)), np.frombuffer(bytes(1200), np.uint8)),
    ]
    views[-1] = views[-1].reshape(20, 20, 3)
    before = whole.copy()
    for view in views:
        found = native.resize(view, 33, 21, image_ops.BICUBIC)
        assert np.array_equal(found, by_pil(np.ascontiguousarray(view), 33, 21, image_ops.BICUBIC))
    assert np.array_equal(whole, before)


def test_pil_resizes_what_the_library_does_not(native):
    rgb = np.zeros((4, 5, 3), np.uint8)
    grey, with_alpha = np.zeros((4, 5), np.uint8), np.zeros((4, 5, 4), np.uint8)
    for pixels, resample in ((grey, 3), (with_alpha, 3), (rgb, int(Image.Resampling.NEAREST))):
        assert native.resize(pixels, 9, 9, resample) is None
        assert image_ops.resize(pixels, 9, 9, resample).shape == (9, 9, *pixels.shape[2:])
    assert image_ops.resize(rgb, 4, 5) is rgb
    for size in ((0, 3), (3, 0), (-1, 3)):
        assert native.resize(rgb, *size, 3) is None
        with pytest.raises(ValueError, match="must be > 0"):
            image_ops.resize(rgb, *size)


def test_no_memory_is_an_error_of_python(native):
    code = (
        "import resource, sys, numpy as np\n"
        "from quire.media.native import library\n"
        "library.load_library(sys.argv[1])\n"
        "pixels = np.ones((4000, 4000, 3), np.uint8)\n"
        "line = next(x for x in open('/proc/self/status') if x.startswith('VmData'))\n"
        "most = int(line.split()[1]) * 1024 + (4 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (most, most))\n"
        "try: library.resize(pixels, 100, 1500, 3)\n"  # 18 MB between the passes
        "except MemoryError as error: assert 'to resize 4000 x 4000' in str(error); sys.exit(7)\n"
    )
    found = subprocess.run([sys.executable, "-c", code, library.find_library()], check=False)
    assert found.returncode == 7


@pytest.fixture
def afresh(monkeypatch):
    """As in a new process: the library has not been looked for."""
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    library._find.cache_clear()
    yield
    library._find.cache_clear()


@pytest.mark.usefixtures("afresh")
def test_without_a_compiler_pil_resizes_and_the_log_has_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    unbuilt = native_build.RESIZE._replace(flags=("-DANOTHER",))
    monkeypatch.setattr(library, "RESIZE", unbuilt)
    monkeypatch.setattr(native_build.shutil, "which", lambda name: None)
    with caplog.at_level(logging.INFO, "quire"):
        assert [library.find_library(), library.find_library()] == ["", ""]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "PIL resizes them, more slowly. no C++ compiler" in caplog.text
    library.load_library("")
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    assert np.array_equal(image_ops.resize(pixels, 9, 8), by_pil(pixels, 9, 8, image_ops.BICUBIC))


@pytest.mark.usefixtures("afresh")
def test_a_library_that_the_loader_refuses_is_not_given_to_workers(tmp_path, monkeypatch, caplog):
    (broken := tmp_path / "resize.so").write_bytes(b"no library")
    monkeypatch.setattr(native_build.NativeSource, "find_or_build", lambda *given: broken)
    assert library.find_library() == ""
    assert "resize.so" in caplog.text


@pytest.mark.usefixtures("afresh")
def test_the_environment_can_turn_the_library_off(monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_CPU_ISA", "none")
    assert library.find_library() == ""
    assert not caplog.records


@pytest.mark.usefixtures("afresh")
def test_workers_resize_with_the_library_of_their_parent(tmp_path, monkeypatch, make_pipeline):
    """A library that paints everything in one grey."""
    (folder := tmp_path / "native").mkdir()
    (folder / "grey.cpp").write_text(
        'extern "C" long quire_resize(const long* a) {\n'
        "  for (long i = 0; i < a[6] * a[5]; i++) ((unsigned char*)a[4])[i] = 77;\n"
        "  return 0;\n}"
    )
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "RESIZE", native_build.NativeSource("grey", folder))
    if not library.find_library():
        pytest.skip("no compiler here")
    pipeline = make_pipeline()
    (item,) = pipeline.prepare_blocking(
        [MediaSource("image", "messages[0]", data=png())], max_tokens=1000
    )
    assert np.array_equal(
        image_ops.from_tensor(item.media.tensors[0]), np.full((1, SIDE, SIDE, 3), 77)
    )
